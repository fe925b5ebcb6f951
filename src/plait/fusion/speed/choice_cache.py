"""Choices of `autotune` on disk: a later process on the same kind of GPU does not measure them again.

One file for each name of a GPU and version of torch, in `plait/ways` of the user's cache folder. The variable
PLAIT_CACHE names another folder; set and empty, it turns the cache off.
"""

from __future__ import annotations

import functools
import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from plait.core.artefact import load, save
from plait.core.errors import ArtefactError, DiskError

_log = logging.getLogger(__name__)
_KIND, _VERSION = "choices", 1
# The oldest beyond are dropped.
_MOST = 20_000


@dataclass(frozen=True)
class KeptWays:
    """The name of the chosen way for each text that describes an operation and its operands."""

    ways: dict[str, str]


class ChoiceFile:
    """Choices that outlive the process; a file that cannot be read or written is done without."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._ways = self._read()
        self._can_write = True

    def get(self, key: str) -> str | None:
        return self._ways.get(key)

    def keep(self, key: str, way: str) -> None:
        """Add a choice to the file, and to what other processes have added since."""
        if not self._can_write:
            return
        self._ways = {**self._read(), **self._ways, key: way}
        newest = dict([*self._ways.items()][-_MOST:])
        try:
            save(KeptWays(newest), self._path, _KIND, _VERSION)
        except DiskError as failure:
            self._can_write = False
            _log.warning("fastest ways are not kept for later runs: %s", failure)

    def _read(self) -> dict[str, str]:
        if not os.path.exists(self._path):
            return {}
        try:
            return load(KeptWays, self._path, _KIND, _VERSION).ways
        except ArtefactError as failure:
            _log.warning("fastest ways that an earlier run has kept are ignored and replaced: %s", failure)
            return {}


def choices_on(device: torch.device) -> ChoiceFile | None:
    """The choices that are kept for a GPU; None for a CPU, whose times depend on what else it does."""
    if device.type != "cuda":
        return None
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = os.environ.get("PLAIT_CACHE", os.path.join(home, "plait", "ways"))
    # Without a home the folder still begins with a tilde.
    is_off = not folder or folder.startswith("~")
    return None if is_off else _file(folder, torch.cuda.get_device_name(device))


@functools.cache
def _file(folder: str, device: str) -> ChoiceFile:
    name = re.sub(r"[^\w.+]+", "-", f"{device} torch {torch.__version__}")
    return ChoiceFile(Path(folder) / f"{name}.json")
