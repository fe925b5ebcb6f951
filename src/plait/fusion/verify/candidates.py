"""How trials run, fused and singly, on the arguments of two calls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from plait.fusion.check import check_models
from plait.fusion.errors import FusionError
from plait.fusion.module import FusedModule
from plait.fusion.shared_input import Shared
from plait.fusion.sharing import held_once

# The precision of float32 products in TF32, which torch uses for convolutions on a GPU by default.
TF32_EPS = 2.0**-10
# The positional and named arguments of a call.
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class NothingToCompareError(FusionError):
    """The output of a model contains no tensors that could be compared."""


class Candidate(ABC):
    """Trials to be fused, and how they run on their batches, 0 and 1: fused and singly.

    `models` are the plain models, which are not changed. `rounding` is the precision of the coarsest dtype in
    the computation. `in_stages`: trials are cut into stages, so the fused form does not call all modules.
    `loss_alone`: losses are computed trial by trial; verification sets it if that is necessary.
    """

    in_stages = False
    loss_alone = True
    share = "auto"

    def __init__(
        self, models: Sequence[nn.Module], seeds: Sequence[int], rng_steps: Sequence[int], rounding: float
    ) -> None:
        self.models, self.seeds, self.rng_steps, self.rounding = models, seeds, rng_steps, rounding

    def prepare(self, trial: int) -> None:  # noqa: B027  (most have their own)
        """Load the initial weights of a trial into its model, if the model does not have them already."""

    def fuse(self, trials: Sequence[int], unfused: Mapping[str, str]) -> FusedModule:
        """Fuse some trials as they will be trained."""
        check_models([self.models[trial] for trial in trials])
        return self._module(trials, unfused)

    def _module(self, trials: Sequence[int], unfused: Mapping[str, str]) -> FusedModule:
        seeds, rng_steps = ([x[trial] for trial in trials] for x in (self.seeds, self.rng_steps))
        models = [self.models[trial] for trial in trials]
        made = FusedModule(models, seeds, rng_steps, unfused, self._shared(models))
        made.draws_before, made.warns_of_draws = 0, False
        return made

    def _shared(self, models: Sequence[nn.Module]) -> Iterable[str]:
        """The names of the tensors that these models share."""
        return held_once(models, self.share)

    @abstractmethod
    def together(self, fused: FusedModule, trials: Sequence[int], batch: int) -> tuple[Any, Tensor]:
        """The outputs of the fused trials, trials axis first, and their losses."""

    @abstractmethod
    def alone(self, trial: int, batch: int) -> tuple[Any, Tensor]:
        """The output of one trial's plain model for its batch, and its loss."""


class CallCandidate(Candidate):
    """Trials on two calls of their fused module, with its current weights; the loss is a sum of all outputs.

    `calls` are the arguments of `function`, after the module, for batches 0 and 1. `own` are those of each
    trial's plain model for batch 1, where its slice of the call would have another memory layout.
    """

    def __init__(
        self,
        fused: FusedModule,
        models: Sequence[nn.Module],
        function: Callable[..., Any],
        calls: tuple[Arguments, Arguments],
        own: Sequence[Arguments] = (),
    ) -> None:
        super().__init__(models, fused.stream_seeds.tolist(), fused.ages.tolist(), _rounding_of(fused.module))
        self._fused, self._function, self._calls, self._own = fused, function, calls, own

    def together(self, fused: FusedModule, trials: Sequence[int], batch: int) -> tuple[Any, Tensor]:
        args, kwargs = self._arguments(batch, torch.tensor(trials), Shared)
        outputs = fused.call(self._function, *args, **kwargs)
        each = (pytree.tree_map_only(Tensor, itemgetter(n), outputs) for n in range(fused.trials))
        return outputs, torch.stack([_total(trial_outputs) for trial_outputs in each])

    def alone(self, trial: int, batch: int) -> tuple[Any, Tensor]:
        args, kwargs = self._arguments(batch, trial, lambda x: x)
        if batch == 1 and self._own:
            args, kwargs = pytree.tree_map_only(Tensor, torch.clone, self._own[trial])
        outputs = self._function(self.models[trial], *args, **kwargs)
        return outputs, _total(outputs)

    def _arguments(self, batch: int, index: Any, shared: Callable[[Tensor], Any]) -> Arguments:
        """The arguments of some trials; `shared` converts arguments that all trials share."""

        def part(x: Any) -> Any:
            if isinstance(x, Shared):
                return shared(x.tensor.detach().clone())
            return x.detach()[index].clone() if isinstance(x, Tensor) else x

        arguments: Arguments = pytree.tree_map(part, self._calls[batch])
        return arguments

    def _shared(self, models: Sequence[nn.Module]) -> Iterable[str]:
        return self._fused.shared

    def prepare(self, trial: int) -> None:
        _follow(self.models[trial], self._fused, lambda x: x.detach()[trial].clone(), torch.clone)

    def fuse(self, trials: Sequence[int], unfused: Mapping[str, str]) -> FusedModule:
        device = self._fused.seeds.device
        made, index = self._module(trials, unfused).to(device), torch.tensor(trials, device=device)
        _follow(made.module, self._fused, lambda x: x.detach()[index], _base_of)
        return made


