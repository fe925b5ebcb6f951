"""How trials run, fused and singly, on given batches or on the arguments of a first call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from plait.fusion.check import check_models
from plait.fusion.errors import FusionError
from plait.fusion.module import FusedModule
from plait.fusion.shared import Shared

# The precision of float32 products in TF32, which torch uses for convolutions on a GPU by default.
TF32_EPS = 2.0**-10


class NothingToCompareError(FusionError):
    """The output of a model contains no tensors that could be compared."""


class Candidate(ABC):
    """Trials to be fused, and how they run on their batches, 0 and 1: fused and singly.

    `models` are the plain models, which are not changed. `rounding` is the precision of the coarsest dtype in
    the computation. `in_stages`: trials are cut into stages, so the fused form traces through some modules.
    `loss_alone`: losses are computed trial by trial; verification sets it if that is necessary.
    """

    in_stages = False
    loss_alone = True

    def __init__(
        self, models: Sequence[nn.Module], seeds: Sequence[int], rng_steps: Sequence[int], rounding: float
    ) -> None:
        self.models, self.seeds, self.rng_steps, self.rounding = models, seeds, rng_steps, rounding

    def prepare(self, trial: int) -> None:  # noqa: B027  (most have their own)
        """Load the initial weights of a trial into its model, if the model does not have them already."""

    def fuse(self, trials: Sequence[int], unfused: Mapping[str, str]) -> Sequence[FusedModule]:
        """Fuse some trials as they will be trained: in one module, or in one per stage."""
        check_models([self.models[trial] for trial in trials])
        return [self._module(trials, unfused)]

    def _module(self, trials: Sequence[int], unfused: Mapping[str, str]) -> FusedModule:
        seeds, rng_steps = ([x[trial] for trial in trials] for x in (self.seeds, self.rng_steps))
        return FusedModule([self.models[trial] for trial in trials], seeds, rng_steps, unfused)

    @abstractmethod
    def together(self, fused: Sequence[FusedModule], trials: Sequence[int], batch: int) -> tuple[Any, Tensor]:
        """The outputs of the fused trials, trials axis first, and their losses."""

    @abstractmethod
    def alone(self, trial: int, batch: int) -> tuple[Any, Tensor]:
        """The output of one trial's plain model for its batch, and its loss."""


