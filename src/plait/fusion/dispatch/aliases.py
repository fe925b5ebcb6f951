"""Copies of trial tensors that a lone model has as views: what is written into one must reach the other.

A lone `y.view(-1)` shares its memory with `y`. With the trials between the merged axes it has to be a copy.
An `AliasLink` between the two storages repeats each write on the other side, or refuses it where that is
unclear.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from plait.fusion.errors import FusionError, user_line

# Whether any link was made in this process: most models make none, and pay for no look-up.
made = False


@dataclass(frozen=True)
class _Side:
    """One tensor, and the storage that its views share."""

    tensor: weakref.ReferenceType[Tensor]
    storage: weakref.ReferenceType[Any]

    @classmethod
    def of(cls, tensor: Tensor) -> _Side:
        return cls(weakref.ref(tensor), weakref.ref(tensor.untyped_storage()))


@dataclass(frozen=True)
class AliasLink:
    """From a storage to the tensor that holds the same values elsewhere.

    `exact` says that the lone model surely has one memory; elsewhere it may have two.
    """

    own: _Side
    other: _Side
    exact: bool

    def repeat_write(self) -> None:
        """Give the other side what its twin holds now; nothing, where nobody can look at it any more."""
        if self.other.storage() is None:
            return
        own, other = self.own.tensor(), self.other.tensor()
        if not self.exact or own is None or other is None:
            raise FusionError(
                f"{user_line()}\n  writes in place into a tensor that was reshaped, which may be a copy in a "
                f"fused model; write out of place (y = y * 2 in place of y *= 2), or clone() first"
            )
        other.copy_(own.reshape(other.shape))


def link(base: Tensor, copy: Tensor, exact: bool) -> None:
    """Remember that `copy`, in memory of its own, stands for a view of `base`."""
    global made
    if base.untyped_storage() is copy.untyped_storage():
        return
    made = True
    one, two = _Side.of(base), _Side.of(copy)
    for own, other in ((one, two), (two, one)):
        storage = own.storage()
        storage.__dict__.setdefault("plait_links", []).append(AliasLink(own, other, exact))


def repeat_writes(written: Tensor, seen: tuple[Any, ...] = ()) -> None:
    """After a write into `written`: the same write in all tensors that stand for the same memory."""
    storage = written.untyped_storage()
    for one in getattr(storage, "plait_links", ()):
        target = one.other.storage()
        if target is not None and all(target is not other for other in seen):
            one.repeat_write()
            other = one.other.tensor()
            if other is not None:
                repeat_writes(other, (*seen, storage))


def is_view_alone(stacked: Tensor) -> bool:
    """Whether one trial's tensor is surely contiguous in a lone model, where `stacked` has trials between.

    It is where the trials fill the gaps: all of the memory belongs to the tensor, axes in their order.
    """
    strides = [stride for stride, size in zip(stacked.stride()[1:], stacked.shape[1:]) if size > 1]
    return strides == sorted(strides, reverse=True) and _is_dense(stacked)


def _is_dense(x: Tensor) -> bool:
    expected = 1
    for stride, size in sorted(zip(x.stride(), x.shape)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True
