"""The coordinator of a sweep: its trial scheduler, its record on disk, and answers to its workers."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
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
from plait.launch.run_dir import RunDir
from plait.launch.worker import Worker
from plait.schema.results import SweepResult, TrialResult
from plait.schema.settings import TrainSettings
from plait.sweeping.array_record import Arrays
from plait.sweeping.datasets import DataSets
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
    """Owns the trial scheduler and its record; workers reach it through `answer` alone."""

    def __init__(
        self, worker: Worker, settings: SweepSettings, folder: RunDir, sets: DataSets, resume: bool
    ) -> None:
        self._worker = worker
        self._settings = settings
        self._folder = folder
        self._sets = sets
        past = [recorded.event for recorded in _read(folder)] if resume else []
        self._log = EventLog(folder.events(), rank=0)
        groups = worker.world_size // settings.workers_per_array
        self.scheduler = TrialScheduler(
            settings, groups, choose_metric(settings), self._steps_of, self._keep, self._copy
        )
        self.scheduler.open(past)
        self.arrays = Arrays(past)
        self._remove_ended()
        self._latest: dict[int, tuple[int, float | None]] = {}
        self._started = time.perf_counter()
        self._trial_steps = 0
        self._reported = 0.0
        self.left = 0
        self._keep(self._begun())

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
        found: Answer = getattr(self, f"_on_{arguments.pop('ask')}")(**arguments)
        self._report()
        return found

    def _on_look(self) -> Answer:
        """What waits for a worker that has nothing to do."""
        waiting = self.scheduler.waiting()
        if not waiting:
            return {"over": self.scheduler.is_over}
        group, values = waiting[0].group, dict(waiting[0].values)
        return {"group": group, "waiting": self.scheduler.expected(waiting), "values": values}

    def _on_take(self, group: str, count: int, begin: bool) -> Answer:
        taken = self.scheduler.take(group, count, begin)
        search = self.scheduler.search
        drawn = len(self.scheduler.trials) == search.total
        return {"trials": [_assignment(trial) for trial in taken], "more": search.waits or not drawn}

    def _on_array(self, worker: int, trials: list[int], fused: bool, why: str) -> Answer:
        words = why or self._why_alone(trials)
        event = run_events.ArrayChanged(worker, tuple(trials), fused, words)
        self._log.record(event)
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
        return {}

    def _on_verified(
        self, worker: int, trials: int, seconds: float, unfused: dict[str, str], refused: str | None
    ) -> Answer:
        self._log.record(run_events.ArrayVerified(worker, trials, seconds, unfused, refused))
        return {}

    def _on_note(self, losses: list[Any], metrics: list[Any], signals: list[Any]) -> Answer:
        """Points of curves: (trial, step, loss), (trial, step, metrics), (trial, step, *signals)."""
        for trial, step, loss in losses:
            before = self._latest.get(trial, (self.scheduler.trials[trial].step, None))[0]
            self._trial_steps += max(0, step - before)
            self._latest[trial] = (step, loss)
            self._log.record(run_events.TrialStep(trial, step, loss))
        for trial, step, found in metrics:
            self._log.record(run_events.TrialEvaluated(trial, step, found))
        for each in signals:
            self._log.record(run_events.TrialSignals(*each))
        return {}

    def _on_wanted(self, trial: int, metrics: Mapping[str, Any], train_loss: float | None) -> Answer:
        """Whether a trial with these results would be the best, so that its state is worth keeping."""
        return {"wanted": self.scheduler.would_be_best(trial, metrics, train_loss)}

    def _on_report(
        self, trial: int, step: int, metrics: Mapping[str, Any], train_loss: float | None
    ) -> Answer:
        until = self.scheduler.report(trial, step, metrics, train_loss)
        self._remove_ended()
        return {"until": until}

    def _on_stop(
        self, trial: int, step: int, state: str, metrics: Mapping[str, Any], train_loss: float | None
    ) -> Answer:
        self.scheduler.stop(trial, step, state, metrics, train_loss)
        self._remove_ended()
        return {}

    def _on_back(self, trial: int) -> Answer:
        self.scheduler.give_back(trial)
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

    def progress(self) -> dict[str, Any]:
        """The progress of the sweep: steps of all trials, and the best and running trials."""
        scheduler = self.scheduler
        steps = {t.number: t.step if t.has_ended else max(t.step, self._step_of(t)) for t in scheduler.trials}
        total = sum(t.step if t.has_ended else t.steps for t in scheduler.trials)
        rate = self._trial_steps / max(time.perf_counter() - self._started, 1e-9)
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

    def close(self, reason: str) -> SweepResult:
        """End the record and publish the best trial's checkpoint; the result of the sweep."""
        best = self.scheduler.best()
        if best is not None:
            self._publish(best)
        seconds = time.perf_counter() - self._started
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


def _read(folder: RunDir) -> list[core_events.Recorded]:
    return list(core_events.read(folder.events())) if folder.events().exists() else []