class CallCandidate(Candidate):
    """Trials whose models are called; the loss is a weighted sum of all outputs."""

    def _call(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    @abstractmethod
    def _arguments(self, trial: int, batch: int) -> tuple[Any, Any]:
        """The arguments for the plain model of a trial, in the usual memory layout."""

    @abstractmethod
    def _stacked(self, trials: Sequence[int], batch: int) -> tuple[Any, Any]:
        """The arguments for the fused module of some trials."""

    def together(self, fused: Sequence[FusedModule], trials: Sequence[int], batch: int) -> tuple[Any, Tensor]:
        (whole,) = fused
        args, kwargs = self._stacked(trials, batch)
        outputs = whole.call(self._call, *args, **kwargs)
        each = (pytree.tree_map_only(Tensor, itemgetter(n), outputs) for n in range(whole.trials))
        return outputs, torch.stack([_total(trial_outputs) for trial_outputs in each])

    def alone(self, trial: int, batch: int) -> tuple[Any, Tensor]:
        args, kwargs = self._arguments(trial, batch)
        outputs = self._call(self.models[trial], *args, **kwargs)
        return outputs, _total(outputs)


class BatchCandidate(CallCandidate):
    """Trials on batches for the plain models: a tensor, a tuple, or a dict of named arguments.

    Batch 0 is the same for all trials. Batch 1 differs by trial; if the given batches differ in shape, it is
    a copy with slightly smaller values.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        seeds: Sequence[int],
        rng_steps: Sequence[int],
        batches: Sequence[Any],
    ) -> None:
        if not batches:
            raise FusionError("fuse: verify found no batches, expected one or more that the models take")
        super().__init__(models, seeds, rng_steps, _rounding_of(models[0]))
        self._batches = [_as_arguments(batch) for batch in batches]
        tensors = [[x for x in pytree.tree_leaves(b) if isinstance(x, Tensor)] for b in self._batches]
        self._are_alike = len({str([(x.shape, x.dtype) for x in each]) for each in tensors}) == 1

    def _arguments(self, trial: int, batch: int) -> tuple[Any, Any]:
        index = trial + 1 if batch == 1 and self._are_alike else batch
        factor = 1.0 - 0.01 * trial if batch == 1 and not self._are_alike else 1.0

        def varied(x: Tensor) -> Tensor:
            return x * factor if factor != 1.0 and x.is_floating_point() else x.clone()

        arguments: tuple[Any, Any] = pytree.tree_map_only(
            Tensor, varied, self._batches[index % len(self._batches)]
        )
        return arguments

    def _stacked(self, trials: Sequence[int], batch: int) -> tuple[Any, Any]:
        each = [self._arguments(trial, batch) for trial in trials]
        stacked: tuple[Any, Any]
        if batch == 0:
            stacked = pytree.tree_map_only(Tensor, Shared, each[0])
        else:
            parts = zip(*(pytree.tree_leaves(arguments) for arguments in each))
            leaves = [torch.stack(x) if isinstance(x[0], Tensor) else x[0] for x in parts]
            stacked = pytree.tree_unflatten(leaves, pytree.tree_structure(each[0]))
        return stacked


class FirstCallCandidate(CallCandidate):
    """Trials on the arguments of a fused module's call, with its current weights.

    Both batches are those arguments, as the models may not accept others.
    """

    def __init__(
        self,
        fused: FusedModule,
        models: Sequence[nn.Module],
        function: Callable[..., Any],
        arguments: tuple[Any, Any],
    ) -> None:
        super().__init__(models, fused.seeds.tolist(), fused.ages.tolist(), _rounding_of(fused.module))
        self._fused, self._call, self._given = fused, function, arguments  # type: ignore[method-assign]

    def _arguments(self, trial: int, batch: int) -> tuple[Any, Any]:
        return self._parts(trial, lambda x: x)

    def _stacked(self, trials: Sequence[int], batch: int) -> tuple[Any, Any]:
        return self._parts(torch.tensor(trials), Shared)

    def _parts(self, index: Any, shared: Callable[[Tensor], Any]) -> tuple[Any, Any]:
        """The arguments of some trials; `shared` converts arguments that all trials share."""

        def part(x: Any) -> Any:
            if isinstance(x, Shared):
                return shared(x.tensor.detach().clone())
            return x.detach()[index].clone() if isinstance(x, Tensor) else x

        arguments: tuple[Any, Any] = pytree.tree_map(part, self._given)
        return arguments

    def prepare(self, trial: int) -> None:
        _follow(self.models[trial], self._fused.module, lambda x: x.detach()[trial].clone())

    def fuse(self, trials: Sequence[int], unfused: Mapping[str, str]) -> Sequence[FusedModule]:
        device = self._fused.seeds.device
        made, index = self._module(trials, unfused).to(device), torch.tensor(trials, device=device)
        _follow(made.module, self._fused.module, lambda x: x.detach()[index])
        return [made]


def _follow(model: nn.Module, fused: nn.Module, pick: Callable[[Tensor], Tensor]) -> None:
    """Copy tensors, selected by `pick`, training modes and requires_grad from the fused module to `model`."""
    parts, modules = dict(fused.named_modules()), dict(model.named_modules())
    for path, part in modules.items():
        if path in parts:
            part.training = parts[path].training
    for kind in ("named_parameters", "named_buffers"):
        tensors = dict(getattr(fused, kind)(remove_duplicate=False))
        for name, tensor in getattr(model, kind)():
            if name in tensors:
                tensor.data = pick(tensors[name])
                if tensor.requires_grad != tensors[name].requires_grad:
                    tensor.requires_grad_(tensors[name].requires_grad)


def _rounding_of(model: nn.Module) -> float:
    """The precision of the computation, if autocast or TF32 makes it coarser than the dtype."""
    device = next((p.device.type for p in model.parameters()), "cpu")
    if torch.is_autocast_enabled(device):
        return torch.finfo(torch.get_autocast_dtype(device)).eps
    on_gpu = any(p.is_cuda and p.dtype == torch.float32 for p in model.parameters())
    return TF32_EPS if on_gpu else 0.0


def _as_arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
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
