"""Plait trains PyTorch models on whatever devices there are.

Importing it starts nothing and loads no optional dependency; names are fetched from their rooms when used.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

# What a user needs, and the room it lives in.
_ROOMS: dict[str, str] = {
    "Job": "plait.config",
    "make_job": "plait.config",
    "read_job": "plait.config",
    "train": "plait.config",
}

__all__ = ["Job", "__version__", "make_job", "read_job", "train"]


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return getattr(importlib.import_module(_ROOMS[name]), name)
    raise AttributeError(f"module 'plait' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *_ROOMS]
