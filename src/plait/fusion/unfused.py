"""Submodules that run trial by trial inside a fused model, because they must or because someone asks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from plait.core.names import did_you_mean
from plait.fusion.errors import FusionError, user_line
from plait.fusion.install import Slot, recurrent_in, refresh_recurrent, slots_of
from plait.fusion.patches import Patch
from plait.fusion.per_trial import PerTrial
from plait.fusion.tensor import Trials, TrialTensor


def patch_unfused(module: nn.Module, names: Iterable[str], trials: Trials) -> None:
    """Let the submodules called `names` run trial by trial; "" is the whole model."""
    parts = dict(module.named_modules())
    for name in names:
        if name not in parts:
            raise FusionError(f"fuse: unfused={name!r} names no submodule{did_you_mean(name, parts)}")
        part = parts[name]
        part.forward = Patch(_OneByOne(part.forward, trials), part)


class _OneByOne:
    """Runs a module's forward for one trial after another, on trial tensors of one trial each.

    Python may look at values there, and the random streams are the trials' own.
    """

    def __init__(self, forward: Callable[..., Any], trials: Trials) -> None:
        self.forward = forward
        self.trials = trials

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        streams = self.trials.streams
        assert streams is not None, "an unfused part ran outside of its fused model"
        slots = slots_of(module)
        slices = [_slices(slot.tensors[slot.name], self.trials.count) for slot in slots]
        rows = self.trials.rows
        singles = [
            Trials(1, streams.of_trial(number), None if rows is None else rows.of_trial(number))
            for number in range(self.trials.count)
        ]
        outcomes, changed = [], []
        for number, one in enumerate(singles):
            own = [None if pieces is None else TrialTensor(pieces[number], one) for pieces in slices]
            own_args, own_kwargs = _slice_of((args, kwargs), number, one)
            with _values_of(module, number), _held(module, slots, own) as reassigned:
                outcomes.append(self.forward(*own_args, **own_kwargs))
            changed.append(reassigned)
        streams.follow([one.streams for one in singles if one.streams is not None])
        self._keep_reassigned(slots, changed)
        return self._join(outcomes)

    def _keep_reassigned(self, slots: list[Slot], changed: list[dict[int, Tensor]]) -> None:
        for index in changed[0]:
            pieces = [_inner(one[index]) for one in changed]
            slots[index].tensors[slots[index].name] = TrialTensor(torch.cat(pieces), self.trials)

    def _join(self, outcomes: list[Any]) -> Any:
        flat = [pytree.tree_flatten(outcome) for outcome in outcomes]
        if any(spec != flat[0][1] for _, spec in flat):
            raise FusionError(f"{user_line()}\n  returns something of another structure in some trials")
        joined = [self._join_one(values) for values in zip(*(values for values, _ in flat))]
        return pytree.tree_unflatten(joined, flat[0][1])

    def _join_one(self, values: tuple[Any, ...]) -> Any:
        if not isinstance(values[0], Tensor):
            return values[0]
        shapes = sorted({tuple(value.shape) for value in values})
        if len(shapes) > 1:
            raise FusionError(
                f"{user_line()}\n  has another shape in some trials: {shapes}; fused trials have one"
            )
        return TrialTensor(torch.cat([_inner(value) for value in values]), self.trials)


def _inner(value: Tensor) -> Tensor:
    return value.stacked if isinstance(value, TrialTensor) else value.unsqueeze(0)


def _slices(tensor: Tensor | None, count: int) -> list[Tensor] | None:
    """A tensor's trials, each with a trials axis of one.

    The pieces of a parameter come from one split, whose gradient is one join; those of a buffer are plain
    views, since the module may write into them.
    """
    if tensor is None:
        return None
    assert isinstance(tensor, TrialTensor)
    if tensor.stacked.requires_grad:
        return list(tensor.stacked.split(1))
    return [tensor.stacked[number : number + 1] for number in range(count)]


def _slice_of(values: Any, number: int, one: Trials) -> Any:
    def pick(value: Any) -> Any:
        if isinstance(value, TrialTensor):
            return TrialTensor(value.stacked[number : number + 1], one)
        return value.of(number) if isinstance(value, PerTrial) else value

    return pytree.tree_map(pick, values)


@contextmanager
def _held(module: nn.Module, slots: list[Slot], own: list[TrialTensor | None]) -> Iterator[dict[int, Tensor]]:
    """Within, `module` holds `own`; after, what it held. Yields the buffers it re-assigned, by slot."""
    recurrent = recurrent_in(module)
    before = [slot.tensors[slot.name] for slot in slots]
    for slot, mine in zip(slots, own):
        slot.tensors[slot.name] = mine
    refresh_recurrent(recurrent)
    reassigned: dict[int, Tensor] = {}
    try:
        yield reassigned
    finally:
        for index, (slot, tensor, mine) in enumerate(zip(slots, before, own)):
            now = slot.tensors[slot.name]
            if slot.is_buffer and now is not mine and now is not None:
                reassigned[index] = now
            slot.tensors[slot.name] = tensor
        refresh_recurrent(recurrent)


@contextmanager
def _values_of(module: nn.Module, number: int) -> Iterator[None]:
    """Within, the module's hyperparameters are those of one trial."""
    found = [
        (part, name, value)
        for part in module.modules()
        for name, value in vars(part).items()
        if isinstance(value, PerTrial)
    ]
    for part, name, value in found:
        setattr(part, name, value.of(number))
    try:
        yield
    finally:
        for part, name, value in found:
            setattr(part, name, value)
