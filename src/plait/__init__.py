"""Plait trains PyTorch models on whatever devices there are.

Importing it starts nothing and loads no optional dependency; names are fetched from their rooms when used.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

# What a user needs: the name here, and the room and name it has there.
_ROOMS: dict[str, tuple[str, str]] = {
    "Job": ("plait.schema.job", "Job"),
    "Machines": ("plait.planner", "Machines"),
    "Plan": ("plait.planner", "Plan"),
    "Profile": ("plait.profiler.profile", "Profile"),
    "fuse": ("plait.fusion", "fuse"),
    "machines": ("plait.planner", "machines"),
    "make_job": ("plait.schema.job", "make_job"),
    "plan": ("plait.planner", "make_plan"),
    "profile": ("plait.profiler.profile", "profile_model"),
    "read_job": ("plait.schema.job", "read_job"),
    "sweep": ("plait.jobs.sweep", "sweep"),
    "train": ("plait.jobs.train", "train"),
    "verify_stages": ("plait.pipeline.verify.stages", "verify_stages"),
}

__all__ = ["__version__", *_ROOMS]


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        room, there = _ROOMS[name]
        return getattr(importlib.import_module(room), there)
    raise AttributeError(f"module 'plait' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *_ROOMS]
