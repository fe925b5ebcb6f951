"""Plain tensors that a forward makes, such as `torch.zeros(...)`, and what happens when trials write to one.

Until then they are one for all trials. The first write of what differs between trials turns such a tensor
into a trial tensor, for all who hold it. That is done only where no other tensor has its memory: what cannot
be told apart from a tensor of the user's, or has another view, is refused as a target instead.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch.utils import swap_tensors

from plait.fusion.dispatch.alias_links import is_dense
from plait.fusion.dispatch.fallback import is_in_place
from plait.fusion.dispatch.registry import Arguments, Function, Options, spellings
from plait.fusion.dispatch.tensor import Trials, TrialTensor, leaves

# Functions whose results may have memory of others that is none of their arguments'.
_OF_OTHERS = "from_numpy frombuffer as_tensor asarray from_dlpack from_file"
# Functions that give the memory of a tensor to others.
_GIVING = "numpy __array__ __dlpack__ to_dlpack data_ptr storage untyped_storage share_memory_ __reduce_ex__"
_BORROWED, _GIVEN = (frozenset(spellings(names.split())) for names in (_OF_OTHERS, _GIVING))
_MARK = "plait_made_in"
# References to the memory by one tensor: its own, and that of the storage object which was looked at.
_ALONE = 2


class MadeTensors:
    """Those of one forward."""

    def __init__(self, trials: Trials) -> None:
        self._trials = trials
        self._mark = object()
        # Those made in inference mode, by their memory, as views do not know there what they are views of.
        self._bases: dict[int, weakref.ref[Tensor]] = {}

    def note(self, function: Function, args: Arguments, kwargs: Options, outcome: Any) -> None:
        """Take note of the outcome of a call on plain tensors."""
        if function in _GIVEN:
            if args and isinstance(args[0], Tensor) and (memory := _memory(args[0])) is not None:
                vars(memory).pop(_MARK, None)
        elif type(outcome) is Tensor and not _is_of_others(function) and (memory := _memory(outcome)):
            given = (_memory(leaf) for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor))
            if all(own is not memory for own in given):
                vars(memory)[_MARK] = self._mark
                if outcome.is_inference():
                    self._bases[memory._cdata] = weakref.ref(outcome)

    def take(self, target: Any) -> bool:
        """Turn `target` into a tensor of each trial, and its base if it is a view; False if others see it."""
        if type(target) is not Tensor or (memory := _memory(target)) is None:
            return False
        whole = target._base if target._base is not None else self._base_of(target, memory)
        others = 0 if whole is target else 1
        fits = (
            getattr(memory, _MARK, None) is self._mark
            and torch._C._storage_Use_Count(memory._cdata) == _ALONE + others
            and _references(whole) == 1 + (target._base is not None)
            and _references(target) == 1
            and type(whole) is Tensor
            and not (weakref.getweakrefs(whole) or weakref.getweakrefs(target))
            # Every tensor in its memory is a view of it.
            and memory.nbytes() == whole.numel() * whole.itemsize
            and (whole.is_contiguous() or (is_dense(whole) and not others))
            and target.dtype == whole.dtype
            and not (whole.requires_grad or target.is_conj() or target.is_neg())
        )
        if not fits:
            return False
        stacked = torch.stack([whole.detach()] * self._trials.count)
        if others:
            strides = (whole.numel(), *target.stride())
            view = stacked.as_strided((len(stacked), *target.shape), strides, target.storage_offset())
            _become(target, view, self._trials)
        _become(whole, stacked, self._trials)
        return True

    def _base_of(self, target: Tensor, memory: Any) -> Tensor:
        """What `target` is a view of in inference mode; itself if that is no more, or it is none."""
        known = self._bases.pop(memory._cdata, None)  # no tensor with a weak reference can be swapped
        base = None if known is None else known()
        return target if base is None else base


def _become(tensor: Tensor, stacked: Tensor, trials: Trials) -> None:
    made = TrialTensor(stacked, trials)
    vars(made).update(vars(tensor))  # what the user has set
    with torch._C.DisableTorchFunctionSubclass():
        swap_tensors(tensor, made)


def _references(tensor: Any) -> int:
    """By Python and by views, and of what autograd has saved."""
    count: int = tensor._use_count()
    return count


def _is_of_others(function: Function) -> bool:
    name = getattr(function, "__name__", "")
    return function in _BORROWED or name in ("__get__", "__set__") or is_in_place(function)


def _memory(tensor: Tensor) -> Any:
    """The storage of a tensor; None if it has no ordinary one."""
    if isinstance(tensor, TrialTensor) or tensor.layout is not torch.strided or peek_interpreter_stack():
        return None
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None
