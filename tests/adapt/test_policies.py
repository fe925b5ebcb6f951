"""Policies decide by recorded signals alone: no process, no clock, no chance."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.adapt.changes import BatchSizeChange, SyncChange, TopologyChange, WorkersChange
from plait.adapt.history import KEPT, SignalHistory
from plait.adapt.policies.batch_size import AdaptiveBatchSize
from plait.adapt.policies.policy import Policy, Proposal, replay
from plait.adapt.policies.registry import POLICIES, make_policy
from plait.adapt.policies.sync import AdaptiveSync
from plait.adapt.policies.topology import AdaptiveTopology
from plait.adapt.policies.workers import AdaptiveWorkers
from plait.adapt.policy_source import PolicySource
from plait.core import events
from plait.core.codec import encode
from plait.core.errors import JobError
from plait.core.run_events import Signals
from support.signals import signals_at


def simulate(
    policy: Policy, next_signals: Callable[[list[Proposal]], Signals | None]
) -> list[tuple[int, Proposal]]:
    """Same as `replay`, where the next signals depend on all earlier requests; None ends it."""
    requested: list[tuple[int, Proposal]] = []
    signals: list[Signals] = []
    state: Any = None
    while (now := next_signals([proposal for _, proposal in requested])) is not None:
        signals = [*signals, now][-KEPT:]
        decision = policy.decide(signals, state)
        state = decision.state
        requested += [(now.step, proposal) for proposal in decision.proposals]
    return requested


class Links:
    """A run whose throughput depends on the topology and on traffic at the star's root from `busy` on."""

    def __init__(
        self, steps: int, busy: range, slow: dict[str, float], noise: float = 0.0, seed: int = 0
    ) -> None:
        self.steps, self.busy, self.slow = steps, busy, slow
        self.used: list[str] = []
        self.rates: list[float] = []
        # The steps after which the changes asked for came into use.
        self._switched: list[int] = []
        self._draws = random.Random(seed)
        self._noise = noise

    def next(self, asked: list[Proposal]) -> Signals | None:
        """The signals of the next step; a change counts from the step after the one that is under way."""
        if len(self.used) == self.steps:
            return None
        topologies = [p.change.topology for p in asked if isinstance(p.change, TopologyChange)]
        chosen = ["star", *topologies]
        while len(self._switched) < len(chosen) - 1:
            self._switched.append(len(self.used) + 1)
        step = len(self.used) + 1
        current = chosen[sum(at < step for at in self._switched)]
        factor = self.slow.get(current, 1.0) if step in self.busy else 1.0
        factor *= 1 + self._noise * self._draws.uniform(-1, 1)
        link_s = 0.02 / factor
        step_s = 0.08 + link_s
        self.used.append(current)
        self.rates.append(64 / step_s)
        return signals_at(
            step,
            topology=current,
            step_s=step_s,
            samples_per_s=64 / step_s,
            link_bytes_per_s=(2e6 / link_s,) * 4,
        )


def test_a_slow_star_is_left_within_five_steps_and_found_again_when_the_traffic_ends():
    links = Links(400, range(50, 200), {"star": 0.05})
    asked = simulate(AdaptiveTopology(("ring", "clique"), retry_steps=20), links.next)
    first_step, first = asked[0]
    assert first.change == TopologyChange("ring")
    assert first_step + 1 - 49 <= 5, "signals are a step late"
    assert "4 of 4 workers" in first.why
    assert set(links.used[60:70]) == {"ring"}, "in use within ten steps"
    assert links.used[-1] == "star"
    # While it is still slow the star is tried ever more rarely.
    tries = [step for step, proposal in asked if proposal.change == TopologyChange("star")]
    gaps = [b - a for a, b in itertools.pairwise(tries)]
    assert gaps == sorted(gaps)
    assert len(tries) <= 4


