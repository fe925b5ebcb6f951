"""A few of the faults that benchmarks/chaos.py tries by the hundred, one of a kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos import Chaos
from support.capabilities import may

pytestmark = pytest.mark.skipif(
    not may("sys_admin"), reason="a /dev/shm of a run's own needs Linux and root, with its capabilities"
)


@pytest.mark.parametrize(
    ("mode", "fault"),
    [
        # The server takes workers along in launch/test_launch_faults.py; killed runs go on in test_runs.py.
        pytest.param("plain", "kill-server", marks=pytest.mark.extended),
        # A stopped worker is left out in launch/test_launch_faults.py; a sweep with one ends in test_runs.py.
        pytest.param("partial-loaders", "stop-worker", marks=pytest.mark.extended),
    ],
)
def test_a_fault_is_named_leaves_nothing_and_the_run_goes_on(mode: str, fault: str, tmp_path: Path):
    with Chaos(tmp_path).open() as chaos:
        row = chaos.try_once(mode, fault, seed=0)
    assert row.wrong == [], row.said
