"""Where torch calls Python past tensors: autograd functions of one's own, and checkpoints that run again.

Neither asks a tensor what to do. While trials run, a custom `torch.autograd.Function` is applied trial by
trial, and what a checkpoint computes again in backward finds the weights, the random numbers and the modes
that it had the first time.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.utils.checkpoint as checkpoints
from torch import Tensor
from torch.autograd import function as autograd
from torch.utils import _pytree as pytree

from plait.fusion.dispatch.tensor import TrialTensor

# What makes the state of now again, in backward.
Again = Callable[[], Callable[[], AbstractContextManager[Any]]]
# Applies a function of autograd to arguments among which there are trial tensors.
Applied = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

# Who runs now, the innermost last: how to run again, and how to apply a function.
_RUNNING: list[tuple[Again, Applied | None]] = []
_generator = checkpoints._checkpoint_without_reentrant_generator
_reentrant = checkpoints.CheckpointFunction


@contextmanager
def running(again: Again, applied: Applied | None) -> Iterator[None]:
    """Within, checkpoints and functions of autograd belong to these trials.

    `again` is asked when a checkpoint begins, and gives what opens the same state in backward; `applied`
    applies a function to trial tensors.
    """
    _RUNNING.append((again, applied))
    if len(_RUNNING) == 1:
        _patch()
    try:
        yield
    finally:
        _RUNNING.pop()
        if not _RUNNING:
            _restore()


def is_running() -> bool:
    """Whether trials run now: a fused module's call, or a trial by itself."""
    return bool(_RUNNING)


def _patch() -> None:
    autograd._SingleLevelFunction.apply = classmethod(apply_function)  # type: ignore[attr-defined]
    checkpoints._checkpoint_without_reentrant_generator = _run_again
    checkpoints.CheckpointFunction = _Reentrant  # type: ignore[misc,assignment]


def _restore() -> None:
    del autograd._SingleLevelFunction.apply  # type: ignore[attr-defined]
    checkpoints._checkpoint_without_reentrant_generator = _generator
    checkpoints.CheckpointFunction = _reentrant  # type: ignore[misc]


def apply_function(cls: Any, *args: Any, **kwargs: Any) -> Any:
    def own(*some: Any, **options: Any) -> Any:
        return super(autograd._SingleLevelFunction, cls).apply(*some, **options)

    applied = _RUNNING[-1][1] if _RUNNING else None
    if applied is None or not any(isinstance(x, TrialTensor) for x in pytree.tree_leaves((args, kwargs))):
        return own(*args, **kwargs)
    return applied(own, args, kwargs)


class _Held:
    """A trial tensor on its way through a checkpoint, which looks into tensors."""

    def __init__(self, tensor: TrialTensor) -> None:
        self.tensor = tensor


def _run_again(fn: Callable[..., Any], *rest: Any, **kwargs: Any) -> Any:
    """torch's checkpoint, with a function that finds the state of now when it runs again."""
    open_again = _RUNNING[-1][0]()

    def again(*args: Any, **options: Any) -> Any:
        some, others = pytree.tree_map(lambda x: x.tensor if isinstance(x, _Held) else x, (args, options))
        with open_again():
            return fn(*some, **others)

    before = len(inspect.signature(_generator).parameters) - 3  # without fn, args and kwargs
    held = pytree.tree_map_only(TrialTensor, _Held, rest[before:])
    options = pytree.tree_map_only(TrialTensor, _Held, kwargs)
    return _generator(again, *rest[:before], *held, **options)


class _Reentrant:
    """Checkpoints that run backward within backward, as those that do not."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        tensors = [x.stacked if isinstance(x, TrialTensor) else x for x in args if isinstance(x, Tensor)]
        if not any(x.requires_grad for x in tensors):
            with torch.no_grad():  # as torch does, with a warning: such a checkpoint has no gradients
                return function(*args)
        return checkpoints.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve)