def test_candidates_are_tried_until_one_restores_the_throughput():
    links = Links(120, range(30, 120), {"star": 0.05, "ring": 0.1, "clique": 0.2, "tree": 1.0})
    asked = simulate(AdaptiveTopology(("ring", "clique", "tree")), links.next)
    assert [p.change.topology for _, p in asked[:3]] == ["ring", "clique", "tree"]
    assert links.used[70] == "tree"


def test_where_no_candidate_is_good_the_best_is_kept():
    links = Links(100, range(30, 200), {"star": 0.05, "ring": 0.3, "clique": 0.1})
    asked = simulate(AdaptiveTopology(("ring", "clique")), links.next)
    assert [p.change.topology for _, p in asked[:3]] == ["ring", "clique", "ring"]
    assert set(links.used[60:90]) == {"ring"}
    assert "best of what was tried" in asked[2][1].why


def test_it_is_armed_again_after_a_switch():
    """First the star's root is busy, then also the ring."""

    class Twice(Links):
        def next(self, asked: list[Proposal]) -> Signals | None:
            if len(self.used) == 99:
                self.slow = {"star": 0.05, "ring": 0.05}
            return super().next(asked)

    links = Twice(160, range(30, 400), {"star": 0.05})
    simulate(AdaptiveTopology(("ring", "tree"), retry_steps=500), links.next)
    assert links.used[80] == "ring"
    assert links.used[-1] == "tree"


def test_one_slow_worker_is_no_majority_and_changes_no_topology():
    def signals(step: int) -> Signals:
        slow = step > 40
        return signals_at(
            step, step_s=0.3 if slow else 0.1, link_bytes_per_s=(1e8, 1e8, 1e8, 1e6 if slow else 1e8)
        )

    assert replay(AdaptiveTopology(), [signals(step) for step in range(1, 100)]) == []


@given(seed=st.integers(0, 1000), noise=st.floats(0.0, 0.35))
@settings(max_examples=15, deadline=None)
def test_noise_alone_never_switches_the_topology(seed: int, noise: float):
    links = Links(150, range(0), {}, noise, seed)
    assert simulate(AdaptiveTopology(), links.next) == []


def noisy(step: int, **values: Any) -> Signals:
    return signals_at(step, **{"noise_scale": 1000.0, "variance": 500.0, "squared_norm": 0.5, **values})


def grown(policy: AdaptiveBatchSize, noise_of_step: Any, steps: int) -> list[tuple[int, Any]]:
    """The changes of a run that applies what is asked for."""
    step = 0

    def following(asked: list[Proposal]) -> Signals | None:
        nonlocal step
        step += 1
        last = asked[-1].change if asked else BatchSizeChange(64)
        scale = noise_of_step(step)
        values = {"noise_scale": scale, "variance": scale * 0.5}
        return (
            noisy(step, batch_size=last.batch_size, lr_factor=last.lr_factor, **values)
            if step <= steps
            else None
        )

    return [(at, proposal.change) for at, proposal in simulate(policy, following)]


@pytest.mark.parametrize(
    ("rule", "factors"), [("linear", [2, 4, 8]), ("sqrt", [2**0.5, 2, 8**0.5]), ("none", [1, 1, 1])]
)
def test_batches_grow_with_the_noise_scale_and_the_learning_rate_by_the_rule(rule, factors):
    changes = grown(AdaptiveBatchSize(512, every_steps=10, lr=rule), lambda step: 40.0 * step, 100)
    assert [change.batch_size for _, change in changes] == [128, 256, 512]
    assert [change.lr_factor for _, change in changes] == pytest.approx(factors)
    assert [at for at, _ in changes] == [11, 21, 31], "not before averages have settled"


def test_adascale_gains_between_one_and_the_growth_of_the_batch_and_follows_the_noise():
    changes = grown(
        AdaptiveBatchSize(256, every_steps=10, lr="adascale"), lambda s: 600.0 if s < 60 else 30.0, 100
    )
    sizes, gains = [c.batch_size for _, c in changes], [c.lr_factor for _, c in changes]
    assert sizes[:2] == [128, 256]
    assert 1 < gains[0] < 2 < gains[1] < 4
    assert sizes[-1] == 256
    assert 1 < gains[-1] < gains[1]


