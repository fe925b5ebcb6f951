"""Plait trains PyTorch models on whatever devices there are.

Importing it starts nothing and loads no optional dependency; names are fetched from their rooms when used.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_ROOMS: dict[str, str] = {}

__all__ = ["__version__"]


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return getattr(importlib.import_module(_ROOMS[name]), name)
    raise AttributeError(f"module 'plait' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *_ROOMS]
