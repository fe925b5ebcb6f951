"""How trials run, together and alone: on batches that are given, or on the arguments of a first call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from plait.fusion.check import check_models
from plait.fusion.errors import FusionError
from plait.fusion.module import FusedModule
from plait.fusion.shared import Shared

# What products of float32 may be rounded to on a GPU: convolutions are, unless torch is configured otherwise.
TF32_EPS = 2.0**-10


class NothingToCompareError(FusionError):
    """What a model returns holds nothing that can be seen."""


class Candidate:
    """Trials to be fused, and how they run on their batches, 0 and 1: together and alone.

    `models` are the plain models, as whoever makes them made them; they stay as they are. `rounding` is that
    of the coarsest numbers which are computed with. `in_stages` says that trials are cut, so that the fused
    form opens some of the modules, and `loss_alone` that losses are computed trial by trial; verification
    sets it where they must be.
    """

    in_stages = False
    loss_alone = True

    def __init__(
        self, models: Sequence[nn.Module], seeds: Sequence[int], ages: Sequence[int], rounding: float
    ) -> None:
        self.models, self.seeds, self.ages, self.rounding = models, seeds, ages, rounding

    def some(self, trials: Sequence[int]) -> Candidate:
        """The same for some of the trials."""
        raise NotImplementedError

    def prepare(self, trial: int) -> None:
        """Give the model of a trial, which is borrowed, the weights it begins with, where not its own."""

    def fuse(self, models: Sequence[nn.Module], unfused: Mapping[str, str]) -> Sequence[FusedModule]:
        """These models fused as they are to be trained: in one module, or in one for each stage."""
        check_models(models)
        return [FusedModule(list(models), list(self.seeds), list(self.ages), unfused)]

    def together(self, fused: Sequence[FusedModule], batch: int) -> tuple[Any, Tensor]:
        """The outputs of all trials, trials first, and their losses."""
        raise NotImplementedError

    def alone(self, model: nn.Module, trial: int, batch: int) -> tuple[Any, Tensor]:
        """What one trial's plain model gives for its own batch, and its loss."""
        raise NotImplementedError


class BatchCandidate(Candidate):
    """Trials of `fuse` on batches that plain models take: a tensor, a tuple of them, or named ones.

    The first batch is the same for all trials; in the second each trial has one of its own: where the batches
    are not of one shape, a copy with numbers that are a little smaller. The loss is a weighting of all that a
    model returns.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        seeds: Sequence[int],
        ages: Sequence[int],
        batches: Sequence[Any],
        trials: Sequence[int] | None = None,
    ) -> None:
        self._numbers = list(range(len(models)) if trials is None else trials)
        self._every = (models, seeds, ages, batches)
        own, drawing, behind = (_at_numbers(x, self._numbers) for x in (models, seeds, ages))
        super().__init__(own, drawing, behind, _rounding_of(models[0]))
        self._batches = [_arguments(batch) for batch in batches]
        if not self._batches:
            raise FusionError("fuse: verify found no batches, expected one or more that the models take")
        shapes = [
            [(x.shape, x.dtype) for x in pytree.tree_leaves(b) if isinstance(x, Tensor)]
            for b in self._batches
        ]
        self._are_alike = all(one == shapes[0] for one in shapes)

    def some(self, trials: Sequence[int]) -> BatchCandidate:
        return BatchCandidate(*self._every, _at_numbers(self._numbers, trials))

    def _batch(self, trial: int, batch: int) -> Any:
        number = self._numbers[trial]
        place = batch % len(self._batches)
        if batch == 1 and self._are_alike:
            place = (number + 1) % len(self._batches)
        shrunk = 1.0 - 0.01 * number if batch == 1 and not self._are_alike else 1.0

        def own(x: Tensor) -> Tensor:
            return x * shrunk if shrunk != 1.0 and x.is_floating_point() else x.clone()

        return pytree.tree_map_only(Tensor, own, self._batches[place])

    def together(self, fused: Sequence[FusedModule], batch: int) -> tuple[Any, Tensor]:
        """What the models return, and its weighting."""
        (whole,) = fused
        each = [self._batch(trial, batch) for trial in range(whole.trials)]
        if batch == 1:
            flat = [pytree.tree_flatten(one) for one in each]
            parts = zip(*(leaves for leaves, _ in flat))
            leaves = [torch.stack(x) if isinstance(x[0], Tensor) else x[0] for x in parts]
            args, kwargs = pytree.tree_unflatten(leaves, flat[0][1])
        else:
            args, kwargs = pytree.tree_map_only(Tensor, Shared, each[0])
        outputs = whole(*args, **kwargs)
        return outputs, _total_of_each(outputs, whole.trials)

    def alone(self, model: nn.Module, trial: int, batch: int) -> tuple[Any, Tensor]:
        """What one trial's plain model returns for its own batch, and its weighting."""
        args, kwargs = self._batch(trial, batch)
        outputs = model(*args, **kwargs)
        return outputs, _total(outputs)


