"""Commands without the seconds that importing torch takes: they are forked from the server of the test run.

`forked_commands` changes the environment so that each `python -m plait` and each server of workers started
under it is a stand-in (support/forked/sitecustomize.py) for a process forked from one that has imported all
modules. What such a process runs is the same; its place in the tree of processes is not, nor is what it has
imported before: tests of these start real ones.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import server

VARIABLE = "PLAIT_TESTS_FORK_FROM"


@contextlib.contextmanager
def forked_commands() -> Iterator[None]:
    """Within it, commands and servers of workers are forked rather than started."""
    places = [str(Path(__file__).parent / "forked"), os.environ.get("PYTHONPATH", "")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, server.address())
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, places)))
        yield


@contextlib.contextmanager
def real_commands() -> Iterator[None]:
    """Within it, they are started as everywhere else."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(VARIABLE, raising=False)
        yield