def test_batches_shrink_only_where_they_may_and_not_below_the_jobs_own():
    def fading(step: int) -> float:
        return 600.0 if step < 40 else 1.0

    assert grown(AdaptiveBatchSize(256, every_steps=10), fading, 100)[-1][1].batch_size == 256
    shrunk = grown(AdaptiveBatchSize(256, every_steps=10, shrink=True), fading, 200)
    assert [c.batch_size for _, c in shrunk] == [128, 256, 128, 64]


@given(st.lists(st.floats(130, 500), min_size=20, max_size=20))
@settings(max_examples=30, deadline=None)
def test_a_noise_scale_between_the_thresholds_changes_nothing(scales: list[float]):
    """Of batches of 256: growth needs 512, shrinking less than 64."""
    policy = AdaptiveBatchSize(4096, every_steps=1, shrink=True)
    recorded = [noisy(step, batch_size=256, noise_scale=scale) for step, scale in enumerate(scales, 1)]
    assert replay(policy, recorded) == []


def test_without_a_noise_scale_the_batch_stays():
    assert replay(AdaptiveBatchSize(512, every_steps=1), [signals_at(step) for step in range(1, 50)]) == []


@pytest.mark.parametrize(("best", "asked"), [(3, [3, 4, 3]), (4, [3, 4]), (2, [3, 2])])
def test_workers_are_added_until_one_adds_little_and_then_one_goes(best: int, asked: list[int]):
    workers, step, applied = 2, 0, 0

    def following(proposals: list[Proposal]) -> Signals | None:
        nonlocal workers, step, applied
        step += 1
        if step > 120:
            return None
        now = signals_at(step, workers=workers, samples_per_s=100.0 * min(workers, best))
        # Applied after the signals of the step under way.
        if len(proposals) > applied:
            change = proposals[-1].change
            assert isinstance(change, WorkersChange)
            workers, applied = change.workers, len(proposals)
        return now

    found = simulate(AdaptiveWorkers(most=4), following)
    assert [p.change.workers for _, p in found] == asked


def test_stragglers_lead_to_partial_reduce_and_their_end_back():
    def signals(step: int, sync: str) -> Signals:
        slow = 0.3 if 20 <= step < 60 else 0.08
        return signals_at(step, sync=sync, work_s=(0.08, slow, 0.08, 0.08))

    step = 0

    def following(asked: list[Proposal]) -> Signals | None:
        nonlocal step
        step += 1
        sync = asked[-1].change.sync if asked else "all-reduce"
        return signals(step, sync) if step <= 100 else None

    (left_at, left), (back_at, back) = simulate(AdaptiveSync(), following)
    assert left.change == SyncChange("partial-reduce")
    assert "worker 1" in left.why
    assert back.change == SyncChange("all-reduce")
    assert 20 < left_at < 30 < 60 <= back_at < 70


@given(st.lists(st.floats(0.097, 0.119), min_size=20, max_size=20), st.booleans())
@settings(max_examples=30, deadline=None)
def test_a_worker_at_the_edge_does_not_flap_between_syncs(times: list[float], apart: bool):
    """Between calm (1.2 times) and slow (1.5 times) whatever is used stays in use."""
    sync = "partial-reduce" if apart else "all-reduce"
    recorded = [
        signals_at(step, sync=sync, work_s=(0.08, seconds, 0.08, 0.08))
        for step, seconds in enumerate(times, 1)
    ]
    assert replay(AdaptiveSync(), recorded) == []


def larger_when_flat(signals: list[Signals], state: Any, patience: int = 3) -> tuple[list[Any], Any]:
    """A user's own policy with a state: double the batch once the loss has not fallen for a while."""
    best, since = state or (float("inf"), 0)
    now = signals[-1]
    if now.loss < best:
        return [], [now.loss, now.step]
    if now.step - since < patience:
        return [], [best, since]
    return [BatchSizeChange(2 * now.batch_size, 2.0)], [best, now.step]


