"""The loop of a run: one trial, from its newest good checkpoint to its end, with all its workers."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

from plait.adapt.changes import BatchSizeChange, ChangeRequest, ChangeSource, SyncChange, TopologyChange
from plait.adapt.members import NO_STATE, ElasticMembers, ProgressMark, WorkerLeft, loss_of
from plait.comm.collectives import all_gather_values, broadcast_value
from plait.comm.data_group import await_others
from plait.core.codec import decode, encode
from plait.core.errors import JobError
from plait.core.run_events import Changed
from plait.data.sampler import Position
from plait.launcher.membership import Membership
from plait.launcher.worker_process import LaunchedWorker
from plait.schema.results import RunResult
from plait.schema.settings import SyncSettings, TrainSettings
from plait.sync.allreduce.autotune import TopologyChosen
from plait.training import checkpoint as checkpoints
from plait.training.audit.record import DifferenceError
from plait.training.change.apply import apply_change, find_requests, is_due
from plait.training.change.join_members import join_members
from plait.training.checkpoint import Checkpoint, EngineState
from plait.training.checks.divergence import DivergenceCheck
from plait.training.checks.loss_parts import describe_parts
from plait.training.checks.repeated_reads import check_data, look_again
from plait.training.checks.replicas import check_kept
from plait.training.checks.stateful_loss import check_loss
from plait.training.engine import Engine, IntervalResult, ask_rank_0
from plait.training.engines.whole_model import warm_up
from plait.training.loop import Loop, freeze_garbage_collector
from plait.training.optimizers.lr_schedule import build_lr_factor
from plait.training.run import Run
from plait.training.run_checkpoints import RunCheckpoints
from plait.training.setup.precision import emulated
from plait.training.trial import UNKNOWN_STEPS, Due, Trial, present_steps, total_steps

log = logging.getLogger(__name__)


class RunLoop(Loop):
    """Trains a run with an engine, from where the last good checkpoint left off.

    Between two steps the loop asks `sources` for changes, applies them and records them. In an elastic run,
    the engine is closed between two steps and opened again among the new members; if a worker is lost, the
    remaining workers repeat the interrupted step. `make_engine` builds an engine for the current settings; it
    is given where the sync may change.
    """

    engine: Engine

    def __init__(
        self,
        run: Run,
        engine: Engine,
        sources: Sequence[ChangeSource] = (),
        make_engine: Callable[[], Engine] | None = None,
    ) -> None:
        self.run = run
        self.engine = engine
        run.trial.sources = tuple(sources)
        self._make_engine = make_engine
        over_stream = run.components.train_set.is_stream and run.settings.epochs is not None
        # Whole models are trained on a stream until it ends, even if its declared length is wrong.
        self._until_data_ends = over_stream and run.settings.pipeline is None
        self._stopped = self._change_asked = self._has_begun = False
        # Whether this worker holds a state that others can continue from.
        self._has_state = False
        # On the worker that writes the record, which alone sees all losses.
        self.divergence = DivergenceCheck(
            run.settings, run.metrics.warn, stop=lambda: run.worker.ask_to_stop()
        )
        run.metrics.on_loss = self.divergence.check_loss
        # The step after which changes were last applied, and how many.
        self._changes = (0, 0)
        self._checkpoints = RunCheckpoints(run)
        worker = cast("LaunchedWorker", run.worker)
        self._members = ElasticMembers(worker, lambda: join_members(worker, run.settings))

    @property
    def trials(self) -> Sequence[Trial]:
        return self.run.trials

    def train(self, resume: bool) -> RunResult | None:
        """Train to the end or until asked to stop; returns the result. All ranks call it together.

        A worker that left the run during training has no result.
        """
        run = self.run
        try:
            self._enter(resume)
            reason, metrics = self._train_with_the_rest()
        except WorkerLeft:
            run.metrics.leave()
            return None
        self.engine.close()
        if self.divergence.why is not None:
            reason = "diverged"
        audited = (run.audits.steps, run.audits.largest) if run.audits.steps else None
        result = run.metrics.end(run.trial.step, reason, metrics, run.trial.best, audited)
        if run.audits.difference is not None:
            where = f"a checkpoint of step {run.trial.step} is in {run.folder.checkpoints}"
            raise DifferenceError(f"{run.audits.difference}; {where}")
        return result

    def _train_with_the_rest(self) -> tuple[str, dict[str, float]]:
        """Train to the end; if a worker is lost, the remaining workers continue."""
        while True:
            try:
                reason = self.take_steps()
                self.run.metrics.log_rest()
                metrics = self._finish(reason)
                if self.run.worker.world_size > 1:
                    await_others(self.run.worker.rendezvous)
                return reason, metrics
            except RuntimeError as failure:
                loss = loss_of(self.run.worker, failure)
                if loss is None:
                    raise
            # Outside the except clause: its traceback keeps the broken process group alive.
            self._go_on_among(partial(self._members.after, loss), was_lost=True)

    def _go_on_among(self, find: Callable[[], Membership], was_lost: bool = False) -> None:
        """Continue among the members that `find` returns; try again if another one is lost during this.

        Workers that stay close their engine, join the process group of the new version, agree on the state
        that all continue from, and open the engine again.
        """
        self._members.go_on_among(find, lambda: self.engine.close(), self._take_up, was_lost)

    def _take_up(self, was_lost: bool) -> None:
        # In a planned change, the old members have already asked after this step.
        self.run.trial.asked_at = -1 if was_lost else self.run.trial.step
        self._agree_on_state()
        self._reopen(was_lost)
        self._report_joined()

    def _report_joined(self) -> None:
        change = self._members.report_joined(self.run.trial.step)
        if change is not None:
            self.run.metrics.record(change)

    def _agree_on_state(self) -> None:
        """Continue from the most advanced state that a member has; all members call it together."""
        worker = self.run.worker
        marks = [self._progress_mark()]
        if worker.world_size > 1:
            marks = [tuple(mark) for mark in all_gather_values(list(marks[0]))]
        chosen = self.engine.find_source(marks)
        if chosen is None:
            self._go_back_to_checkpoint()
        elif len(set(marks)) > 1:
            source, state = chosen
            self._load_state_from(source, state, marks[worker.rank] == marks[source])

    def start(self, resume: bool) -> None:
        """Load the state from which all workers continue."""
        self._agree_on_start(self._checkpoints.restore(self._engine_of) if resume else None)
        check_data(self.run)
        check_loss(self.run)
        check_kept(self.run)
        # If the checkpoint was written before its evaluation, evaluate first.
        self.run.trial.moved, self._has_state = self.run.trial.owes_evaluation, True

    def _enter(self, resume: bool) -> None:
        """Start training together with the other workers, or join those that already train."""
        if self._members.is_joining:
            if self.run.settings.pipeline is None:
                # Otherwise the first step would take longer than others.
                warm_up(self.run.components, self.run.settings)
            freeze_garbage_collector()
            self._go_on_among(self._members.worker.await_membership)
            return
        if self.run.worker.rank == 0:
            # No worker writes yet; an earlier launch may have been killed while it was writing.
            self.run.folder.remove_unfinished()
        self.start(resume)
        # Counted from the position: the batch size may have changed in earlier steps.
        self.begin(self._total_steps())
        self._report_joined()

    def _finish(self, reason: str) -> dict[str, float]:
        # Only the worker that writes the record knows of a divergence; for the others the run was stopped.
        evaluates = reason not in ("stopped", "difference") and self.run.components.test_set is not None
        with self.undone_by_losses():
            self._save(evaluates)
            metrics = self.evaluate([0])[0] if evaluates else {}
            if metrics:
                self._checkpoints.keep_evaluation(metrics)
        if self._members.can_change and self.run.worker.world_size > 1:
            # If the writer is lost, another worker must still be here to write.
            all_gather_values(None)
        return metrics

    def begin(self, steps: int) -> None:
        """Prepare to train until `steps` steps are done."""
        run, metrics = self.run, self.run.metrics
        run.trial.until = UNKNOWN_STEPS if self._until_data_ends else steps
        run.trial.schedule = build_lr_factor(run.settings.lr_schedule, self._schedule_steps(steps))
        metrics.batch_size = run.batch_size
        self._warn_of_loss_parts()
        run.total_steps = None if steps == UNKNOWN_STEPS else steps
        metrics.start(run.trial.step, run.total_steps)
        if slow := emulated(run.settings.precision, run.components.device):
            metrics.warn(slow)
        for warning in run.components.warnings:
            metrics.warn(warning)
        if run.components.train_set.is_stream:
            self._warn_of_skipping()
        self._open_engine()
        self._has_begun = True
        self._checkpoints.begin()
        freeze_garbage_collector()
        metrics.begin_steps()

    def _open_engine(self) -> None:
        self.engine.open()
        self._record_choices()
        # For other workers than before, another plan may have been made.
        self.run.metrics.show_stages(self.run.settings)

    def _record_choices(self) -> None:
        """Record what workers chose by measuring for their engines; all call it together."""
        worker = self.run.worker
        if worker.world_size > 1:
            new, worker.rendezvous.unrecorded = worker.rendezvous.unrecorded, []
            for each in itertools.chain(*all_gather_values(encode(new))):
                self.run.metrics.record(decode(TopologyChosen, each, "chosen"))

    def _warn_of_loss_parts(self) -> None:
        """Warn where the loss of a batch is not the mean of the losses of its microbatches."""
        run = self.run
        checks = run.worker.rank == 0 and run.settings.verify.start != "off"
        if checks and (message := describe_parts(run.settings, run.components, run.worker.world_size)):
            run.metrics.warn(message)

    def _warn_of_skipping(self) -> None:
        run, position = self.run, self.run.trial.position
        if position.sample and (position.stream is None or run.settings.pipeline is not None):
            run.metrics.warn(
                f"no state of the stream to continue from: {position.sample:,} samples of epoch "
                f"{position.epoch} are read again and skipped, which is exact if it gives the same "
                f"samples as before"
            )

    def ended(self) -> str | None:
        trial = self.run.trial
        if self.run.audits.difference is not None:
            return "difference"
        if trial.has_reached:
            return "finished"
        if trial.moved:
            return None
        if trial.stops_early:
            return "early-stop"
        return "stopped" if self._stopped else None

    def observe(self, result: IntervalResult) -> None:
        run = self.run
        self._stopped, self._change_asked = result.stopped, result.change_asked
        if result.ended:
            run.trial.until = run.trial.step
            run.metrics.set_steps(run.trial.step)
        if result.lost is not None:
            # The last complete step before the loss may have an evaluation or a checkpoint due.
            raise result.lost

    def _progress_mark(self) -> ProgressMark:
        """The progress of this worker."""
        if not self._has_state:
            return NO_STATE
        # Of the workers at one step, all continue from the one with the fewest changes; the others undo
        # theirs.
        changes = self._changes[1] if self._changes[0] == self.run.trial.step else 0
        return (self.run.trial.step, int(not self.run.trial.moved) + changes)

    def _load_state_from(self, source: int, local: EngineState, is_current: bool) -> None:
        """Load weights, optimizer state and progress of rank `source`, unless this worker `is_current`.

        All workers call it together. `local` is the state that this worker would send as the source.
        """
        is_source = self.run.worker.rank == source
        state = checkpoints.broadcast(self._checkpoints.of(local) if is_source else None, source)
        rest = broadcast_value(self._position_in_loop() if is_source else None, source)
        if not is_current:
            self._take_position(rest)
            self._checkpoints.load(self._engine_of, state)
            self.run.metrics.batch_size = self.run.batch_size
            self.run.trial.moved = rest["moved"]
            self._has_state = self._has_begun or not rest["moved"]

    def _go_back_to_checkpoint(self) -> None:
        """Continue from the newest checkpoint; all workers call it together."""
        reached = self.run.trial.step
        self.run.metrics.log_rest()
        self.run.trial.reset()
        # Until all have loaded it, this worker has no state that others can continue from.
        self._has_begun, self._has_state, self._changes = False, False, (0, 0)
        self.start(resume=True)
        self.run.trial.until = self._total_steps()
        if self.run.worker.rank == 0 and reached > self.run.trial.step:
            log.warning(
                "the workers that are left do not hold all layers: the run goes back from step %d to the "
                "checkpoint of step %d",
                reached,
                self.run.trial.step,
            )

    def _reopen(self, was_lost: bool) -> None:
        """Open the engine among the new members; `was_lost` if the change follows the loss of a worker."""
        if self.run.worker.rank == 0:
            self.run.metrics.take_over()
        self._change_asked = False
        self.run.trial.signals.forget()
        if self._has_begun:
            self._open_engine()
        else:
            until = self.run.trial.until
            self.begin(self._total_steps())
            self.run.trial.until = until
        if was_lost:
            # In a planned change, the old members have already synchronized.
            self.engine.synchronize(range(self.run.worker.world_size))

    def _position_in_loop(self) -> dict[str, Any]:
        """What a joining worker needs in addition to a checkpoint."""
        return {
            "until": self.run.trial.until,
            "stopped": self._stopped,
            "moved": self.run.trial.moved,
            "changes": self._changes,
            "asked_at": self.run.trial.asked_at,
            "settings": encode(self.run.settings),
            "job_sync": encode(self.run.job_sync),
        }

    def _take_position(self, position: Mapping[str, Any]) -> None:
        self.run.trial.until = position["until"]
        self._stopped, self._changes = position["stopped"], tuple(position["changes"])
        self.run.trial.asked_at = position["asked_at"]
        # The settings with all changes applied so far.
        settings = decode(TrainSettings, position["settings"])
        self._engine_of(settings.sync)
        self.run.settings, self.run.job_sync = settings, decode(SyncSettings, position["job_sync"])

    def _engine_of(self, sync: SyncSettings) -> Engine:
        """The engine to go on with, another one if a policy has changed the sync to `sync`."""
        if sync != self.run.settings.sync and self._make_engine is not None:
            self.run.settings = replace(self.run.settings, sync=sync)
            self.engine = self._make_engine()
        return self.engine

    def _total_steps(self) -> int:
        """The total steps of the run, from its present position with the present batch size."""
        return present_steps(self.run.trial, self.run.components.train_set.length)

    def _schedule_steps(self, steps: int) -> int:
        """The length of the learning rate schedule in a run of `steps` steps."""
        run = self.run
        if not run.trial.batch.is_changed or run.settings.epochs is None:
            return steps
        # A schedule that follows the samples is computed for the batch size of the job file.
        return total_steps(run.settings, run.components.train_set.length, 0, Position())

    def apply_changes(self) -> None:
        if self.run.trial.moved:
            return
        step = self.run.trial.step
        for request in self._requests(step):
            self.engine = apply_change(request, self.run, self.engine, self._members, self._make_engine)
            if isinstance(request.change, BatchSizeChange) and not self._until_data_ends:
                self.run.trial.until = self.run.total_steps = self._total_steps()
                self.run.metrics.set_steps(self.run.trial.until)
            if isinstance(request.change, (SyncChange, TopologyChange)):
                self._record_choices()
            self._changes = (step, self._changes[1] + 1 if self._changes[0] == step else 1)
            kind = type(request.change).__name__
            self.run.metrics.record(Changed(step, kind, encode(request.change), request.by, request.why))
        if self._change_asked and self._members.can_change:
            membership = self._members.agree()
            self.engine.synchronize(self._members.staying(membership))
            self._go_on_among(lambda: membership)

    def _requests(self, step: int) -> Iterator[ChangeRequest]:
        """The changes that are requested after `step` steps."""
        trial = self.run.trial
        if trial.asked_at == step:
            return
        trial.asked_at = step
        due = [(source, step) for source in trial.sources if is_due(source, step)]
        for answer in find_requests(partial(ask_rank_0, self.run.worker), due):
            if isinstance(answer, JobError):
                raise answer
            yield from answer

    def steps_until_change(self) -> int | None:
        step = self.run.trial.step
        due = (source.next_due(step) for source in self.run.trial.sources)
        return min((at - step for at in due if at is not None), default=None)

    def find_due(self) -> dict[int, Due]:
        """What is due now; the evaluation and the checkpoint at the end of the run are done by `_finish`."""
        trial = self.run.trial
        look_again(self.run, is_last=trial.has_reached)
        due = None if trial.has_reached else trial.due()
        if due is None:
            return {}
        evaluates = due.evaluation and self.run.components.test_set is not None
        return {0: Due(evaluates, due.checkpoint, end=False)}

    def before_evaluation(self, due: Mapping[int, Due]) -> None:
        # Saved first: a failing evaluation must not lose training progress.
        for each in due.values():
            if each.evaluation or each.checkpoint:
                self._save(each.evaluation)

    def after_evaluation(self, due: Mapping[int, Due], metrics: Mapping[int, dict[str, float]]) -> None:
        for each in metrics.values():
            self._checkpoints.keep_evaluation(each)

    def _save(self, is_evaluation_due: bool) -> None:
        self.run.trial.owes_evaluation = is_evaluation_due
        broken = self._checkpoints.save(self.engine.state(0))
        if broken is not None:
            self.divergence.end(self.run.trial.step, broken)

    def evaluate(self, slots: Sequence[int]) -> dict[int, dict[str, float]]:
        """Evaluate; this step already has a checkpoint."""
        try:
            return super().evaluate(slots)
        except Exception as failure:
            failure.add_note(
                f"This was the evaluation after step {self.run.trial.step}, of which there is a checkpoint "
                f"below {self.run.folder.checkpoints}: mend the cause, and go on with --resume."
            )
            raise

    def record_evaluation(self, metrics: Mapping[int, dict[str, float]], seconds: float) -> None:
        run = self.run
        assert run.components.test_set is not None
        for each in metrics.values():
            run.metrics.evaluated(run.trial.step, each, run.components.test_set.length or 0, seconds)

    def _agree_on_start(self, loaded: Checkpoint | None) -> None:
        """All workers start from what rank 0 has `loaded`, even if they cannot read its files."""
        worker, components = self.run.worker, self.run.components
        if worker.world_size == 1:
            return
        progress = all_gather_values([self.run.trial.step, self.run.trial.owes_evaluation])
        if any(each != progress[0] for each in progress):
            fresh = EngineState({}, {}) if components.local_tensors is not None else components.state()
            state = checkpoints.broadcast(
                (loaded or self._checkpoints.of(fresh)) if worker.rank == 0 else None
            )
            if worker.rank != 0:
                self._checkpoints.load(self._engine_of, state)
        if components.local_tensors is None:
            self.run.broadcast_weights()
