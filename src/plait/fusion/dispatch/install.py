"""Replaces a module's parameters and buffers by trial tensors during a call."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from plait.fusion.dispatch.tensor import Trials, TrialTensor, unwrap

Wrap = Callable[[Tensor], TrialTensor]


@dataclass(eq=False)
class Slot:
    """One parameter or buffer of a module; `key` is its full name."""

    tensors: dict[str, Any]
    name: str
    is_buffer: bool
    key: str
    # Whether all trials share it, so that it has no trials axis; and what was shared until it was written.
    is_shared: bool
    was_shared: Tensor | None = None

    @property
    def tensor(self) -> Any:
        return self.tensors[self.name]

    def separate(self, own: Tensor) -> None:
        """Hold `own`, which has a tensor for each trial, in the place of a shared one."""
        self.was_shared, self.is_shared = self.tensor, False
        self.tensors[self.name] = own


def slots_of(module: nn.Module, shared: Collection[str] = ()) -> list[Slot]:
    """All slots of `module` and its submodules; a tied weight has several, a buffer may be None."""
    slots = []
    for path, part in module.named_modules():
        kinds = ((part._parameters, False), (part._buffers, True))
        for tensors, is_buffer in kinds:
            for name, tensor in tensors.items():
                key = f"{path}.{name}" if path else name
                if is_buffer or tensor is not None:
                    slots.append(Slot(tensors, name, is_buffer, key, key in shared))
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
    wrappers = [
        tensor if tensor is None or slot.is_shared else wrap(tensor) for slot, tensor in zip(slots, before)
    ]
    for slot, wrapper in zip(slots, wrappers):
        slot.tensors[slot.name] = wrapper
    refresh_recurrent(recurrent)
    try:
        yield
    finally:
        for slot, tensor, wrapper in zip(slots, before, wrappers):
            now = slot.tensors[slot.name]
            is_kept = now is wrapper or now is None
            slot.tensors[slot.name] = tensor if is_kept else _after_forward(slot, now, tensor, trials)
        refresh_recurrent(recurrent)


def _after_forward(slot: Slot, now: Any, before: Any, trials: Trials) -> Any:
    """What a slot holds after a forward that has found `before` in it, and left `now`."""
    if slot.is_shared:  # assigned
        if not isinstance(now, TrialTensor):
            return now
        slot.separate(now)
    elif slot.was_shared is not None and isinstance(now, TrialTensor) and not slot.is_buffer:
        return now.stacked
    return _with_trials_axis(unwrap(now, trials), now) if slot.is_buffer else before


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
