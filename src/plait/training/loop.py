"""The loop of every run: steps, evaluation, checkpoints, early stopping, and the record of it all.

How steps are computed is the engine's business (`engine.py`); what is due after which step is the loop's.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from plait.adapt.changes import (
    BatchSizeChange,
    ChangeRequest,
    ChangeSource,
    SavedSource,
    SyncChange,
    WorkersChange,
)
from plait.comm.collectives import all_gather_values, broadcast_value
from plait.core.codec import decode, encode
from plait.core.errors import JobError
from plait.core.run_events import Changed
from plait.core.shown import listed
from plait.data.sampler import Position
from plait.schema.results import RunResult
from plait.schema.settings import SyncSettings, TrainSettings
from plait.schema.sync_options import read_options
from plait.training import checkpoint as checkpoints
from plait.training.audit.record import DifferenceError
from plait.training.change.member_switch import MemberSwitch
from plait.training.change.members import NO_STATE, ElasticMembers, Mark, WorkerLeft
from plait.training.checks.same_data import look_again
from plait.training.checks.unsaved_model import UnsavedState
from plait.training.components import UNKNOWN_STEPS, emulated, total_steps
from plait.training.early_stopping import EarlyStopping, gain
from plait.training.engine import Engine, EngineState, elastic_engine
from plait.training.loss_parts import describe_parts
from plait.training.optimizers.lr_schedule import build_lr_factor
from plait.training.run import Run
from plait.training.start import RunStart

# A step after which nothing was done yet that is due there.
NOT_THIS_STEP = -1
log = logging.getLogger(__name__)


def keep_what_was_built() -> None:
    """Let garbage collections pass over what is there now: while it trains, each would stop a step."""
    gc.collect()
    gc.freeze()


class Training(Protocol):
    """What the loop drives: a run, or the trials of a sweep on this worker, with the engine that trains them.

    Where several workers train together, all of them call each method together, after the same step.
    """

    def ended(self) -> str | None:
        """Why training ends here: `finished`, `stopped`, ...; None while it goes on."""

    def apply_changes(self) -> None:
        """Change, between two steps, what is asked to be changed: settings, workers, trials."""

    def steps_until_due(self) -> int:
        """Steps until something is due besides training; 0 where there is nothing to train at the moment."""

    def advance(self, steps: int) -> None:
        """Have the engine take that many steps, or fewer where a worker is asked for something else."""

    def evaluate_and_save(self) -> None:
        """Do what is due after the last step: evaluations, early stopping, checkpoints, reports."""


def take_steps(training: Training) -> str:
    """Train to the end or until asked to stop, which is returned: the loop of every run and every sweep."""
    while (reason := training.ended()) is None:
        training.apply_changes()
        if (steps := training.steps_until_due()) > 0:
            training.advance(steps)
        training.evaluate_and_save()
    return reason


class Loop(RunStart):
    """Trains a run with an engine, from where the last good checkpoint left off.

    `sources` are asked for changes between two steps; the loop alone applies them, and records them. Where
    workers may come and go, the engine is closed and opened again among others between two steps; where one
    is lost, what it was lost in is done again by the rest. `make_engine` gives another engine for the
    settings as they are then, where how workers agree may change.
    """

    engine: Engine

    def __init__(
        self,
        run: Run,
        engine: Engine,
        sources: Sequence[ChangeSource] = (),
        make_engine: Callable[[], Engine] | None = None,
    ) -> None:
        super().__init__(run, engine, sources)
        self._make_engine = make_engine
        self._steps = 0
        over_stream = run.parts.train_set.is_stream and run.settings.epochs is not None
        self._until_data_ends = over_stream and engine.sees_end_of_data
        # The step after which what was due is done, and what workers asked for in the steps up to it.
        self._checked_step: int | None = None
        # The step of the last checkpoint that this worker wrote, and of the last that it did not write.
        self._saved_step: int | None = None
        self._broken_step: int | None = None
        self._stopped = self._change_asked = self._has_begun = self._told_of_unsaved = False
        # The step after which changes were made last, and how many.
        self._changes = (0, 0)
        self._unsaved: UnsavedState | None = None
        memberships = run.worker.memberships
        members = ElasticMembers(run, memberships) if memberships.can_change else None
        self._switch = None if members is None else MemberSwitch(members, self)

    def train(self, resume: bool) -> RunResult | None:
        """Train to the end or until asked to stop; what the run came to. All ranks call it together.

        A worker that has left the run meanwhile has no result.
        """
        run = self.run
        try:
            self._enter(resume)
            work = self._train_and_finish
            reason, metrics = work() if self._switch is None else self._switch.with_the_rest(work)
        except WorkerLeft:
            self._leave()
            return None
        self.engine.close()
        run.close()
        if run.metrics.diverged is not None:
            reason = "diverged"
        audited = (run.audits.steps, run.audits.largest) if run.audits.steps else None
        result = run.metrics.end(run.trial.step, reason, metrics, run.trial.best, audited)
        if run.audits.difference is not None:
            where = f"a checkpoint of step {run.trial.step} is in {run.folder.checkpoints}"
            raise DifferenceError(f"{run.audits.difference}; {where}")
        return result

    def _train_and_finish(self) -> tuple[str, dict[str, float]]:
        reason = take_steps(self)
        self.run.metrics.log_rest()
        return reason, self._finish(reason)

    def start(self, resume: bool) -> None:
        super().start(resume)
        self._checked_step = NOT_THIS_STEP if self.run.trial.owes_evaluation else self.run.trial.step

    def _enter(self, resume: bool) -> None:
        """Get ready to take steps, with the workers that start together or with those that train already."""
        if self._switch is not None and self._switch.members.is_joining:
            elastic_engine(self.engine).warm_up()
            keep_what_was_built()
            self._switch.to(self._switch.members.first)
            return
        if self.run.worker.rank == 0:
            # Nobody has begun to write; workers of another launch may have been killed while they did.
            self.run.folder.remove_unfinished()
        self.start(resume)
        # Counted from the position: the batch size may have changed since the steps before were taken.
        self.begin(self._total_steps())
        if self._switch is not None:
            self._switch.members.report_joined()

    def _finish(self, reason: str) -> dict[str, float]:
        # Only who keeps the record knows of a divergence; the others do what they do when asked to stop.
        evaluates = reason not in ("stopped", "difference") and self.run.parts.test_set is not None
        with self._undone_by_losses():
            self.engine.finish(lambda: self._save(evaluates))
            metrics = self._evaluate() if evaluates else {}
        if self._switch is not None and self.run.worker.world_size > 1:
            # Were the one that writes lost, another would have to be there to do it.
            all_gather_values(None)
        return metrics

    def _leave(self) -> None:
        """End this worker; the others go on."""
        assert self._switch is not None
        self.run.metrics.leave()
        self.run.close()
        self._switch.members.worker.report_left()

    def begin(self, steps: int) -> None:
        """Get ready to go on until `steps` steps are done."""
        run, metrics = self.run, self.run.metrics
        self._steps = steps
        run.schedule = build_lr_factor(run.settings.lr_schedule, self._schedule_steps(steps))
        metrics.batch_size = run.batch_size
        self._tell_of_parts()
        run.total_steps = None if steps == UNKNOWN_STEPS else steps
        metrics.start(run.trial.step, run.total_steps)
        if slow := emulated(run.settings.precision, run.parts.device):
            metrics.warn(slow)
        for note in run.parts.notes:
            metrics.warn(note)
        if run.parts.train_set.is_stream:
            self._warn_of_skipping()
        self.engine.open()
        self._has_begun = True
        self._unsaved = UnsavedState(run.parts.model) if run.parts.pieces is None else None
        keep_what_was_built()
        metrics.begin_steps()

    def _tell_of_parts(self) -> None:
        """Warn where a batch that is trained in parts has another loss than as a whole."""
        run = self.run
        asked = run.worker.rank == 0 and run.settings.verify.start != "off"
        if asked and self.engine.parts_of_a_batch > 1 and (words := describe_parts(run.settings, run.parts)):
            run.metrics.warn(words)

    def _warn_of_skipping(self) -> None:
        run, position = self.run, self.run.trial.position
        if position.sample and (position.stream is None or run.settings.pipeline is not None):
            run.metrics.warn(
                f"no state of the stream to continue from: {position.sample:,} samples of epoch "
                f"{position.epoch} are read again and skipped, which is exact if it gives the same "
                f"samples as before"
            )

    def ended(self) -> str | None:
        if self.run.audits.difference is not None:
            return "difference"
        if self._steps_left() == 0:
            return "finished"
        if not self._is_checked():
            return None
        if self.run.trial.early_stopping.should_stop():
            return "early-stop"
        return "stopped" if self._stopped else None

    def _is_checked(self) -> bool:
        """Whether what was due after this step is done; not where a worker was lost meanwhile."""
        return self._checked_step == self.run.trial.step

    def advance(self, steps: int) -> None:
        run = self.run
        trained = self.engine.train(steps)
        run.trial.step += trained.steps
        run.trial.position = trained.position
        self._stopped, self._change_asked = trained.stopped, trained.change_asked
        if trained.ended:
            self._until_data_ends, self._steps = False, run.trial.step
            run.metrics.set_steps(run.trial.step)
        if trained.lost is not None:
            # Of the steps before the one that a worker was lost in, the last may have something due.
            raise trained.lost

    @contextlib.contextmanager
    def _undone_by_losses(self) -> Iterator[None]:
        """Forget what an evaluation said where a worker is lost in it, or in the checkpoint after it."""
        trial = self.run.trial
        kept = trial.best, replace(trial.early_stopping)
        try:
            yield
        except RuntimeError:
            trial.best, trial.early_stopping = kept
            raise

    def close_engine(self) -> None:
        self.engine.close()

    def mark(self) -> Mark:
        if self._checked_step is None and not self._has_begun:
            return NO_STATE
        # Of those at one step, the one with the fewest changes is gone on from: the others take them back.
        changes = self._changes[1] if self._changes[0] == self.run.trial.step else 0
        return (self.run.trial.step, int(self._checked_step == self.run.trial.step) + changes)

    def choose_source(self, marks: Sequence[Mark]) -> int | None:
        return elastic_engine(self.engine).choose_source(marks)

    def take_progress(self, source: int, is_there: bool) -> None:
        given = self.run.worker.rank == source
        state = checkpoints.broadcast(self._checkpoint(self.engine.start_state()) if given else None, source)
        rest = broadcast_value(self._position_in_loop() if given else None, source)
        if not is_there:
            self._take_position(rest)
            self._load_checkpoint(state)
            self.run.metrics.batch_size = self.run.batch_size
            self._checked_step = self.run.trial.step if rest["is_checked"] else None

    def back_to_checkpoint(self) -> None:
        self.run.metrics.log_rest()
        self.run.begin_anew()
        for source in self._sources:
            if isinstance(source, SavedSource):
                source.load({})
        elastic_engine(self.engine).begin_anew()
        # Until all have it, this worker has no state that others could go on from.
        self._has_begun, self._checked_step, self._changes = False, None, (0, 0)
        self.start(resume=True)
        self._steps = self._total_steps()

    def reopen(self, was_lost: bool) -> None:
        if self.run.worker.rank == 0:
            self.run.take_over_record()
        self._change_asked = False
        self.run.signals.forget()
        if self._has_begun:
            self.engine.open()
        else:
            self.begin(self._steps)
        if was_lost:
            # In agreement, all have done so before they parted.
            elastic_engine(self.engine).synchronize()

    def _position_in_loop(self) -> dict[str, Any]:
        """What a worker that is behind must know beside the state of a checkpoint."""
        return {
            "steps": self._steps,
            "until_data_ends": self._until_data_ends,
            "stopped": self._stopped,
            "is_checked": self._is_checked(),
            "changes": self._changes,
            "settings": encode(self.run.settings),
        }

    def _take_position(self, found: Mapping[str, Any]) -> None:
        self._steps, self._until_data_ends = found["steps"], found["until_data_ends"]
        self._stopped, self._changes = found["stopped"], tuple(found["changes"])
        # As changes have left them.
        self.run.settings = decode(TrainSettings, found["settings"])

    def _steps_left(self) -> int:
        return UNKNOWN_STEPS if self._until_data_ends else max(self._steps - self.run.trial.step, 0)

    def _total_steps(self) -> int:
        """The steps of the whole run, counted from where it is with the batches that it takes now."""
        run = self.run
        data = replace(run.settings.data, batch_size=run.batch_size)
        settings = replace(run.settings, data=data)
        return total_steps(settings, run.parts.train_set.length, run.trial.step, run.trial.position)

    def _schedule_steps(self, steps: int) -> int:
        """The steps that the learning rate's schedule is made for, of a run of `steps`."""
        run = self.run
        if run.trial.batch.since == 0 or run.settings.epochs is None:
            return steps
        # A schedule that follows the samples is made for batches of the job's own size.
        return total_steps(run.settings, run.parts.train_set.length, 0, Position())

    def apply_changes(self) -> None:
        if not self._is_checked():
            return
        step = self.run.trial.step
        for asked in self._requests(step):
            self._apply(asked)
            self._changes = (step, self._changes[1] + 1 if self._changes[0] == step else 1)
            kind = type(asked.change).__name__
            self.run.metrics.note(Changed(step, kind, encode(asked.change), asked.by, asked.why))
        if self._change_asked and self._switch is not None:
            membership = self._switch.members.agree()
            self.engine.synchronize()
            elastic_engine(self.engine).hand_over(self._switch.members.staying(membership))
            self._switch.to(lambda: membership)

    def _requests(self, step: int) -> list[ChangeRequest]:
        """What sources ask for now: the first worker asks them, and all workers get its answer."""
        due = [source for source in self._sources if source.next_due(step - 1) == step]
        if not due:
            return []
        own: Any = None

        def ask() -> Any:
            nonlocal own
            own = _ask(due, step)
            return own

        answer = self.engine.ask_first(ask)
        if answer["failed"] is not None:
            raise JobError(answer["failed"])
        if answer != own:
            for source, state in zip(due, answer["states"]):
                if isinstance(source, SavedSource):
                    source.load(state)
        return [ChangeRequest.from_values(values) for values in answer["requests"]]

    def _apply(self, asked: ChangeRequest) -> None:
        change = asked.change
        if isinstance(change, SyncChange) and self._make_engine is not None:
            self._change_sync(change, self._make_engine)
        elif isinstance(change, WorkersChange):
            self._ask_for_workers(change, f"{asked.by}: {asked.why}")
        else:
            if isinstance(change, BatchSizeChange):
                self._change_batch(change)
            self.engine.apply(change)

    def _ask_for_workers(self, change: WorkersChange, why: str) -> None:
        if self._switch is None:
            raise JobError(
                f"adapt: cannot apply {change}: the job's workers are fixed; set parallel.elastic: true"
            )
        if self.run.worker.rank == 0:
            self._switch.members.worker.ask_to_resize(change.workers, why)

    def _change_sync(self, change: SyncChange, make_engine: Callable[[], Engine]) -> None:
        """Let workers agree otherwise from the next step on.

        At the end of an interval all are in the same state under any sync, so the next engine goes on from
        the model and the optimizer as they are. Links are made anew.
        """
        run = self.run
        if change.sync == run.settings.sync.kind:
            return
        read_options(change.sync, change.options, run.worker.world_size)
        self.engine.synchronize()
        self.engine.close()
        run.settings = replace(run.settings, sync=SyncSettings(change.sync, change.options))
        self.engine = make_engine()
        self.engine.open()

    def _change_batch(self, change: BatchSizeChange) -> None:
        """Take batches of another size from the next step on; the samples go on where they are."""
        run, workers = self.run, self.run.worker.world_size
        if change.batch_size < workers or not math.isfinite(change.lr_factor) or change.lr_factor <= 0:
            raise JobError(
                f"adapt: found {change} for {workers} workers; expected at least one sample a worker, and a "
                f"factor above 0 on the learning rate"
            )
        run.trial.batch = run.trial.batch.changed(
            change, run.trial.step, by_samples=run.settings.epochs is not None
        )
        run.metrics.batch_size = run.batch_size
        if not self._until_data_ends:
            self._steps = run.total_steps = self._total_steps()
            run.metrics.set_steps(self._steps)

    def steps_until_due(self) -> int:
        if not self._is_checked():
            return 0
        settings, trial = self.run.settings, self.run.trial
        due = trial.steps_until(settings.checkpoint.every_steps, settings.evaluate.every_steps)
        asked = [source.next_due(trial.step) for source in self._sources]
        return min(self._steps_left(), due, *(at - trial.step for at in asked if at is not None))

    def evaluate_and_save(self) -> None:
        """Evaluate and save where that is due after this step; the end of the run has both of its own."""
        look_again(self.run, is_last=self._steps_left() == 0)
        if self._steps_left() == 0:
            return
        settings, trial = self.run.settings, self.run.trial
        evaluates = trial.is_time(settings.evaluate.every_steps) and self.run.parts.test_set is not None
        with self._undone_by_losses():
            # Saved first: what goes wrong in an evaluation must not cost the training.
            if evaluates or trial.is_time(settings.checkpoint.every_steps):
                self._save(evaluates)
            if evaluates:
                self._evaluate(stopping=trial.early_stopping)
        self._checked_step = trial.step

    def _evaluate(self, stopping: EarlyStopping | None = None) -> dict[str, float]:
        """Evaluate, once there is a checkpoint of this step, and let that say what came of it."""
        run, started = self.run, time.perf_counter()
        assert run.parts.test_set is not None
        try:
            metrics = self.engine.evaluate()
        except Exception as failure:
            failure.add_note(
                f"This was the evaluation after step {run.trial.step}, of which there is a checkpoint below "
                f"{run.folder.checkpoints}: mend the cause, and go on with --resume."
            )
            raise
        seconds = time.perf_counter() - started
        run.metrics.evaluated(run.trial.step, metrics, run.parts.test_set.length or 0, seconds)
        if stopping is not None:
            stopping.update(metrics)
        self._keep_evaluation(metrics)
        return metrics

    def _keep_evaluation(self, metrics: dict[str, float]) -> None:
        """Have the checkpoint of this step, on the worker that wrote it, say what the evaluation said."""
        run, folder, started = self.run, self.run.folder.checkpoints, time.perf_counter()
        run.trial.owes_evaluation, is_best = False, self._is_best(metrics)
        if is_best:
            run.trial.best = {"step": run.trial.step, **metrics}
        if self._saved_step != run.trial.step:
            return
        checkpoints.update_progress(folder, run.trial.step, self._progress())
        if is_best:
            checkpoints.point_to_best(folder, run.trial.step)
            self._prune()
            run.metrics.saved(run.trial.step, time.perf_counter() - started, is_best)

    def _is_best(self, metrics: dict[str, float]) -> bool:
        name = self.run.settings.checkpoint.keep_best
        if (
            name is None
            or not metrics
            or not math.isfinite(metrics[name])
            or self._broken_step == self.run.trial.step
        ):
            return False
        best = self.run.trial.best
        return best is None or gain(self.run.parts.modes[name], metrics[name], best[name]) > 0

    def _save(self, is_evaluation_due: bool) -> None:
        """One worker writes a checkpoint of the state after this step; the others go on."""
        run, started = self.run, time.perf_counter()
        run.trial.owes_evaluation = is_evaluation_due
        state = self.engine.state()
        self._warn_of_unsaved()
        if state is None:
            return
        if (broken := self._find_broken(state)) is not None:
            run.metrics.warn(f"no checkpoint of step {run.trial.step}: {broken}; earlier ones stay")
            if run.settings.stop_on_nan:
                run.metrics.note_divergence(run.trial.step, broken)
            state.discard()
            self._broken_step = run.trial.step
            return
        if state.unsaved and not self._told_of_unsaved:
            self._told_of_unsaved = True
            run.metrics.warn(
                f"optimizer: {run.settings.optimizer.kind} keeps {', '.join(state.unsaved)}, which no "
                f"checkpoint holds (expected tensors and numbers): a resumed run begins without it"
            )
        checkpoints.save(run.folder.checkpoints, self._checkpoint(state))
        state.discard()
        self._saved_step = run.trial.step
        self._prune()
        run.metrics.saved(run.trial.step, time.perf_counter() - started, best=False)

    def _warn_of_unsaved(self) -> None:
        """Warn once of what the model keeps and no checkpoint holds; each worker looks at its own stages."""
        if self._unsaved is None or not (names := self._unsaved.changed()):
            return
        self._unsaved = None
        words = (
            f"model: {listed(names)} of {self.run.settings.model.factory} changed while it trained, and no "
            f"checkpoint holds it: a resumed run begins without it; keep it in a persistent buffer, or give "
            f"it out by get_extra_state and take it back by set_extra_state"
        )
        if self.run.settings.pipeline is None:
            self.run.metrics.warn(words)
        else:
            log.warning("%s", words)

    def _prune(self) -> None:
        best, folder = self.run.trial.best, self.run.folder.checkpoints
        kept = best["step"] if best else None
        checkpoints.prune(folder, self.run.trial.step, self.run.settings.checkpoint.keep_last, kept)

    def _find_broken(self, state: EngineState) -> str | None:
        """Why a state should not take the place of earlier checkpoints, in words."""
        run = self.run
        if run.settings.stop_on_nan and not run.metrics.is_loss_finite:
            return "its loss is not a number"
        name = state.find_broken(run.parts.weights)
        return None if name is None else f"{name!r} holds values that are no numbers"


def _ask(sources: Sequence[ChangeSource], step: int) -> dict[str, Any]:
    """What sources ask for, and their states, as plain values; what is wrong, in words, for all workers."""
    try:
        requests = [asked.as_values() for source in sources for asked in source.due(step)]
    except JobError as failure:
        return {"failed": str(failure)}
    states = [source.state() if isinstance(source, SavedSource) else None for source in sources]
    return {"failed": None, "requests": requests, "states": states}
