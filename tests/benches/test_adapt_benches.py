"""The claims of the experiments are what their records say."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest

from plait.core.events import Recorded as RecordedEvent
from plait.core.run_events import Changed, Signals, Step
from plait_bench.adapt import adaptive_batch, adaptive_topology, elastic, monitoring
from plait_bench.harness import Bench, Row, at_least, at_most, of_repeats, of_runs, within
from plait_bench.sync import bandwidth
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
    found = adaptive_topology.claims_of([course(True), course(False)] * 2)
    assert [claim.value for claim in found] == [3.0, 1.0, 0.5, 2]
    assert all(claim.holds for claim in found)
    assert "(3 to 3 in 2 runs)" in found[0].claim
    assert "after 10, 10 steps" in found[3].claim


def test_a_run_that_never_adapts_breaks_the_claims_of_adaptive_topology():
    stays = dataclasses.replace(course(False), adaptive=True)
    changes, throughput, _, back = adaptive_topology.claims_of([course(True), course(False), stays])
    assert (changes.value, changes.holds) == (None, False)
    assert (throughput.value, throughput.holds) == (0.75, False)
    assert (back.value, back.holds) == (2, True)


@pytest.mark.parametrize(
    ("module", "run"), [(adaptive_topology, adaptive_topology.run), (bandwidth, bandwidth.run_shaped)]
)
def test_what_cannot_be_measured_here_does_not_break_a_claim(
    module: Any, run: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "missing_for_shaping", lambda: "network namespaces need root")
    found = run()
    bench = found if isinstance(found, Bench) else Bench("sync", "", *found)
    assert bench.holds
    assert bench.render().endswith("): network namespaces need root")
    assert "[not resolved] four hosts, one " in bench.render()


def test_a_claim_whose_repeats_are_on_both_sides_of_the_goal_is_not_resolved():
    open_claim = at_least("speed", 1.1, 1.0, ends=(0.9, 1.2))
    assert "not resolved] speed: 1.1 (goal: at least 1): the repeats are 0.9 to 1.2" in open_claim.render()
    assert of_runs(at_most, "loss", [3.0, 1.0, 2.0], 1.5).unresolved
    assert within("share", 2.5, 2, ends=(-2.5, 1.0)).unresolved
    told = [at_least("speed", 1.1, 1.0, ends=(1.0, 1.2)), at_most("loss", 1.0, 1.5, ends=(0.5, 1.5))]
    assert not any(claim.unresolved for claim in told)
    broken = at_least("speed", 0.9, 1.0, ends=(0.8, 0.95))
    assert not broken.unresolved
    # Only what is found not to hold counts against an experiment.
    assert Bench("b", "", [], [*told, open_claim]).holds
    assert not Bench("b", "", [], [*told, broken]).holds


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


def changes(*pairs: tuple[int, int], stall_s: float = 0.1, step_s: float = 0.1) -> list[Row]:
    common: Row = {"stall_s": stall_s, "step_s": step_s, "why": ""}
    return [{"workers": before, "then": after, **common} for before, after in pairs]


def test_repeats_become_one_row_for_each_case_with_their_spread():
    rows: list[Row] = [
        {"case": "a", "s": 1.0, "why": "first"},
        {"case": "b", "s": None, "why": ""},
        {"case": "a", "s": 4.0, "why": "second"},
        {"case": "a", "s": 2.0, "why": "third"},
    ]
    assert of_repeats(rows, ["case"], ["s"]) == [
        {"case": "a", "s": 2.0, "s_min": 1.0, "s_max": 4.0, "why": "first", "repeats": 3},
        {"case": "b", "s": None, "why": "", "repeats": 1},
    ]


def test_the_claims_of_elastic_need_every_change_and_every_policy():
    once = list(itertools.pairwise(elastic.SIZES))
    assert elastic._stall_claim("mlp", changes(*once), 1).holds
    assert not elastic._stall_claim("mlp", changes(*once[1:]), 1).holds
    assert not elastic._stall_claim("mlp", changes(*once, stall_s=0.6), 1).holds
    assert not elastic._stall_claim("mlp", changes(*once, stall_s=0.6), 1).unresolved
    sizes = list(itertools.pairwise(elastic.SIZES * 2))
    longer = [*changes(sizes[0], stall_s=0.6), *changes(*sizes[1:])]
    assert elastic._stall_claim("mlp", longer, 2).unresolved
    best = elastic.best_workers()
    good = [changes((best, best + 1), (best + 1, best))]
    assert elastic._policy_claim(good * 2).holds
    astray = elastic._policy_claim([*good, changes((1, best))])
    assert (astray.holds, astray.unresolved) == (False, "")
    busy = elastic._policy_claim([*good, changes((1, best), step_s=0.2)])
    assert "steps took up to 2.27 times what they sleep" in busy.unresolved
    assert elastic._policy_claim([*good, changes((best, best + 1), (best + 1, 1))]).value == 1