def ring_at_ten(signals: list[Signals]) -> list[Any]:
    return [TopologyChange("ring")] if signals[-1].step == 10 else []


NONSENSE = {
    "words": "ring",
    "a list of words": ["ring"],
    "one change": BatchSizeChange(64),
    "half a worker": [WorkersChange(2.5)],
    "workers in words": [WorkersChange("3")],
    "truth": [BatchSizeChange(True)],
    "a proposal of words": [Proposal("ring", "why")],
    "a reason that is none": [Proposal(BatchSizeChange(64), 7)],
    "a number": 7,
}


def returns_nonsense(signals: list[Signals], which: str) -> Any:
    return NONSENSE[which]


def returns_no_pair(signals: list[Signals], state: Any) -> Any:
    return [BatchSizeChange(64)]


def returns_an_object(signals: list[Signals], state: Any) -> Any:
    return [], object()


def counts_in_numpy(signals: list[Signals]) -> list[Any]:
    return [BatchSizeChange(numpy.int64(128), numpy.float32(2.0))]


def fails(signals: list[Signals]) -> list[Any]:
    raise ZeroDivisionError("no luck")


def test_a_users_own_function_decides_with_and_without_a_state():
    flat = make_policy("test_policies:larger_when_flat", {"patience": 5})
    recorded = [signals_at(step, loss=max(1.0, 10.0 - step)) for step in range(1, 16)]
    assert [(at, p.change) for at, p in replay(flat, recorded)] == [(14, BatchSizeChange(128, 2.0))]
    (asked,) = replay(make_policy("test_policies:ring_at_ten", {}), recorded)
    assert asked == (10, Proposal(TopologyChange("ring"), "decided by test_policies:ring_at_ten"))


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("batchsize", {"most": 4}, "did you mean 'batch-size'"),
        ("batch-size", {}, "'most' is missing"),
        ("batch-size", {"most": 64, "factr": 3}, "did you mean 'factor'"),
        ("batch-size", {"most": "64"}, "expected a whole number"),
        ("batch-size", {"most": 64, "lr": "cubic"}, "one of linear, sqrt, adascale"),
        ("batch-size", {"most": 64, "factor": 1.0}, "factor above 1"),
        ("topology", {"candidates": []}, "expected candidates"),
        ("workers", {"most": 0}, "1 or more"),
        ("sync", {"slow": 1.1, "calm": 1.4}, "calm <= slow"),
        ("steps", {"changes": {"ten": {"workers": 3}}}, "whole numbers"),
        ("steps", {"changes": {10: {"batchsize": 3}}}, "did you mean 'batch_size'"),
        ("steps", {"changes": {10: {"topology": "ring", "root": 3}}}, "'root'"),
        ("test_policies:nowhere", {}, "has no 'nowhere'"),
        ("test_policies:ring_at_ten", {"often": 3}, "takes no 'often'"),
    ],
)
def test_what_no_policy_can_be_made_of_is_refused_in_words(kind: str, options: dict[str, Any], words: str):
    with pytest.raises(JobError, match=words):
        make_policy(kind, options)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("test_policies:returns_no_pair", r"returned \[BatchSizeChange.*\], expected \(changes, state\)"),
        ("test_policies:returns_an_object", "returned <object object.*, expected a state of numbers"),
        ("test_policies:fails", "no luck"),
        # Builtins, of which some have no signature.
        ("builtins:max", "returned .*, expected a list of"),
        ("builtins:len", "returned .*1.*, expected a list of"),
        ("builtins:dict", "failed with TypeError"),
    ],
)
def test_a_users_function_that_answers_wrongly_is_named(name: str, words: str):
    with pytest.raises(JobError, match=f"{name}.*{words}"):
        replay(make_policy(name, {}), [signals_at(1)])


