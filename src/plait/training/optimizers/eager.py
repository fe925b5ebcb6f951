"""Torch's optimizers without torch.compile: they import its frontend only to exclude functions from it.

That takes a second, as long as most of the rest of a worker's start. While the frontend is not imported,
nothing is compiled, so nothing needs excluding.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

_FRONTEND = "torch._dynamo"
_Method = Callable[..., Any]


def use_eager_optimizers() -> None:
    """Let the optimizers of this process run without importing torch.compile's frontend.

    Once something else has imported it, they run as torch has written them. Meant for Plait's own worker
    processes: it replaces methods of torch's classes.
    """
    if _FRONTEND in sys.modules:
        return
    for name, method in inspect.getmembers(Optimizer, inspect.isfunction):
        if _is_made_by(method, "_disable_dynamo"):
            setattr(Optimizer, name, _until_imported(method, inspect.unwrap(method)))
    for _, kind in inspect.getmembers(torch.optim, inspect.isclass):
        step: Any = vars(kind).get("step")
        if _is_made_by(step, "_use_grad_for_differentiable"):
            setattr(kind, "step", _until_imported(step, _with_own_grad_mode(inspect.unwrap(step))))  # noqa: B010


def _is_made_by(method: Any, decorator: str) -> bool:
    """Whether `method` is what torch's `decorator` returns, around a function that it keeps."""
    code = getattr(method, "__code__", None)
    return (
        code is not None and code.co_qualname.startswith(f"{decorator}.") and hasattr(method, "__wrapped__")
    )


def _until_imported(method: _Method, eager: _Method) -> _Method:
    """`eager` while the frontend is not imported, `method` from then on."""

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        return (method if _FRONTEND in sys.modules else eager)(*args, **kwargs)

    return run


def _with_own_grad_mode(step: _Method) -> _Method:
    """`step` with gradients only where the optimizer is differentiable, as torch's decorator runs it."""

    def run(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        with torch.set_grad_enabled(optimizer.defaults["differentiable"]):
            return step(optimizer, *args, **kwargs)

    return run
