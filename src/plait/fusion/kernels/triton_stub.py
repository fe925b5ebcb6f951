"""A stub for Triton if it is not installed: kernel modules can be imported, but no kernel runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Config:
    """Stub for triton.Config."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass


def jit(function: Callable[..., Any] | None = None, **options: Any) -> Callable[..., Any]:
    return function or jit


def autotune(*args: Any, **options: Any) -> Callable[..., Any]:
    return jit