@pytest.mark.parametrize("which", NONSENSE)
def test_what_a_users_function_returns_wrongly_is_shown(which: str):
    with pytest.raises(JobError) as caught:
        replay(make_policy("test_policies:returns_nonsense", {"which": which}), [signals_at(1)])
    found = NONSENSE[which]
    shown = repr(found[0] if isinstance(found, list) else found)
    assert str(caught.value).startswith(f"adapt: test_policies:returns_nonsense returned {shown}, expected ")


def test_numbers_of_numpy_are_numbers():
    ((_, asked),) = replay(make_policy("test_policies:counts_in_numpy", {}), [signals_at(1)])
    assert asked.change == BatchSizeChange(128, 2.0)
    assert type(asked.change.batch_size) is int


def test_a_table_is_exact_and_due_where_it_says():
    history = SignalHistory()
    table = make_policy(
        "steps", {"changes": {5: {"batch_size": 128, "lr_factor": 2}, 9: {"topology": "ring"}}}
    )
    source = PolicySource([("steps", table)], history)
    assert (source.next_due(0), source.next_due(5), source.next_due(9)) == (5, 9, None)
    (asked,) = source.due(5)
    assert (asked.change, asked.by, asked.why) == (BatchSizeChange(128, 2.0), "steps", "step 5")
    assert source.due(6) == []


@pytest.mark.parametrize(
    "changes",
    [{5: {"batch_size": 0}}, {5: {"batch_size": 8, "lr_factor": -1.0}}, {-3: {"batch_size": 8}}],
)
def test_a_table_that_no_run_can_follow_is_refused_before_it_begins(changes: dict[int, Any]):
    with pytest.raises(JobError, match=r"adapt\.changes.*expected"):
        make_policy("steps", {"changes": changes})


def test_signals_of_another_number_of_workers_are_not_compared_with_later_ones():
    before, after = SignalHistory(), SignalHistory()
    before.add(signals_at(1))
    after.load(json.loads(json.dumps(before.state())))
    assert after.newest() == before.newest()
    after.add(replace(signals_at(2), workers=signals_at(1).workers + 1))
    assert [signals.step for signals in after.newest()] == [2]
    damaged = {"newest": [encode(signals_at(1)), {"step": "two"}], "asked_at": 1}
    after.load(damaged)
    assert (after.newest(), after.asked_at) == ((), 0)


def test_recorded_events_are_what_policies_are_replayed_on(tmp_path: Path):
    log = events.EventLog(tmp_path / "rank0.jsonl", 0)
    for step in range(1, 40):
        log.record(signals_at(step, noise_scale=300.0, variance=1.0, squared_norm=1.0))
    log.close()
    recorded = [r.event for r in events.read(tmp_path / "rank0.jsonl") if isinstance(r.event, Signals)]
    ((at, asked),) = replay(AdaptiveBatchSize(128, every_steps=38), recorded)
    assert (at, asked.change) == (39, BatchSizeChange(128, 2.0))


@pytest.mark.parametrize("kind", [kind for kind in POLICIES if kind != "steps"])
def test_a_policy_goes_on_from_its_saved_state_as_if_never_interrupted(kind: str):
    options = {"most": 512} if kind in ("batch-size", "workers") else {}
    recorded = [
        noisy(
            step,
            step_s=0.5 if step > 30 else 0.1,
            work_s=(0.08, 0.08, 0.08, 0.5 if step > 30 else 0.08),
            planned_s=(0.08,) * 4,
            link_bytes_per_s=(1e7 if step > 30 else 1e8,) * 4,
        )
        for step in range(1, 60)
    ]

    def asked(interrupted_at: int | None) -> list[Any]:
        history = SignalHistory()
        source = PolicySource([(kind, make_policy(kind, options))], history)
        found = []
        for signals in recorded:
            if signals.step == interrupted_at:
                kept, seen = json.loads(json.dumps([source.state(), history.state()]))
                history = SignalHistory()
                source = PolicySource([(kind, make_policy(kind, options))], history)
                source.load(kept)
                history.load(seen)
            history.add(signals)
            found += source.due(signals.step + 1)
        return found

    assert asked(None) == asked(33) != []
