"""Clocks of hosts: how far they are apart is found by asking."""

from __future__ import annotations

import time

import pytest

from plait.comm import clock
from support.world import run_ranks


def offset_of(rank: int, hosts: list[str]) -> float:
    """The second host's clock goes 100 s ahead."""
    ahead = 100.0 if hosts[rank] == "b" else 0.0
    clock.time = type("", (), {"time": staticmethod(lambda: time.time() + ahead)})  # type: ignore[attr-defined]
    return clock.clock_offset(rank, hosts)


def test_a_clock_that_goes_ahead_is_set_back_by_as_much() -> None:
    first, near, far, further = run_ranks(4, offset_of, ["a", "a", "b", "b"])
    assert (first, near) == (0.0, 0.0)
    assert far == pytest.approx(-100.0, abs=0.2)
    assert further == pytest.approx(-100.0, abs=0.2)
