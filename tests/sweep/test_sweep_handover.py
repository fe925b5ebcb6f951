"""Which worker trains which trial while workers come, go and die: every step of every trial counts once."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from plait.core.codec import encode
from plait.launcher.membership import Membership
from plait.sweeping.datasets import DataSets
from plait.sweeping.scheduler import HAND_OVER_S
from plait.sweeping.settings import SweepSettings
from support.coordinating import make_coordinator
from support.sweeping import sweep_of
from support.training import digits_job

WIDTH = 3
JOB = digits_job(steps=6)
SWEEPS = {
    "grid": sweep_of("seed=0,1,2,3,4", width=WIDTH, job=JOB),
    "halving": sweep_of("seed=0,1,2,3,4", width=WIDTH, job=JOB, kind="halving", eta=2, least_steps=2),
    "asha": sweep_of("seed=0,1,2,3,4", width=WIDTH, job=JOB, kind="asha", eta=2, least_steps=2),
}
SETS = DataSets()
ACTS = ("train", "train", "train", "train", "save", "take", "offer", "leave", "lose", "join", "join")


class Workers:
    """Workers of a sweep without models: their trials are numbers of steps, and so are the states on disk."""

    def __init__(self, sweep: SweepSettings, folder: Path) -> None:
        self.membership = Membership(1, (0, 1), ("here",) * 2)
        # By worker: its trials, each with its step and the step that it trains to.
        self.trials: dict[int, dict[int, list[int]]] = {0: {}, 1: {}}
        self.saved: Counter[int] = Counter()
        self.taken: Counter[tuple[int, int]] = Counter()
        self.coordinator = make_coordinator(sweep, folder, self.membership.members, elastic=True)
        self.coordinator.answer({"ask": "data", **encode(SETS.describe(sweep.train))})

    def ask(self, worker: int, **question: Any) -> dict[str, Any]:
        return self.coordinator.answer({"worker": worker, **question})

    def act(self, act: str, worker: int) -> None:
        getattr(self, f"_{act}")(worker)
        held = [trial for trials in self.trials.values() for trial in trials]
        assert len(held) == len(set(held)), "two workers train one trial"

    def _take(self, worker: int) -> None:
        own = self.trials[worker]
        found = self.ask(worker, ask="look") if not own else {"group": self._group}
        if "group" not in found:
            return
        self._group = found["group"]
        answer = self.ask(worker, ask="take", group=found["group"], count=WIDTH - len(own), begin=not own)
        for each in answer["trials"]:
            own[each["trial"]] = [self.saved[each["trial"]], each["goals"][0]]

    def _train(self, worker: int) -> None:
        if not self.trials[worker]:
            self._take(worker)
        for trial, (step, until) in list(self.trials[worker].items()):
            if step < until:
                self.trials[worker][trial][0] = step + 1
                self.taken[trial, step + 1] += 1
            if step + 1 >= until:
                self.saved[trial] = until
                self._report(worker, trial)

    def _report(self, worker: int, trial: int) -> None:
        step, _ = self.trials[worker][trial]
        result = {"metrics": {"loss": float(trial), "accuracy": 1.0 / (1 + trial)}, "train_loss": 0.0}
        until = self.ask(worker, ask="report", results=[(trial, step, *result.values())])["until"][0]
        self.trials[worker][trial][1] = until
        if until == 0:
            del self.trials[worker][trial]

    def _save(self, worker: int) -> None:
        for trial, (step, _) in self.trials[worker].items():
            self.saved[trial] = step

    def _hand_back(self, worker: int, trials: Sequence[int]) -> None:
        for trial in trials:
            self.saved[trial] = self.trials[worker][trial][0]
            self.ask(worker, ask="back", trial=trial, step=self.saved[trial])
            del self.trials[worker][trial]

    def _offer(self, worker: int) -> None:
        count = self.ask(worker, ask="spare", left_s=HAND_OVER_S)["count"]
        self._hand_back(worker, list(self.trials[worker])[:count])

    def _leave(self, worker: int) -> None:
        if len(self.trials) > 1:
            self._publish(tuple(each for each in self.membership.members if each != worker))
            self._hand_back(worker, list(self.trials[worker]))
            del self.trials[worker]

    def _lose(self, worker: int) -> None:
        if len(self.trials) == 1:
            return
        gone = self.trials.pop(worker)
        for trial, (step, _) in gone.items():
            # What was not saved is taken again.
            for undone in range(self.saved[trial] + 1, step + 1):
                self.taken[trial, undone] -= 1
        rest = tuple(each for each in self.membership.members if each != worker)
        self._publish(rest, lost=(*self.membership.lost, worker))
        for trial in gone:
            # It had asked this before it died, and is answered now.
            late = [(trial, 6, {"loss": 0.0}, 0.0)]
            answer = self.coordinator.answer({"ask": "report", "worker": worker, "results": late})
            assert answer == {"until": [0]}
        assert "group" not in self.ask(worker, ask="look")
        for group in {trial.group for trial in self.coordinator.scheduler.trials}:
            assert not self.ask(worker, ask="take", group=group, count=WIDTH, begin=True)["trials"]

    def _join(self, worker: int) -> None:
        if len(self.trials) < 4:
            number = max(*self.membership.members, *self.membership.lost, *self.trials) + 1
            self.trials[number] = {}
            self._publish((*self.membership.members, number))

    def _publish(self, members: tuple[int, ...], lost: tuple[int, ...] | None = None) -> None:
        lost = self.membership.lost if lost is None else lost
        self.membership = Membership(self.membership.version + 1, members, ("here",) * len(members), lost)
        self.coordinator.follow(self.membership)

    def finish(self) -> None:
        """Train with the workers that are left until all trials have ended."""
        for _ in range(60):
            for worker in list(self.trials):
                self.act("take", worker)
                self.act("train", worker)
            if self.ask(min(self.trials), ask="look").get("over"):
                return
        raise AssertionError("the sweep does not come to its end")


@pytest.mark.parametrize("name", SWEEPS)
@given(script=st.lists(st.tuples(st.sampled_from(ACTS), st.integers(0, 3)), min_size=20, max_size=40))
@settings(max_examples=12, deadline=None, phases=[Phase.generate])
def test_whoever_comes_goes_or_dies_each_step_of_a_trial_counts_once(
    name: str, script: list[tuple[str, int]]
):
    with tempfile.TemporaryDirectory() as folder:
        workers = Workers(SWEEPS[name], Path(folder))
        for act, choice in script:
            present = sorted(workers.trials)
            workers.act(act, present[choice % len(present)])
        workers.finish()
        table = workers.coordinator.scheduler.table()
        assert all(row.state in ("finished", "dropped") for row in table)
        expected = {(row.trial, step): 1 for row in table for step in range(1, row.step + 1)}
        assert +workers.taken == expected
        if name != "asha":  # which goes by who comes first
            whole = Workers(SWEEPS[name], Path(folder) / "whole")
            whole.finish()
            assert table == whole.coordinator.scheduler.table()


def test_the_worker_with_the_most_trials_divides_them_among_itself_and_the_idle_ones(tmp_path: Path):
    sweep = sweep_of(f"seed={','.join(map(str, range(11)))}", width=11, job=JOB)
    workers = Workers(sweep, tmp_path)
    workers._publish((0, 1, 2, 3))
    group = workers.ask(0, ask="look")["group"]
    for worker, count in ((0, 7), (1, 4)):
        answer = workers.ask(worker, ask="take", group=group, count=count, begin=False)
        workers.trials[worker] = {each["trial"]: [0, each["goals"][0]] for each in answer["trials"]}

    def spare(worker: int, left_s: float = HAND_OVER_S) -> int:
        return int(workers.ask(worker, ask="spare", left_s=left_s)["count"])

    assert spare(0) == 0
    workers.ask(2, ask="look")  # it is idle from now on
    assert (spare(1), spare(0)) == (0, 3)
    # It ends before another worker could have begun.
    assert spare(0, HAND_OVER_S / 2) == 0
    workers.ask(3, ask="look")
    assert spare(0) == 4
    # What is handed back is for them, not for those that have trials.
    workers._hand_back(0, range(4))
    takers = [w for w in range(4) if workers.ask(w, ask="take", group=group, count=1, begin=False)["trials"]]
    assert takers == [2, 3]
