"""Whether tensors of one trial's module are the memory of the fused ones."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from plait.fusion.dispatch.install import Slot
from plait.fusion.dispatch.tensor import TrialTensor


def of_all(tensor: Any) -> Any:
    """The tensor of all trials within a trial tensor."""
    return tensor.stacked if isinstance(tensor, TrialTensor) else tensor


def is_same_memory(one: Tensor, other: Tensor) -> bool:
    same = one.shape == other.shape and one.dtype == other.dtype and one.device == other.device
    return same and one.data_ptr() == other.data_ptr() and one.stride() == other.stride()


def is_memory_of(own: Tensor, stacked: Tensor, number: int | None) -> bool:
    """Whether `own` is one trial of `stacked`, or all of it where there is no number."""
    if number is None:
        return is_same_memory(own, stacked)
    same = own.dtype == stacked.dtype and own.device == stacked.device
    (first, *strides), (_, *shape) = stacked.stride(), stacked.shape
    if not same or list(own.shape) != shape or list(own.stride()) != strides:
        return False
    return own.data_ptr() == stacked.data_ptr() + number * first * stacked.element_size()


def is_parameter(slot: Slot) -> bool:
    return not slot.is_buffer and slot.tensor is not None and slot.tensor.is_leaf
