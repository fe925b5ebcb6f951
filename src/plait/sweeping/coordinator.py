"""The coordinator of a sweep: its trial scheduler, its record on disk, and answers to its workers.

It runs in a separate process and ends with the job.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from plait.adapt.members import workers_changed
from plait.callbacks.callback import TrialCallbacks, callbacks_of
from plait.callbacks.records import StartRecord
from plait.core import events as core_events
from plait.core import run_events
from plait.core.codec import decode, encode, finite
from plait.core.events import Event, EventLog
from plait.launcher.membership import Membership
from plait.launcher.run_dir import RunDir
from plait.launcher.worker_process import CoordinatorProcess
from plait.schema.results import SweepResult
from plait.sweeping.array_record import Arrays
from plait.sweeping.datasets import DataDescription, DescribedData, UnknownDataError
from plait.sweeping.elastic.group_formation import WorkerGroups
from plait.sweeping.progress import SweepProgress
from plait.sweeping.scheduler import TrialScheduler
from plait.sweeping.search.compared_by import check_comparable, choose_metric
from plait.sweeping.search.study import open_trials
from plait.sweeping.settings import SweepRequest, SweepSettings
from plait.sweeping.trials.scheduled_trial import Report
from plait.sweeping.trials.trial_files import copy_state, publish, remove, trial_folder
from plait.sync.allreduce.autotune import TopologyChosen
from plait.training.process import begin_process

REPORT_S = 0.2
_SYNC_OF_ELASTIC = run_events.SyncChosen(
    "all-reduce", "the groups of an elastic sweep would each measure and choose"
)

Answer = dict[str, Any]


def coordinate(process: CoordinatorProcess, order: Mapping[str, Any]) -> dict[str, Any]:
    """Run the coordinator of a sweep; returns the result of the sweep."""
    request = begin_process(SweepRequest, order)
    coordinator = Coordinator(
        request.settings,
        RunDir(request.folder),
        request.resume,
        process.membership,
        process.is_elastic,
        process.report,
        request.run,
    )
    process.serve(coordinator.answer, coordinator.follow)
    return coordinator.close().to_dict()


class Coordinator:
    """Owns the trial scheduler and its record; workers call it through `answer` only.

    With `resume` it continues the earlier sweep of the folder. `report` is called with the progress.
    """

    def __init__(
        self,
        settings: SweepSettings,
        folder: RunDir,
        resume: bool,
        membership: Membership,
        is_elastic: bool,
        report: Callable[[dict[str, Any]], None],
        run: str | None = None,
    ) -> None:
        self._settings = settings
        self._folder = folder
        self._membership = membership
        self._is_elastic = is_elastic
        self._send_report = report
        earlier = core_events.read(folder.events()) if resume and folder.events().exists() else ()
        self._past = [recorded.event for recorded in earlier]
        self._sync = run_events.last_sync(self._past)
        self._topologies = [event for event in self._past if isinstance(event, TopologyChosen)]
        self._callbacks = TrialCallbacks(
            callbacks_of(settings.train),
            lambda trial: trial_folder(folder, trial).checkpoints,
            self._start_of,
        )
        self._log = EventLog(folder.events(), rank=0, on_event=self._on_event)
        self._data = DescribedData()
        # Audited steps, and the largest difference found in them.
        self._audited, self._largest = 0, 0.0
        self._groups = WorkerGroups(settings.workers_per_array, membership)
        self._study = open_trials(settings, folder, run)
        self._study.follow(*self._past)
        self.scheduler = TrialScheduler(
            settings,
            max(1, len(self._groups.firsts)),
            choose_metric(settings),
            self._data.steps_of,
            self._keep,
            partial(copy_state, folder),
            lambda trial: self._data.of(trial).seed,
            self._study,
        )
        self.arrays = Arrays(self._past)
        # The trials whose checkpoints were removed; an ended trial writes no other.
        self._removed: set[int] = set()
        # The workers that asked for trials when none waited; those that wait now are for them.
        self._idle: set[int] = set()
        self._progress = SweepProgress(self.scheduler, self.arrays, self._past)
        self._reported = 0.0
        self._has_begun = False

    def _begin(self) -> None:
        """Draw the first trials and record the start of the sweep; called again if data are unknown."""
        past, self._past = self._past, []
        self.scheduler.open(past)
        for trial in self.scheduler.trials[:1]:
            has_test_split = self._data.of(trial.settings).has_test_split
            check_comparable(self._settings, self.scheduler.metric, has_test_split)
        self._has_begun = True
        self._remove_ended()
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
            workers=len(self._membership.members),
            torch=torch.__version__,
            replicas=settings.replicas,
        )

    def _start_of(self, trial: int) -> StartRecord:
        """What the callbacks of a trial are told of it."""
        scheduled, folder = self.scheduler.trials[trial], self._folder.path
        settings, step = encode(scheduled.settings), self._progress.step_of(trial)
        return StartRecord(self._settings.train.name, folder, step, settings, trial, scheduled.values)

    def _on_event(self, event: Event) -> None:
        self._callbacks.handle(event)
        self._progress.follow(event)

    def _keep(self, *events: Event) -> None:
        """Record events, flush them to disk, and tell the study."""
        for event in events:
            self._log.record(event)
        self._log.flush()
        self._study.follow(*events)

    def answer(self, question: Mapping[str, Any]) -> Answer:
        """The answer to a worker's question: `ask` names it, the rest are the arguments of its method.

        If a data set is not known yet, the answer is `describe`, with settings that use it: the worker
        describes it with the question `data`, and asks again.
        """
        arguments = dict(question)
        name = arguments.pop("ask")
        try:
            if name not in ("data", "group", "sync", "topologies") and not self._has_begun:
                self._begin()
            answer: Answer = getattr(self, f"_on_{name}")(**arguments)
        except UnknownDataError as unknown:
            return {"describe": encode(unknown.settings)}
        # Events must be on disk before the worker sees the answer.
        self._log.flush()
        if self._has_begun:
            self._report()
        return answer

    def follow(self, now: Membership) -> None:
        """Record a change of workers, and return the trials of lost workers to the scheduler."""
        for worker in now.lost:
            self._return_trials(worker)
        before, self._membership = self._membership, now
        self._groups.follow(now)
        self._count_groups()
        if not self._has_begun:
            return
        event = workers_changed(before, now, sum(self._progress.steps.values()))
        self._keep(event)
        self.arrays.end(event.lost)

    def _return_trials(self, worker: int) -> None:
        """Return the trials of a worker, or of its group, that is lost."""
        self._idle.discard(worker)
        for trial in self.scheduler.of_worker(worker):
            self.scheduler.give_back(trial.number)

    def _count_groups(self) -> None:
        firsts = self._groups.firsts
        self.scheduler.workers = max(1, len(firsts))
        self._idle &= set(firsts)

    def _on_group(self, worker: int, arrives: bool, ends: bool, broken: int | None) -> Answer:
        """The number of a worker's group and, once all of the group have arrived, its members.

        `broken` is the number of a group whose workers cannot communicate. A worker that `ends`, or is not
        needed any more, is told so unless others of its group may be waiting for it by now.
        """
        if broken is not None:
            self._groups.dissolve(broken)
            self._count_groups()
        number, members = self._groups.number_of(worker), None
        if arrives and (members := self._groups.arrive(worker)) is None:
            ends = ends or (self._has_begun and self.scheduler.is_over)
            if ends:
                self._groups.withdraw(worker)
        version = self._membership.version
        return {"number": number, "version": version, "members": encode(members), "ends": ends}

    def _on_sync(self, chosen: Mapping[str, Any] | None) -> Answer:
        """The sync that was `chosen` by measuring, now or by an earlier part of this sweep; None if none was.

        Groups of an elastic sweep, which form at different times, would choose differently.
        """
        if chosen is not None or (self._sync is None and self._is_elastic):
            event = _SYNC_OF_ELASTIC if chosen is None else decode(run_events.SyncChosen, chosen, "chosen")
            self._keep(event)
            self._sync = event.sync
        return {"sync": self._sync}

    def _on_topologies(self) -> Answer:
        """The topologies that an earlier part of this sweep chose by measuring."""
        return {"chosen": encode(self._topologies)}

    def _on_topology(self, chosen: Mapping[str, Any]) -> Answer:
        self._log.record(decode(TopologyChosen, chosen, "chosen"))
        return {}

    def _on_abandon(self, worker: int) -> Answer:
        """Return the trials of a worker whose group has lost another one."""
        self._return_trials(worker)
        return self._on_array(worker, [], False, "")

    def _on_data(self, **description: Any) -> Answer:
        """Store a worker's description of a data set."""
        self._data.add(decode(DataDescription, description))
        return {}

    def _on_look(self, worker: int) -> Answer:
        """For an idle worker: the group that waits, its share of the trials, and the values of the first."""
        if self.scheduler.is_over:
            return {"over": True}
        if not self._trains(worker):
            return {"over": False}
        waiting = self.scheduler.waiting()
        if not waiting:
            if self._is_elastic and not self.scheduler.of_worker(worker):
                self._idle.add(worker)
            return {"over": False}
        group, values = waiting[0].group, dict(waiting[0].values)
        share = math.ceil(self.scheduler.expected(waiting) / self._among(worker))
        return {"group": group, "share": share, "values": values}

    def _trains(self, worker: int) -> bool:
        """Whether a worker asks for a group; one that is lost, or leaves, may have asked before it knew."""
        return worker in self._groups.firsts

    def _among(self, worker: int) -> int:
        """How many workers share the waiting trials: the idle ones if `worker` is idle, else all."""
        return len(self._idle) if worker in self._idle else self.scheduler.workers

    def _on_take(self, worker: int, group: str, count: int, begin: bool) -> Answer:
        trials = []
        if self._trains(worker) and (not self._idle or worker in self._idle):
            trials = self.scheduler.take(group, count, begin, self._among(worker), worker)
        if trials:
            self._idle.discard(worker)
        search = self.scheduler.search
        drawn = len(self.scheduler.trials) == search.total
        # Trials of leaving or lost workers are assigned again.
        more = search.waits or not drawn or self._is_elastic
        assigned = [
            {
                "trial": trial.number,
                "values": dict(trial.values),
                "drawn": trial.drawn[trial.rung :],
                "goals": trial.goals[trial.rung :],
                "train_loss": None if trial.train_loss is None else finite(trial.train_loss),
            }
            for trial in trials
        ]
        return {"trials": assigned, "more": more}

    def _on_spare(self, worker: int, left_s: float) -> Answer:
        """How many of its trials a worker must return for idle workers."""
        if self.scheduler.waiting():
            return {"count": 0}
        return {"count": self.scheduler.to_hand_over(worker, len(self._idle), left_s)}

    def _on_array(self, worker: int, trials: list[int], fused: bool, why: str) -> Answer:
        reason = why or self._why_alone(trials)
        event = run_events.ArrayChanged(worker, tuple(trials), fused, reason)
        self._log.record(event)
        self.arrays.changed(event)
        return {}

    def _why_alone(self, trials: list[int]) -> str:
        """Why a trial trains alone, if its worker gives no reason."""
        if len(trials) != 1:
            return ""
        if self.scheduler.search.total == 1:
            return "the sweep has one trial"
        trial = self.scheduler.trials[trials[0]]
        if any(other.group == trial.group and other is not trial for other in self.scheduler.trials):
            return "no other trial that can share its array is left or waits"
        keys = ", ".join(self.scheduler.separating_keys(trial))
        return f"no other trial that can share its array has been drawn; what keeps them apart: {keys}"

    def _on_split(self, worker: int, trials: list[int]) -> Answer:
        self.scheduler.split([trial for trial in trials if self._has(worker, trial)])
        return {}

    def _has(self, worker: int, trial: int) -> bool:
        return self.scheduler.trials[trial].is_of(worker)

    def _on_verified(
        self, worker: int, trials: int, seconds: float, unfused: dict[str, str], refused: str | None
    ) -> Answer:
        self._log.record(run_events.ArrayVerified(worker, trials, seconds, unfused, refused))
        return {}

    def _on_audited(
        self, trial: int, step: int, seconds: float, largest: float, differences: list[str]
    ) -> Answer:
        self._audited, self._largest = self._audited + 1, max(self._largest, largest)
        self._log.record(run_events.Audited(step, seconds, self._largest, tuple(differences), trial))
        return {}

    def _on_note(
        self,
        losses: Sequence[Any] = (),
        metrics: Sequence[Any] = (),
        signals: Sequence[Any] = (),
        changes: Sequence[Any] = (),
        saved: Sequence[Any] = (),
    ) -> Answer:
        """Points of curves: (trial, step, loss), (trial, step, metrics), (trial, step, *signals).

        `changes` are `changed` events as plain values; `saved` are checkpoints, (trial, step).
        """
        for values in changes:
            self._log.record(run_events.Changed(*values))
        for trial, step, loss in losses:
            self._log.record(run_events.TrialStep(trial, step, loss))
            self._progress.count(trial, step, loss)
        for trial, step, values in metrics:
            self._log.record(run_events.TrialEvaluated(trial, step, values))
        for each in signals:
            self._log.record(run_events.TrialSignals(*each))
        for trial, step in saved:
            self._log.record(run_events.TrialSaved(trial, step))
        return {}

    def _on_wanted(self, trial: int, metrics: Mapping[str, Any], train_loss: float | None) -> Answer:
        """Whether the state of a trial with these results is saved: it would be the best so far, say."""
        is_best = self.scheduler.would_be_best(trial, metrics, train_loss)
        return {"wanted": is_best or self._settings.keeps_adapters}

    def _on_report(self, worker: int, results: list[Any]) -> Answer:
        """The next goal, or 0, of each trial in `results`, which are (trial, step, metrics, train_loss)."""
        reports = [Report(*result) for result in results if self._has(worker, result[0])]
        for report in reports:
            self._progress.count(report.trial, report.step, None)
        until = dict(zip((report.trial for report in reports), self.scheduler.report(reports)))
        self._remove_ended()
        return {"until": [until.get(result[0], 0) for result in results]}

    def _on_stop(
        self,
        worker: int,
        trial: int,
        step: int,
        state: str,
        metrics: Mapping[str, Any],
        train_loss: float | None,
        why: str = "",
    ) -> Answer:
        if self._has(worker, trial):
            self._progress.count(trial, step, None)
            self.scheduler.stop(trial, step, state, metrics, train_loss, why)
            self._remove_ended()
        return {}

    def _on_back(self, worker: int, trial: int, step: int) -> Answer:
        if self._has(worker, trial):
            self._progress.count(trial, step, None)
            self.scheduler.give_back(trial)
        return {}

    def _on_goals(self, worker: int, trial: int, goals: list[int]) -> Answer:
        """Set the steps of a trial's goals ahead."""
        if self._has(worker, trial):
            self.scheduler.count_goals(trial, goals)
        return {}

    def _remove_ended(self) -> None:
        """Remove the checkpoints of ended trials, except those of the best."""
        best, keeps = self.scheduler.best(), self._settings.keeps_adapters
        for trial in self.scheduler.trials:
            if keeps and trial.is_complete:
                continue
            if trial.has_ended and trial is not best and trial.number not in self._removed:
                remove(self._folder, trial.number)
                self._removed.add(trial.number)

    def _report(self) -> None:
        now = time.perf_counter()
        if now - self._reported >= REPORT_S:
            self._reported = now
            self._send_report(self._progress.report())

    def close(self) -> SweepResult:
        """End the record and publish the best trial's checkpoint; returns the result of the sweep.

        A sweep with unfinished trials counts as stopped.
        """
        if not self._has_begun:  # before any worker asked
            with contextlib.suppress(UnknownDataError):
                self.scheduler.open(self._past)
            self._keep(self._begun())
        is_over = self.scheduler.is_over
        reason = "finished" if is_over else "stopped"
        if is_over and {trial.state for trial in self.scheduler.trials} == {"failed"}:
            reason = "failed"
        best = self.scheduler.best()
        if best is not None:
            publish(self._folder, best.number, removes=is_over and not self._settings.keeps_adapters)
        table = self._progress.table()
        seconds, rate = self._progress.seconds, round(self._progress.trial_steps_per_s, 1)
        number = None if best is None else best.number
        self._keep(run_events.SweepEnded(reason, self.scheduler.ended, number, round(seconds, 3), rate))
        self._callbacks.end("stopped")
        self._log.close()
        self._send_report(self._progress.report())
        return SweepResult(
            reason=reason,
            step=self.scheduler.ended,
            steps=self.scheduler.search.total,
            search=self._settings.search.kind,
            metric=self.scheduler.metric,
            mode=self.scheduler.mode,
            best=None if best is None else table[0],
            trials=table,
            arrays=self.arrays.table(),
            seconds=round(seconds, 3),
            trial_steps_per_s=rate,
            workers=len(self._membership.members),
            replicas=self._settings.replicas,
            audited_steps=self._audited or None,
            largest_difference=self._largest if self._audited else None,
        )
