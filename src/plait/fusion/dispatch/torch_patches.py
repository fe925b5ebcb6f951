"""Patches of torch for what tensors cannot intercept: custom autograd functions, activation checkpointing.

While trials run, a custom `torch.autograd.Function` is applied trial by trial, and a checkpoint that
recomputes in backward uses the weights, random numbers and modes of the first forward.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.checkpoint as checkpoints
from torch import Tensor
from torch.autograd import function as autograd
from torch.nn import Parameter
from torch.utils import _pytree as pytree

from plait.fusion.dispatch.tensor import TrialTensor

# Captures the current state; the result opens a context with that state, in backward.
Again = Callable[[], Callable[[], AbstractContextManager[Any]]]
# Applies an autograd function to arguments that contain trial tensors.
Applied = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


@dataclass(eq=False)
class Call:
    """A running call of a fused module or of a single trial."""

    again: Again
    applied: Applied | None
    thread: int


# Those of all threads, innermost last.
RUNNING: list[Call] = []
_entering = threading.Lock()
_generator = checkpoints._checkpoint_without_reentrant_generator
_reentrant = checkpoints.CheckpointFunction


@contextmanager
def running(again: Again, applied: Applied | None) -> Iterator[None]:
    """Context in which checkpoints and autograd functions belong to these trials.

    `again` is called when a checkpoint begins, and returns a context factory that restores the state in
    backward; `applied` applies a function to trial tensors.
    """
    call = Call(again, applied, threading.get_ident())
    with _entering:
        RUNNING.append(call)
        if len(RUNNING) == 1:
            _patch()
    try:
        yield
    finally:
        with _entering:
            RUNNING.remove(call)
            if not RUNNING:
                _restore()


def _innermost() -> Call | None:
    """The call that runs in this thread; in another one, as of a backward pass, the last that began."""
    calls, thread = RUNNING[::-1], threading.get_ident()
    return next((call for call in calls if call.thread == thread), calls[0] if calls else None)


def _patch() -> None:
    autograd._SingleLevelFunction.apply = classmethod(apply_function)  # type: ignore[attr-defined]
    checkpoints._checkpoint_without_reentrant_generator = _run_again
    checkpoints.CheckpointFunction = _Reentrant  # type: ignore[misc,assignment]


def _restore() -> None:
    del autograd._SingleLevelFunction.apply  # type: ignore[attr-defined]
    checkpoints._checkpoint_without_reentrant_generator = _generator
    checkpoints.CheckpointFunction = _reentrant  # type: ignore[misc]


def apply_function(cls: Any, *args: Any, **kwargs: Any) -> Any:
    def original(*some: Any, **options: Any) -> Any:
        return super(autograd._SingleLevelFunction, cls).apply(*some, **options)

    original.owner, original.__qualname__ = cls, cls.__qualname__  # type: ignore[attr-defined]
    call = _innermost()
    applied = None if call is None else call.applied
    if applied is None or not _has_trials((*args, *kwargs.values())):
        return original(*args, **kwargs)
    return applied(original, args, kwargs)


def _has_trials(values: tuple[Any, ...]) -> bool:
    kinds = set(map(type, values))
    nested = not kinds <= _NOT_NESTED
    return TrialTensor in kinds or (
        nested and any(isinstance(x, TrialTensor) for x in pytree.tree_leaves(values))
    )


# Types of most arguments, in which no trial tensor can be.
_NOT_NESTED = frozenset((Tensor, Parameter, TrialTensor, int, float, bool, str, type(None)))


class _Hidden:
    """Hides a trial tensor from a checkpoint, which would inspect tensors."""

    def __init__(self, tensor: TrialTensor) -> None:
        self.tensor = tensor


def _run_again(fn: Callable[..., Any], *rest: Any, **kwargs: Any) -> Any:
    """torch's checkpoint, with a function that restores the current state when it is recomputed."""
    if (call := _innermost()) is None:  # another thread's has just ended
        return _generator(fn, *rest, **kwargs)
    open_again = call.again()

    def again(*args: Any, **options: Any) -> Any:
        some, others = pytree.tree_map(lambda x: x.tensor if isinstance(x, _Hidden) else x, (args, options))
        with open_again():
            return fn(*some, **others)

    before = len(inspect.signature(_generator).parameters) - 3  # without fn, args and kwargs
    held = pytree.tree_map_only(TrialTensor, _Hidden, rest[before:])
    options = pytree.tree_map_only(TrialTensor, _Hidden, kwargs)
    return _generator(again, *rest[:before], *held, **options)


class _Reentrant:
    """Runs reentrant checkpoints as non-reentrant ones."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        tensors = [x.stacked if isinstance(x, TrialTensor) else x for x in args if isinstance(x, Tensor)]
        if not any(x.requires_grad for x in tensors):
            with torch.no_grad():  # as torch does, with a warning
                return function(*args)
        return checkpoints.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve)
