"""Writes to trial tensors: they must reach copies that are views in a single model.

In a single model `y.view(-1)` shares memory with `y`. With the trials axis between the merged axes it has to
be a copy. An `AliasLink` between the two storages repeats each write on the other side, or raises if it is
unclear whether the single model would share memory. What reads a tensor again later, such as a layer in its
backward, can ask whether it was written to since.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from plait.fusion.errors import FusionError, user_line

# Whether any link was made in this process; if not, no lookup is needed.
made = False
# Layers whose input was written to after they had read it.
readers_of_written: weakref.WeakSet[Any] = weakref.WeakSet()


@dataclass(frozen=True)
class _Side:
    """Weak references to a tensor and its storage."""

    tensor: weakref.ReferenceType[Tensor]
    storage: weakref.ReferenceType[Any]

    @classmethod
    def of(cls, tensor: Tensor) -> _Side:
        return cls(weakref.ref(tensor), weakref.ref(tensor.untyped_storage()))


@dataclass(frozen=True)
class AliasLink:
    """From a tensor to another that holds the same values in other memory.

    `exact`: the single model certainly has one memory for both; otherwise it may have two.
    """

    own: _Side
    other: _Side
    exact: bool

    def repeat_write(self) -> None:
        """Copy the values to the other side, unless that no longer exists."""
        if self.other.storage() is None:
            return
        source, other = self.own.tensor(), self.other.tensor()
        if not self.exact or source is None or other is None:
            raise FusionError(
                f"{user_line()}\n  writes in place into a tensor that was reshaped, which may be a copy in a "
                f"fused model; write out of place (y = y * 2 in place of y *= 2), or clone() first"
            )
        other.copy_(source.reshape(other.shape))


def link(base: Tensor, copy: Tensor, exact: bool) -> None:
    """Record that `copy` represents a view of `base`."""
    global made
    if base.untyped_storage() is copy.untyped_storage():
        return
    made = True
    one, two = _Side.of(base), _Side.of(copy)
    for source, other in ((one, two), (two, one)):
        storage = source.storage()
        storage.__dict__.setdefault("plait_links", []).append(AliasLink(source, other, exact))


def note_reader(tensor: Tensor, reader: Any) -> None:
    """Let a later write to `tensor` be noted in `readers_of_written`."""
    global made
    made = True
    tensor.untyped_storage().__dict__.setdefault("plait_readers", weakref.WeakSet()).add(reader)


def writes_to(tensor: Tensor) -> int:
    """How often calls on trial tensors have written to the memory of `tensor`, also through `.data`.

    They are counted from the first call of this function on.
    """
    global made
    made = True
    count: int = getattr(tensor.untyped_storage(), "plait_writes", 0)
    return count


def repeat_writes(written: Tensor, seen: tuple[Any, ...] = ()) -> None:
    """After a write to `written`, repeat it in all linked tensors."""
    storage = written.untyped_storage()
    storage.__dict__["plait_writes"] = writes_to(written) + 1
    readers_of_written.update(getattr(storage, "plait_readers", ()))
    for one in getattr(storage, "plait_links", ()):
        target = one.other.storage()
        if target is not None and all(target is not other for other in seen):
            one.repeat_write()
            other = one.other.tensor()
            if other is not None:
                repeat_writes(other, (*seen, storage))


def is_view_alone(stacked: Tensor) -> bool:
    """Whether one trial's tensor is certainly contiguous in a single model, although `stacked` is not.

    It is if `stacked` has no gaps and its other axes are in order.
    """
    strides = [stride for stride, size in zip(stacked.stride()[1:], stacked.shape[1:]) if size > 1]
    return strides == sorted(strides, reverse=True) and is_dense(stacked)


def is_dense(x: Tensor) -> bool:
    """Whether x has no gaps and no element twice."""
    expected = 1
    for stride, size in sorted(zip(x.stride(), x.shape)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True
