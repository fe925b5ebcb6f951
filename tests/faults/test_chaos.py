"""A few of the faults that benchmarks/chaos.py tries by the hundred, one of a kind."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from chaos import Chaos

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="a /dev/shm of a run's own needs Linux and root"
)


@pytest.mark.parametrize(
    ("mode", "fault"),
    [
        ("plain", "kill-server"),
        ("partial-loaders", "stop-worker"),
    ],
)
def test_a_fault_is_named_leaves_nothing_and_the_run_goes_on(mode: str, fault: str, tmp_path: Path):
    with Chaos(tmp_path).open() as chaos:
        row = chaos.try_once(mode, fault, seed=0)
    assert row.wrong == [], row.said