def calls_on(batches: Sequence[Any], trials: int) -> tuple[tuple[Arguments, Arguments], Sequence[Arguments]]:
    """`calls` and `own` of a `CallCandidate` on batches for the plain models.

    A batch is a tensor, a tuple, or a dict of named arguments. The first is that of all trials. Then each
    trial has another, or the second with slightly smaller values, if the batches differ in shape.
    """
    if not batches:
        raise FusionError("fuse: verify found no batches, expected one or more that the models take")
    given = [_as_arguments(batch) for batch in batches]
    tensors = [[x for x in pytree.tree_leaves(b) if isinstance(x, Tensor)] for b in given]
    if len({str([(x.shape, x.dtype) for x in each]) for each in tensors}) == 1:
        own = [given[(trial + 1) % len(given)] for trial in range(trials)]
    else:
        own = [_scaled(given[1], 1.0 - 0.01 * trial) for trial in range(trials)]
    parts = zip(*(pytree.tree_leaves(arguments) for arguments in own))
    leaves = [torch.stack(x) if isinstance(x[0], Tensor) else x[0] for x in parts]
    shared: Arguments = pytree.tree_map_only(Tensor, Shared, given[0])
    return (shared, pytree.tree_unflatten(leaves, pytree.tree_structure(own[0]))), own


def _scaled(arguments: Arguments, factor: float) -> Arguments:
    scaled: Arguments = pytree.tree_map_only(
        Tensor, lambda x: x * factor if x.is_floating_point() else x, arguments
    )
    return scaled


def _follow(
    model: nn.Module,
    fused: FusedModule,
    pick: Callable[[Tensor], Tensor],
    pick_shared: Callable[[Tensor], Tensor],
) -> None:
    """Copy tensors, training modes and requires_grad from the fused module to `model`.

    `pick` selects from tensors of all trials, `pick_shared` from those that trials share.
    """
    parts, modules = dict(fused.module.named_modules()), dict(model.named_modules())
    shared = fused.shared_ids()
    for path, part in modules.items():
        if path in parts:
            part.training = parts[path].training
    for kind in ("named_parameters", "named_buffers"):
        tensors = dict(getattr(fused.module, kind)(remove_duplicate=False))
        for name, tensor in getattr(model, kind)():
            if name in tensors:
                picked = pick_shared if id(tensors[name]) in shared else pick
                tensor.data = picked(tensors[name]).detach()
                if tensor.requires_grad != tensors[name].requires_grad:
                    tensor.requires_grad_(tensors[name].requires_grad)


def _base_of(tensor: Tensor) -> Tensor:
    """A shared tensor for an array that is only compared: of a buffer, which may be written to, a copy."""
    return tensor if isinstance(tensor, nn.Parameter) else tensor.clone()


def _rounding_of(model: nn.Module) -> float:
    """The precision of the computation, if autocast or TF32 makes it coarser than the dtype."""
    device = next((p.device.type for p in model.parameters()), "cpu")
    if torch.is_autocast_enabled(device):
        return torch.finfo(torch.get_autocast_dtype(device)).eps
    on_gpu = any(p.is_cuda and p.dtype == torch.float32 for p in model.parameters())
    return TF32_EPS if on_gpu else 0.0


def _as_arguments(batch: Any) -> Arguments:
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch), {}) if isinstance(batch, (tuple, list)) else ((batch,), {})


def _total(outputs: Any) -> Tensor:
    """A scalar to differentiate: a fixed weighted sum of all numbers in the output."""
    tensors = [x for x in pytree.tree_leaves(outputs) if isinstance(x, Tensor) and x.is_floating_point()]
    parts = [
        (x * torch.linspace(0.5, 1.5, x.numel(), dtype=x.dtype, device=x.device).view(x.shape)).sum()
        for x in tensors
    ]
    if not parts:
        raise NothingToCompareError(
            f"verify: the model returns {_kind(outputs)}, in which torch sees no tensors of numbers; return "
            f"a tensor, a tuple, a dict or a named tuple of tensors"
        )
    return torch.stack([part.to(parts[0]) for part in parts]).sum()


def _kind(outputs: Any) -> str:
    return "nothing" if outputs is None else f"a {type(outputs).__name__}"