class CallCandidate(Candidate):
    """Trials on the arguments of a fused module's call, with the weights that it has now.

    Both batches are those arguments: others might be none that the models take. The loss is a weighting of
    all that the call returns.
    """

    def __init__(
        self,
        fused: FusedModule,
        models: Sequence[nn.Module],
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        trials: Sequence[int] | None = None,
    ) -> None:
        self._fused, self._every, self._function = fused, models, function
        self._given = (args, kwargs)
        self._numbers = list(range(fused.trials)) if trials is None else list(trials)
        seeds, ages = (_at_numbers(x.tolist(), self._numbers) for x in (fused.seeds, fused.ages))
        super().__init__(_at_numbers(models, self._numbers), seeds, ages, _rounding_of(fused.module))

    def some(self, trials: Sequence[int]) -> CallCandidate:
        numbers = _at_numbers(self._numbers, trials)
        return CallCandidate(self._fused, self._every, self._function, *self._given, numbers)

    def prepare(self, trial: int) -> None:
        """Give a model what its trial has in the fused module: weights, buffers, modes, what is frozen."""
        _follow(self.models[trial], self._fused.module, lambda x: x.detach()[self._numbers[trial]].clone())

    def fuse(self, models: Sequence[nn.Module], unfused: Mapping[str, str]) -> list[FusedModule]:
        """The trials in a module of their own."""
        made = FusedModule(list(models), list(self.seeds), list(self.ages), unfused)
        index = torch.tensor(self._numbers, device=self._fused.seeds.device)
        made.to(self._fused.seeds.device)
        _follow(made.module, self._fused.module, lambda x: x.detach()[index])
        return [made]

    def together(self, fused: Sequence[FusedModule], batch: int) -> tuple[Any, Tensor]:
        """What the call returns for all trials, and its weighting."""
        (whole,) = fused
        index = torch.tensor(self._numbers)

        def given(x: Any) -> Any:
            if isinstance(x, Shared):
                return Shared(x.tensor.detach().clone())
            return x.detach()[index.to(x.device)] if isinstance(x, Tensor) else x

        args, kwargs = pytree.tree_map(given, self._given)
        outputs = whole.call(self._function, *args, **kwargs)
        return outputs, _total_of_each(outputs, whole.trials)

    def alone(self, model: nn.Module, trial: int, batch: int) -> tuple[Any, Tensor]:
        """What one trial's plain model returns, and its weighting."""

        def given(x: Any) -> Any:
            if isinstance(x, Shared):
                return x.tensor.detach().clone()
            return x.detach()[self._numbers[trial]].clone() if isinstance(x, Tensor) else x

        args, kwargs = pytree.tree_map(given, self._given)
        outputs = self._function(model, *args, **kwargs)
        return outputs, _total(outputs)


def _follow(model: nn.Module, fused: nn.Module, pick: Callable[[Tensor], Tensor]) -> None:
    """Give `model` the tensors that `pick` takes of the fused ones, their modes and what is frozen."""
    parts, own = dict(fused.named_modules()), dict(model.named_modules())
    for path, part in own.items():
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
    """How coarsely numbers are rounded beyond their own type: by autocast, or by products in TF32."""
    device = next((p.device.type for p in model.parameters()), "cpu")
    if torch.is_autocast_enabled(device):
        return torch.finfo(torch.get_autocast_dtype(device)).eps
    on_gpu = any(p.is_cuda and p.dtype == torch.float32 for p in model.parameters())
    return TF32_EPS if on_gpu else 0.0


def _at_numbers(values: Sequence[Any], numbers: Sequence[int]) -> list[Any]:
    return [values[number] for number in numbers]


def _total_of_each(outputs: Any, trials: int) -> Tensor:
    """The weighting of what each trial returned."""
    return torch.stack([_total(_at(outputs, trial)) for trial in range(trials)])


def _at(outputs: Any, trial: int) -> Any:
    return pytree.tree_map_only(Tensor, lambda x: x[trial], outputs)


def _arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch), {}) if isinstance(batch, (tuple, list)) else ((batch,), {})


def _total(outputs: Any) -> Tensor:
    """Something to differentiate: a fixed weighting of all numbers that a model returned."""
    tensors = [x for x in pytree.tree_leaves(outputs) if isinstance(x, Tensor) and x.is_floating_point()]
    parts = [
        (x * torch.linspace(0.5, 1.5, x.numel(), dtype=x.dtype, device=x.device).view(x.shape)).sum()
        for x in tensors
    ]
    if not parts:
        raise NothingToCompareError(
            f"verify: the model returns {_kind(outputs)}, in which no tensors of numbers are seen; return a "
            f"tensor, a tuple, a dict or a named tuple of tensors"
        )
    return torch.stack([part.to(parts[0]) for part in parts]).sum()


def _kind(outputs: Any) -> str:
    return "nothing" if outputs is None else f"a {type(outputs).__name__}"
