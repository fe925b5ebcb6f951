"""The claims of the experiments are what their records say."""

from __future__ import annotations

from plait.core.events import Recorded as RecordedEvent
from plait.core.run_events import Changed, Signals, Step
from plait_bench.adapt import adaptive_batch, adaptive_topology, monitoring
from support.signals import signals_at


def course(adaptive: bool) -> adaptive_topology.RecordedRun:
    """A hundred steps of which 41 to 70 have a slow link; the adaptive run is on a ring from 44 to 80."""
    log = []
    for step in range(1, 101):
        away = adaptive and 44 <= step <= 80
        slow = 41 <= step <= 70 and not away
        log.append(RecordedEvent(step, 0, Step(step, 0, 1.0, 0.1, 8, 0.4 if slow else 0.2)))
        log.append(RecordedEvent(step, 0, signals_at(step, topology="ring" if away else "star")))
        if adaptive and step in (43, 80):
            change = {"topology": "ring" if step == 43 else "star"}
            log.append(RecordedEvent(step + 0.5, 0, Changed(step, "TopologyChange", change, "topology", "")))
    assert any(isinstance(each.event, Signals) for each in log)
    return adaptive_topology.RecordedRun(adaptive, tuple(log), 40.5, 70.5)


def test_the_claims_of_adaptive_topology_follow_from_the_events():
    found = adaptive_topology.claims_of(course(True), course(False))
    assert [claim.value for claim in found] == [3.0, 1.0, 0.5, 1.0]
    assert all(claim.holds for claim in found)
    assert "after 10 steps" in found[3].claim
    assert not any(claim.holds for claim in adaptive_topology.claims_of(course(False), course(True))[:2])


def test_the_claims_of_adaptive_batch_compare_with_small_batches():
    rows = [
        {"batches": "small", "accuracy": 0.98, "seconds": 10.0},
        {"batches": "adaptive", "accuracy": 0.96, "seconds": 6.0},
        {"batches": "large", "accuracy": 0.5, "seconds": 3.0},
    ]
    assert [claim.holds for claim in adaptive_batch.claims_of(rows)] == [False, True]


def test_overhead_is_the_median_difference_of_steps_in_turn():
    taken = {
        # Whichever comes first in a round takes 0.5 s less; another program came in between at the end.
        "none": [(1.0, 1.0), (2.5, 1.0), (1.0, 1.0), (1.5, 1.0), (1.0, 1.0), (1.5, 1.0)],
        "noise-scale": [(1.6, 1.005), (2.1, 1.015), (1.6, 1.0), (1.1, 1.02), (9.0, 1.01), (1.1, 1.01)],
    }
    assert round(monitoring.overhead_of(taken, "noise-scale", 0), 6) == 0.08
    assert round(monitoring.overhead_of(taken, "noise-scale", 1), 6) == 0.01
