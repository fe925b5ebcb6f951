"""What stands for Triton where it is not installed: modules import, and no kernel runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Config:
    """A choice of block sizes that nobody will try."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass


def jit(function: Callable[..., Any] | None = None, **options: Any) -> Callable[..., Any]:
    return function or jit


def autotune(*args: Any, **options: Any) -> Callable[..., Any]:
    return jit
