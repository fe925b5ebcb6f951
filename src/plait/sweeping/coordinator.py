"""The coordinator of a sweep: its trial scheduler, its record on disk, and answers to its workers."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from plait.comm.rpc import Answer, Question
from plait.core import events as core_events
from plait.core import run_events
from plait.core.codec import encode, finite
from plait.core.errors import InputError
from plait.core.events import Event, EventLog
from plait.data.sampler import Position
from plait.launch.membership import Membership
from plait.launch.run_dir import RunDir
from plait.launch.worker import Worker
from plait.schema.results import SweepResult, TrialResult
from plait.schema.settings import TrainSettings
from plait.sweeping.array_record import Arrays
from plait.sweeping.datasets import DataSets
from plait.sweeping.elastic.assignments import Assignments
from plait.sweeping.running_trial import newest, save_state, trial_folder
from plait.sweeping.scheduler import Trial, TrialScheduler
from plait.sweeping.settings import SweepSettings
from plait.training import checkpoint as checkpoints
from plait.training import components
from plait.workloads.metrics import find_metric

REPORT_S = 0.2
ROWS = 12
# The most arrays in one progress report.
LINES = 32


class Coordinator:
    """Owns the trial scheduler and its record; workers reach it through `answer` alone.

    With `resume` it goes on with an earlier sweep of the folder. In an elastic sweep it may take over from
    another coordinator: `holders` then names the workers that may have trials, and is None otherwise.
    `on_holders` is called before a worker learns that it has trials, or that it has none any more.
    """

    def __init__(
        self,
        worker: Worker,
        settings: SweepSettings,
        folder: RunDir,
        sets: DataSets,
        resume: bool,
        holders: Sequence[int] | None = None,
        on_holders: Callable[[Sequence[int]], None] = lambda workers: None,
    ) -> None:
        self._worker = worker
        self._settings = settings
        self._folder = folder
        self._sets = sets
        takes_over = holders is not None
        past = _read(folder) if resume or takes_over else []
        events = [recorded.event for recorded in past]
        self._log = EventLog(folder.events(), rank=worker.id)
        groups = max(1, worker.world_size // settings.workers_per_array)
        self.scheduler = TrialScheduler(
            settings, groups, choose_metric(settings), self._steps_of, self._keep, self._copy
        )
        self.scheduler.open(events)
        self.arrays = Arrays(events, go_on=takes_over)
        self._remove_ended()
        self._assignments = Assignments(holders or ())
        self._on_holders = on_holders
        self._holders = self._assignments.holders
        self._is_closing = False
        # The members that are known, where workers come and go.
        self._membership = None if worker.memberships is None else worker.memberships.current
        self._latest: dict[int, tuple[int, float | None]] = {}
        self._started = time.time()
        self._trial_steps = 0
        self._reported = 0.0
        self.left = 0
        if takes_over:
            self._load_progress(past)
            self._membership = _members_of(past)
        else:
            self._keep(self._begun())

    def _load_progress(self, past: Sequence[core_events.Recorded]) -> None:
        """Count the steps of the sweep so far as the former coordinator did."""
        for recorded in past:
            if isinstance(recorded.event, run_events.SweepStarted):
                self._started, self._trial_steps = recorded.t, 0
                self._latest.clear()
            elif isinstance(recorded.event, run_events.TrialStep):
                self._count(recorded.event)

    def _begun(self) -> Event:
        settings, scheduler = self._settings, self.scheduler
        return run_events.SweepStarted(
            name=settings.train.name,
            model=settings.train.model.factory,
            search=settings.search.kind,
            over=tuple(dimension.key for dimension in settings.over),
            trials=scheduler.search.total,
            ended=scheduler.ended,
            metric=scheduler.metric,
            workers=self._worker.world_size,
            torch=torch.__version__,
            replicas=settings.replicas,
        )

    def _steps_of(self, settings: TrainSettings) -> int:
        return components.total_steps(settings, len(self._sets.of(settings)[0]), 0, Position())

    def _keep(self, event: Event) -> None:
        """Record an event so that it outlives this process."""
        self._log.record(event)
        self._log.flush()

    def _copy(self, winner: int, loser: int) -> None:
        """Give a trial another's weights and optimizer state; how far it is in its data stays its own."""
        source, own = newest(self._folder, winner), newest(self._folder, loser)
        assert source is not None
        assert own is not None
        save_state(self._folder, loser, replace(source, progress=own.progress))

    def answer(self, question: Question) -> Answer:
        """The answer to a worker's question: `ask` names it, the rest are its arguments."""
        arguments = dict(question)
        self._follow_members()
        found: Answer = getattr(self, f"_on_{arguments.pop('ask')}")(**arguments)
        if (holders := self._assignments.holders) != self._holders:
            self._on_holders(holders)
            self._holders = holders
        self._report()
        return found

    @property
    def _is_elastic(self) -> bool:
        return self._membership is not None

    def _follow_members(self) -> None:
        """Record that other workers take part, and give back the trials of those that are lost."""
        before = self._membership
        if before is None:
            return
        assert self._worker.memberships is not None
        now = self._worker.memberships.latest()
        for worker in now.lost:
            for trial in self._assignments.lose(worker):
                self.scheduler.give_back(trial)
        if now.version == before.version:
            return
        self._membership = now
        self.scheduler.workers = len(now.members)
        self._assignments.keep_idle(now.members)
        gone = set(before.members) - set(now.members)
        event = run_events.WorkersChanged(
            step=self._steps_done,
            version=now.version,
            members=now.members,
            joined=tuple(sorted(set(now.members) - set(before.members))),
            left=tuple(sorted(gone - set(now.lost))),
            lost=tuple(sorted(gone & set(now.lost))),
            seconds=0.0,
            by=now.by,
            why=now.why,
        )
        self._keep(event)
        self.arrays.end(event.lost)

    def _on_close(self) -> Answer:
        """Whether no worker has trials any more; if so, none gets any from now on."""
        self._is_closing = self.scheduler.is_over or not self._assignments.holders
        return {"quiet": self._is_closing}

    def _on_follow(self) -> Answer:
        """Nothing but to follow the members, which every question leads to."""
        return {}

    def _on_hold(self, worker: int, trials: list[int]) -> Answer:
        """A worker confirms the trials that it has from an earlier coordinator."""
        self._assignments.confirm(worker, [trial for trial in trials if self.scheduler.hold(trial)])
        return {}

    def _on_look(self, worker: int) -> Answer:
        """What waits for a worker that has nothing to do."""
        if self.scheduler.is_over:
            return {"over": True}
        waiting = [] if self._is_closing or not self._assignments.is_confirmed else self.scheduler.waiting()
        if not waiting:
            if self._is_elastic:
                self._assignments.set_idle(worker)
            return {"over": False}
        group, values = waiting[0].group, dict(waiting[0].values)
        share = math.ceil(self.scheduler.expected(waiting) / self._among(worker))
        return {"group": group, "share": share, "values": values}

    def _among(self, worker: int) -> int:
        """How many workers share out what waits: the idle ones, where `worker` is one of them."""
        return self._assignments.idle if self._assignments.is_idle(worker) else self.scheduler.workers

    def _on_take(self, worker: int, group: str, count: int, begin: bool) -> Answer:
        taken = []
        if self._assignments.may_take(worker) and not self._is_closing:
            taken = self.scheduler.take(group, count, begin, self._among(worker))
        self._assignments.assign(worker, [trial.number for trial in taken])
        search = self.scheduler.search
        drawn = len(self.scheduler.trials) == search.total
        # Trials of workers that leave or are lost come back.
        more = search.waits or not drawn or self._is_elastic
        return {"trials": [_assignment(trial) for trial in taken], "more": more}

    def _on_spare(self, worker: int, left_s: float) -> Answer:
        """How many of its trials a worker hands back for others that have none."""
        if self.scheduler.waiting():
            return {"count": 0}
        return {"count": self._assignments.to_hand_over(worker, left_s)}

    def _on_array(self, worker: int, trials: list[int], fused: bool, why: str) -> Answer:
        words = why or self._why_alone(trials)
        event = run_events.ArrayChanged(worker, tuple(trials), fused, words)
        self._log.record(event)
        self._flush_if_elastic()
        self.arrays.changed(event)
        return {}

    def _why_alone(self, trials: list[int]) -> str:
        """Why a trial trains alone, where its worker gives no reason."""
        if len(trials) != 1:
            return ""
        if self.scheduler.search.total == 1:
            return "the sweep has one trial"
        own = self.scheduler.trials[trials[0]]
        if any(other.group == own.group and other is not own for other in self.scheduler.trials):
            return "no other trial that can share its array is left or waits"
        keys = ", ".join(self.scheduler.apart(own))
        return f"no other trial that can share its array has been drawn; what keeps them apart: {keys}"

    def _on_split(self, trials: list[int]) -> Answer:
        self.scheduler.split(trials)
        for trial in trials:
            self._assignments.release(trial)
        return {}

    def _on_verified(
        self, worker: int, trials: int, seconds: float, unfused: dict[str, str], refused: str | None
    ) -> Answer:
        self._log.record(run_events.ArrayVerified(worker, trials, seconds, unfused, refused))
        return {}

    def _on_note(self, losses: list[Any], metrics: list[Any], signals: list[Any]) -> Answer:
        """Points of curves: (trial, step, loss), (trial, step, metrics), (trial, step, *signals)."""
        for trial, step, loss in losses:
            event = run_events.TrialStep(trial, step, loss)
            self._count(event)
            self._log.record(event)
        for trial, step, found in metrics:
            self._log.record(run_events.TrialEvaluated(trial, step, found))
        for each in signals:
            self._log.record(run_events.TrialSignals(*each))
        self._flush_if_elastic()
        return {}

    def _flush_if_elastic(self) -> None:
        """Write the record to disk where another coordinator may have to take over."""
        if self._is_elastic:
            self._log.flush()

    def _count(self, event: run_events.TrialStep) -> None:
        before = self._latest.get(event.trial, (self.scheduler.trials[event.trial].step, None))[0]
        self._trial_steps += max(0, event.step - before)
        self._latest[event.trial] = (event.step, event.loss)

    def _on_wanted(self, trial: int, metrics: Mapping[str, Any], train_loss: float | None) -> Answer:
        """Whether a trial with these results would be the best, so that its state is worth keeping."""
        return {"wanted": self.scheduler.would_be_best(trial, metrics, train_loss)}

    def _on_report(
        self, trial: int, step: int, metrics: Mapping[str, Any], train_loss: float | None
    ) -> Answer:
        until = self.scheduler.report(trial, step, metrics, train_loss)
        if until == 0:
            self._assignments.release(trial)
        self._remove_ended()
        return {"until": until}

    def _on_stop(
        self, trial: int, step: int, state: str, metrics: Mapping[str, Any], train_loss: float | None
    ) -> Answer:
        self.scheduler.stop(trial, step, state, metrics, train_loss)
        self._assignments.release(trial)
        self._remove_ended()
        return {}

    def _on_back(self, trial: int) -> Answer:
        self.scheduler.give_back(trial)
        self._assignments.release(trial)
        return {}

    def _on_leave(self) -> Answer:
        self.left += 1
        return {}

    def _remove_ended(self) -> None:
        """Remove the states of the trials that ended, except the best one's."""
        best = self.scheduler.best()
        for trial in self.scheduler.trials:
            folder = trial_folder(self._folder, trial.number).path
            if trial.has_ended and trial is not best and folder.exists():
                shutil.rmtree(folder, ignore_errors=True)

    def _report(self) -> None:
        now = time.perf_counter()
        if now - self._reported >= REPORT_S:
            self._reported = now
            self._worker.report(self.progress())

    @property
    def _steps(self) -> dict[int, int]:
        """How many steps each trial has taken."""
        trials = self.scheduler.trials
        return {t.number: t.step if t.has_ended else max(t.step, self._step_of(t)) for t in trials}

    @property
    def _steps_done(self) -> int:
        return sum(self._steps.values())

    def progress(self) -> dict[str, Any]:
        """The progress of the sweep: steps of all trials, and the best and running trials."""
        scheduler = self.scheduler
        steps = self._steps
        total = sum(t.step if t.has_ended else t.steps for t in scheduler.trials)
        rate = self._trial_steps / max(time.time() - self._started, 1e-9)
        done = sum(steps.values())
        found: dict[str, Any] = {
            "step": done,
            "steps": total,
            "trials": scheduler.search.total,
            "ended": scheduler.ended,
            "trial_steps_per_s": round(rate, 3),
            "rows": encode([self._row(row, steps) for row in self._shown()]),
            "arrays": encode(self.arrays.table(LINES)),
        }
        return {**found, "left_s": round((total - done) / rate, 1)} if rate > 0 else found

    def _shown(self) -> list[TrialResult]:
        running = {trial.number for trial in self.scheduler.trials if trial.state == "running"}
        table = self.scheduler.table()
        best = [row for row in table if row.trial not in running and row.state != "waiting"]
        going = [row for row in table if row.trial in running]
        return [*best[: ROWS - min(len(going), ROWS // 2)], *going][:ROWS]

    def _row(self, row: TrialResult, steps: Mapping[int, int]) -> TrialResult:
        number = row.trial
        loss = row.train_loss if row.train_loss is not None else self._latest.get(number, (0, None))[1]
        return replace(row, step=steps[number], train_loss=loss)

    def _step_of(self, trial: Trial) -> int:
        return self._latest.get(trial.number, (0, None))[0]

    def suspend(self) -> None:
        """Write the record to disk, for another coordinator to go on with."""
        self._log.close()

    def close(self) -> SweepResult:
        """End the record and publish the best trial's checkpoint; the result of the sweep.

        A sweep that has trials left was stopped.
        """
        reason = "finished" if self.scheduler.is_over else "stopped"
        best = self.scheduler.best()
        if best is not None:
            self._publish(best)
        seconds = max(time.time() - self._started, 1e-9)
        rate = round(self._trial_steps / seconds, 1)
        number = None if best is None else best.number
        self._keep(run_events.SweepEnded(reason, self.scheduler.ended, number, round(seconds, 3), rate))
        self._log.close()
        self._worker.report(self.progress())
        return SweepResult(
            reason=reason,
            step=self.scheduler.ended,
            steps=self.scheduler.search.total,
            search=self._settings.search.kind,
            metric=self.scheduler.metric,
            best=None if best is None else self.scheduler.table()[0],
            trials=self.scheduler.table(),
            arrays=self.arrays.table(),
            seconds=round(seconds, 3),
            trial_steps_per_s=rate,
            workers=self._worker.world_size,
            replicas=self._settings.replicas,
        )

    def _publish(self, best: Trial) -> None:
        """The best trial's settings and checkpoint where an ordinary run has them."""
        state = newest(self._folder, best.number)
        if state is None:  # published by an earlier part of this sweep
            return
        shutil.copyfile(trial_folder(self._folder, best.number).settings, self._folder.settings)
        shutil.rmtree(self._folder.checkpoints, ignore_errors=True)
        checkpoints.save(self._folder.checkpoints, state)
        if self.scheduler.is_over:
            shutil.rmtree(trial_folder(self._folder, best.number).path.parent)


def choose_metric(settings: SweepSettings) -> str:
    """What trials are compared by; checked against what evaluation gives."""
    train, wanted = settings.train, settings.search.metric
    found = find_metric(train.evaluate.metric, train.loss)
    known = ["loss"] if found is None else ["loss", found[0]]
    if wanted == "auto":
        return known[-1]
    if wanted not in known:
        raise InputError(f"--metric: found {wanted!r}, but evaluation gives {' and '.join(known)}")
    return wanted


def _assignment(trial: Trial) -> dict[str, Any]:
    return {
        "trial": trial.number,
        "values": dict(trial.values),
        "steps": trial.steps,
        "until": trial.goal,
        "train_loss": None if trial.train_loss is None else finite(trial.train_loss),
    }


def _members_of(past: Sequence[core_events.Recorded]) -> Membership:
    """The members of a sweep by its record."""
    version, members = 0, tuple[int, ...]()
    for recorded in past:
        match recorded.event:
            case run_events.SweepStarted():
                version, members = 1, tuple(range(recorded.event.workers))
            case run_events.WorkersChanged():
                version, members = recorded.event.version, recorded.event.members
            case _:
                pass
    return Membership(version, members, ())


def _read(folder: RunDir) -> list[core_events.Recorded]:
    return list(core_events.read(folder.events())) if folder.events().exists() else []
