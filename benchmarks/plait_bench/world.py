"""Worlds for experiments: local workers with one thread each, and what the first of them returned."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from plait.launch.display import Silent
from plait.launch.supervisor import Launch, Supervisor
from plait.schema.hosts import LOCAL, Host
from plait.schema.placement import Placement


def in_world(workers: int, entry: str, settings: dict[str, Any], preload: tuple[str, ...] = ()) -> Any:
    """What `entry(worker, settings)`, named `module:function`, returned on rank 0 of a new world.

    `preload` names modules that are imported once, before the workers are forked.
    """
    with tempfile.TemporaryDirectory() as logs:
        launch = Launch(
            Placement((Host(LOCAL, workers),), threads=1),
            entry=entry,
            settings=settings,
            logs=Path(logs),
            preload=preload,
        )
        return Supervisor(launch, Silent()).run()[0]
