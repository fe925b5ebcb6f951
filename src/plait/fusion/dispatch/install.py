"""Replaces a module's parameters and buffers by trial tensors during a call."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from plait.fusion.dispatch.tensor import Trials, TrialTensor, unwrap

Wrap = Callable[[Tensor], TrialTensor]


@dataclass(frozen=True)
class Slot:
    """One parameter or buffer of a module."""

    tensors: dict[str, Any]
    name: str
    is_buffer: bool


def slots_of(module: nn.Module) -> list[Slot]:
    """All slots of `module` and its submodules; a tied weight has several, a buffer may be None."""
    slots = []
    for part in module.modules():
        slots += [
            Slot(part._parameters, name, False) for name, p in part._parameters.items() if p is not None
        ]
        slots += [Slot(part._buffers, name, True) for name in part._buffers]
    return slots


class Wrappers:
    """Caches the trial tensors around a module's tensors, while those do not change."""

    def __init__(self, trials: Trials) -> None:
        self.trials = trials
        self._kept: dict[int, tuple[Tensor, Any, TrialTensor]] = {}

    def __call__(self, tensor: Tensor) -> TrialTensor:
        signature = (tensor.dtype, tensor.device, tensor.shape)
        kept = self._kept.get(id(tensor))
        if kept is not None and kept[0] is tensor and kept[1] == signature:
            return kept[2]
        wrapper = TrialTensor(tensor, self.trials)
        self._kept[id(tensor)] = (tensor, signature, wrapper)
        return wrapper

    def forget(self) -> None:
        self._kept.clear()


@contextmanager
def installed(slots: list[Slot], recurrent: list[nn.RNNBase], wrap: Wrap, trials: Trials) -> Iterator[None]:
    """Context in which the slots hold trial tensors; afterwards they are restored.

    A buffer that the module reassigns meanwhile keeps the new value, as in a single model.
    """
    before = [slot.tensors[slot.name] for slot in slots]
    wrappers = [None if tensor is None else wrap(tensor) for tensor in before]
    for slot, wrapper in zip(slots, wrappers):
        slot.tensors[slot.name] = wrapper
    refresh_recurrent(recurrent)
    try:
        yield
    finally:
        for slot, tensor, wrapper in zip(slots, before, wrappers):
            now = slot.tensors[slot.name]
            if slot.is_buffer and now is not wrapper and now is not None:
                slot.tensors[slot.name] = _with_trials_axis(unwrap(now, trials), now)
            else:
                slot.tensors[slot.name] = tensor
        refresh_recurrent(recurrent)


def _with_trials_axis(inner: Tensor, now: Tensor) -> Tensor:
    """A buffer with the trials axis; a tensor that trials share is copied, so that each can write its own."""
    return inner if isinstance(now, TrialTensor) else inner.clone()


def recurrent_in(module: nn.Module) -> list[nn.RNNBase]:
    return [part for part in module.modules() if isinstance(part, nn.RNNBase)]


def refresh_recurrent(parts: list[nn.RNNBase]) -> None:
    """Update the list of weights that recurrent modules keep; on a GPU they flatten changed weights."""
    for part in parts:
        weights = [getattr(part, name, None) for name in part._flat_weights_names]
        part._flat_weights = weights
        part._flat_weight_refs = [None if weight is None else weakref.ref(weight) for weight in weights]


def shared_names(module: nn.Module) -> dict[str, int]:
    """Each parameter's name, and a number that tied names have in common."""
    named = module.named_parameters(remove_duplicate=False)
    ids: dict[int, int] = {}
    return {name: ids.setdefault(id(parameter), len(ids)) for name, parameter in named}


def stack(tensors: list[Tensor]) -> Tensor:
    return torch.stack([tensor.detach() for tensor in tensors])
