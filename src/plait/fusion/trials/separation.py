"""Tensors that all trials share, and what happens when a forward writes to one: each trial gets a copy.

A shared tensor stays a plain tensor in a forward. `TrialMode` sees every call, and asks here before one that
writes to memory of a shared tensor; the call, and all later ones of the forward, get the trials' copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from plait.fusion.dispatch.fallback import is_in_place
from plait.fusion.dispatch.install import Slot, separate
from plait.fusion.dispatch.registry import RULES, Arguments, Function, Options, spellings
from plait.fusion.dispatch.tensor import Trials, TrialTensor
from plait.fusion.errors import FusionError, user_line
from plait.fusion.rules.hooks import set_data

# Norms write to their running statistics in training; the position of that option.
_NORMS = frozenset(spellings(("batch_norm", "instance_norm")))
_TRAINING_AT = 5
_PLAIN, _IN_PLACE, _NORM = range(3)
_kinds: dict[Function, int] = {}


class Separation:
    """The shared slots of a fused module during a forward."""

    def __init__(self, slots: Sequence[Slot], trials: Trials) -> None:
        self._slots = slots
        self._trials = trials
        # Tensors that were shared at the beginning of the forward, with the trials' copies.
        self._separated: list[tuple[Tensor, TrialTensor]] = []

    def __call__(self, function: Function, args: Arguments, kwargs: Options) -> tuple[Arguments, Options]:
        """The arguments of a call, with the trials' copies in the place of what is not shared (any more)."""
        kind = _kinds.get(function)
        if kind is None:
            kind = _kinds[function] = _kind_of(function)
        if kind == _IN_PLACE and args and _is_plain(args[0]):
            self._separate(args[0])
        elif kind == _NORM and _trains(args, kwargs):
            for value in (*args, *kwargs.values()):
                if _is_plain(value) and not isinstance(value, nn.Parameter):
                    self._separate(value)
        if not self._separated or not _has_plain((*args, *kwargs.values())):
            return args, kwargs
        changed: tuple[Arguments, Options] = self.current((args, kwargs))
        return changed

    def current(self, values: Any) -> Any:
        """The same values, with the trials' copies in the place of what is not shared any more."""
        if not self._separated:
            return values
        return pytree.tree_map(self._current, values, is_leaf=lambda value: isinstance(value, torch.Size))

    def _separate(self, written: Tensor) -> None:
        """Give each trial a copy of the shared tensors in the memory that is about to be written."""
        memory = _memory(written)
        self._separated += separate(self._slots, self._trials, lambda tensor: _memory(tensor) == memory)

    def _current(self, value: Any) -> Any:
        """The trials' copies of a tensor, or of a view of one, that is not shared any more."""
        if not _is_plain(value):
            return value
        for before, own in self._separated:
            if value is before or _memory(value) == _memory(before):
                return TrialTensor(_same_view(value, before, own.stacked), self._trials)
        return value


def _kind_of(function: Function) -> int:
    if function in _NORMS:
        return _NORM
    return _IN_PLACE if is_in_place(function) or RULES.get(function) is set_data else _PLAIN


def _trains(args: Arguments, kwargs: Options) -> bool:
    return any(args[_TRAINING_AT : _TRAINING_AT + 1]) or any(
        kwargs.get(name) for name in ("training", "use_input_stats")
    )


def _has_plain(values: Iterable[Any]) -> bool:
    """Whether a tensor without trials is among the values; faster than a look at all leaves."""
    for value in values:
        kind = type(value)
        if kind is not TrialTensor and (isinstance(value, Tensor) or _has_plain(_within(value, kind))):
            return True
    return False


def _within(value: Any, kind: type) -> Iterable[Any]:
    if issubclass(kind, (tuple, list)):
        return value  # type: ignore[no-any-return]
    return value.values() if issubclass(kind, dict) else ()


def _is_plain(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, TrialTensor)


def _memory(tensor: Tensor) -> int:
    memory: int = tensor.untyped_storage()._cdata
    return memory


def _same_view(view: Tensor, tensor: Tensor, stacked: Tensor) -> Tensor:
    """The elements of `stacked`, the trials' copies of `tensor`, that `view` has of it."""
    offset = view.storage_offset() - tensor.storage_offset()
    if view.shape == tensor.shape and view.stride() == tensor.stride() and offset == 0:
        return stacked.detach() if view is not tensor else stacked
    last = offset + sum((size - 1) * stride for size, stride in zip(view.shape, view.stride()))
    if not tensor.is_contiguous() or offset < 0 or last >= tensor.numel() or view.requires_grad:
        raise FusionError(
            f"{user_line()}\n  writes to a view of a tensor that all trials share",
            "give each trial its own: fuse(..., share='never'), or fused.unshare(name)",
        )
    # Each trial's copy is contiguous, and so is the tensor.
    strides = (tensor.numel(), *view.stride())
    return stacked.detach().as_strided((len(stacked), *view.shape), strides, offset)
