"""Pipelines: workers hold stages of the model, and microbatches pass through them.

Under a synchronous schedule a step is one batch and one update, as in data-parallel runs. Under an
asynchronous one a step is as many microbatches, updates come as the schedule says, and the pipeline drains
only where an interval ends. Checkpoints hold the whole model by name, so a run may go on under any plan.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from plait.adapt.changes import BatchSizeChange, Change, PlanChange, TopologyChange
from plait.comm.collectives import all_gather_values, gather_in_turn
from plait.core.errors import JobError, PeerError, PlanError
from plait.core.run_events import LayersMoved
from plait.data import loader
from plait.data.sampler import GlobalBatch, Position, mix
from plait.pipeline.executor import Pipeline
from plait.pipeline.layout import PipelineLayout, arrange, one_batch, stream, with_choices
from plait.pipeline.microbatches import Microbatch, MicrobatchSource, cut_step, loaded_by
from plait.pipeline.named_state import is_known, model_state, tensors_of, tied_aliases, unsaved_state
from plait.pipeline.op_timings import operations_event
from plait.planner.schedules.kinds import Schedule
from plait.planner.schedules.orders import operations
from plait.schema.settings import TrainSettings
from plait.schema.topology_spec import check_topology, read_topology_spec
from plait.training import checkpoint as checkpoints
from plait.training.audit.schedule import PIPELINE_COST, next_audited
from plait.training.audit.stages import AuditedStages
from plait.training.change.layers import (
    HeldLayers,
    find_complete,
    find_moves,
    held_layers,
    put_beside,
    taken,
)
from plait.training.change.members import NO_STATE, Mark, loss_of
from plait.training.change.replanning import replan_together
from plait.training.change.step_commit import StepCommit
from plait.training.checkpoint import Checkpoint, EngineState
from plait.training.components import with_fresh_model
from plait.training.engine import IntervalResult, ask_rank_0, cannot_apply
from plait.training.engines.own_tensors import fill_pieces, names_by_stage, stages_by_name, unused_names
from plait.training.engines.pipeline_setup import (
    open_pipeline,
    prepare_together,
    report_verification,
    with_gathered,
)
from plait.training.engines.replica_layout import check_replicas
from plait.training.engines.step_reduce import DeferredStepReduce
from plait.training.engines.whole_model import load_whole
from plait.training.evaluate import evaluated_weights, in_order, mean_of_all, sums_of
from plait.training.monitoring.asked import is_monitored
from plait.training.monitoring.stages import StageMonitor
from plait.training.optimizers.lr_schedule import set_lr
from plait.training.run import Run
from plait.training.trial import UNKNOWN_STEPS


def check_pipeline(settings: TrainSettings, workers: int | None) -> PipelineLayout:
    """The layout that a job's plan asks for, on that many workers, or as many as it says (None).

    Refuses what a pipeline cannot do.
    """
    assert settings.pipeline is not None
    plan = settings.pipeline.plan
    workers = plan.devices_used if workers is None else workers
    if plan.devices_used != workers:
        raise JobError(
            f"parallel.plan: the plan is for {plan.devices_used} devices, but the job has {workers} "
            f"worker{'s' if workers > 1 else ''}; "
            f"use -np {plan.devices_used}, or plan for {workers}"
        )
    if settings.precision == "fp16" and not (
        plan.schedule.synchronous and settings.sync.kind == "all-reduce"
    ):
        what = (
            f"sync {settings.sync.kind}" if plan.schedule.synchronous else f"schedule {plan.schedule.value}"
        )
        raise JobError(
            f"precision: found 'fp16', whose loss scale all stages must agree on, with {what}, under which "
            f"they update apart; use bf16 or float32, or sync all-reduce and schedule flush, gpipe or "
            f"zero-bubble"
        )
    if settings.accumulate > 1:
        raise JobError("accumulate: a pipeline accumulates by itself; use parallel.microbatches instead")
    wrong = [stage for stage in settings.pipeline.recompute if not 0 <= stage < len(plan.stages)]
    if wrong:
        raise JobError(
            f"parallel.recompute: found stage {wrong[0]}, expected stages 0 to {len(plan.stages) - 1} of the "
            f"plan"
        )
    if settings.pipeline.vertical_sync and plan.schedule is not Schedule.STASH:
        raise JobError(
            f"parallel.vertical_sync: found schedule {plan.schedule.value}, which has one version by itself; "
            f"expected stash"
        )
    pipeline_layout = with_choices(arrange(plan), settings.pipeline)
    if settings.sync.kind != "all-reduce":
        check_replicas(settings, pipeline_layout)
    _check_depths(pipeline_layout)
    return pipeline_layout


def _check_depths(pipeline_layout: PipelineLayout) -> None:
    """Refuse depths that would have workers wait for each other for ever.

    Fewer microbatches are the same order with some of them left out, so the most that a run takes without
    draining stand for all; a few rounds of what is in flight stand for an interval without end.
    """
    layout, schedule = pipeline_layout.layout, pipeline_layout.schedule
    many, batch = max(1, pipeline_layout.local(pipeline_layout.microbatches, 0)), 1
    if not schedule.synchronous:
        many = 4 * len(layout.workers) + 3 * pipeline_layout.most_in_flight()
    if schedule is Schedule.TWO_BUFFERED:
        batch = pipeline_layout.batch_of_two_buffers
        many += 3 * batch
    try:
        operations(schedule, layout, many, pipeline_layout.depths, batch)
    except PlanError as failure:
        raise JobError(f"parallel.depths: {failure}") from None


class PipelineEngine:
    """Steps of a run whose workers hold stages of the model.

    It can be closed and opened again, among other workers or by another plan: then each layer stays where it
    is, if it belongs there, and the others move.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        elastic = run.worker.memberships.can_change
        self._layout = check_pipeline(run.settings, None if elastic else run.worker.world_size)
        self._pipeline: Pipeline | None = None
        # Of a pipeline that was closed: what this worker holds, and what each worker does.
        self._held: HeldLayers | None = None
        self._held_by: list[list[str]] = []
        # By name, the ranks that hold each tensor; and what this worker keeps for others that have left.
        self._holders: dict[str, tuple[int, ...]] = {}
        self._own_names: set[str] = set()
        self._in_trust = HeldLayers()
        # Tensors that workers which leave have given to others.
        self._handed_over: set[str] = set()
        # Whether what workers hold belongs together: not in the middle of a step, unless that can be undone.
        self._is_whole = True
        self._commit: StepCommit | None = None
        self._next_position = Position()
        self._tied = tied_aliases(run.parts.model)
        # Of a model that no worker holds as a whole: the checkpoint that its tensors are read from.
        self._stored: checkpoints.StoredCheckpoint | None = None
        self._monitor: StageMonitor | None = None
        # The stages that use each tensor, and the loss of the last step.
        self._stages: Mapping[str, tuple[int, ...]] = {}
        self._last_loss = 0.0

    def load(self, state: Checkpoint) -> None:
        if self._run.parts.pieces is None:
            # Where layers are with other workers, they come from there.
            if state.model:
                load_whole(self._run.parts, state)
        elif state.stored is not None:
            # Its tensors are read later, one by one, once it is known who holds them.
            self._stored = state.stored
            checkpoints.check_names(self._run.parts.model, self._stored.model)

    def held_state(self) -> EngineState:
        is_spread = self._run.parts.pieces is not None or self._held is not None
        return EngineState({}, {}) if is_spread else self._run.parts.state()

    def open(self) -> None:
        """Cut the model, with the state it has now, into its stages."""
        run, started = self._run, time.perf_counter()
        if self._held is not None:
            run.parts = with_fresh_model(run.parts, run.settings)
            put_beside(run.parts, self._held)
        if run.worker.memberships.can_change:
            run.settings = replan_together(run.worker, run.settings)
        self._layout = check_pipeline(run.settings, run.worker.world_size)
        parts = run.parts
        found, self._layout = prepare_together(run.worker, run.settings, parts, self._layout, run.folder)
        report_verification(run.metrics, found)
        self._stages = stages_by_name(found.traced, self._layout)
        stages = names_by_stage(found.traced, self._layout)
        if parts.pieces is not None:
            fill_pieces(run.worker.rank, parts, parts.pieces, stages, self._stored)
            self._unused = unused_names(parts.model, stages) if run.worker.rank == 0 else []
        everyone = range(run.worker.world_size)
        needed = {**stages, **dict.fromkeys(unused_names(parts.model, stages), everyone)}
        if self._held is not None:
            self._bring_layers(needed)
        self._holders = {name: tuple(ranks) for name, ranks in needed.items()}
        self._own_names = {name for name, ranks in needed.items() if run.worker.rank in ranks}
        self._channels, self._pipeline = open_pipeline(
            run.worker, run.settings, parts, found.traced, self._layout, run.worker.hosts
        )
        if run.worker.memberships.can_change:
            run.worker.memberships.on_loss(self._fail)
            self._commit = StepCommit(self._pipeline) if self._can_lose_replicas() else None
        self._held, self._held_by, self._is_whole = None, [], True
        self._in_trust = HeldLayers()
        self._pipeline.on_timings = self._record_operations
        if is_monitored(run.settings):
            self._monitor = StageMonitor(run, self._pipeline)
        run.opened_s = time.perf_counter() - started

    def _fail(self, failure: PeerError) -> None:
        """Have this worker wait no longer for the sums of others; from any thread."""
        if self._pipeline is not None:
            self._pipeline.fail(failure)

    def _own_layers(self, optimizer: torch.optim.Optimizer) -> HeldLayers:
        """What this worker holds, with what it keeps for others."""
        held, kept = held_layers(self._run.parts, self._own_names, optimizer), self._in_trust
        return HeldLayers(held.model | kept.model, held.optimizer | kept.optimizer)

    def _can_lose_replicas(self) -> bool:
        """Whether what a lost worker held may be with another, after the same step."""
        layout = self._layout
        replicated = any(len(layout.holders(stage)) > 1 for stage in range(len(layout.stages)))
        return replicated and layout.schedule.synchronous and not self._run.parts.scaler.is_enabled()

    def _bring_layers(self, needed: Mapping[str, Sequence[int]]) -> None:
        """Have each worker that lacks layers of its stages take them from one that has them."""
        run = self._run
        assert self._held is not None
        if not self._held_by:
            self._held_by = all_gather_values(sorted(self._held.model))
        moves = find_moves(self._held_by, needed)
        put_beside(run.parts, taken(moves, self._held, run.worker.rank))
        moved = {name for name, *_ in moves} | self._handed_over
        run.metrics.note(LayersMoved(run.trial.step, tuple(sorted(moved))))
        self._handed_over = set()

    def train(self, steps: int) -> IntervalResult:
        """Take the steps through the pipeline; it is empty at their end.

        A step that is audited is an interval of its own.
        """
        run, commit = self._run, self._commit
        following = next_audited(run.settings, run.trial.step, self._audit_cost())
        audited = self._begin_audit() if following == run.trial.step else None
        steps = min(steps, UNKNOWN_STEPS if following is None else max(1, following - run.trial.step))
        batches = list(itertools.islice(run.order(), steps))
        self._is_whole = False
        if commit is not None:
            commit.begin_interval()
        try:
            trained = self._train(batches)
        except RuntimeError as failure:
            lost = loss_of(run.worker, failure)
            if lost is None or commit is None:
                raise
            commit.keep_gradients()
            self._next_position = batches[min(commit.written, len(batches) - 1)].after
            position = batches[commit.written - 1].after if commit.written else run.trial.position
            trained = IntervalResult(commit.written, (position,), lost=lost)
        else:
            if commit is not None:
                commit.end_interval()
        self._is_whole = True
        if audited is not None and trained.lost is None:
            self._end_audit(audited)
        return trained

    def _audit_cost(self) -> float:
        """What an audit takes, in steps: on a CPU the first worker has the cores of those that wait."""
        return PIPELINE_COST if self._run.parts.device.type == "cpu" else float(self._run.worker.world_size)

    def _begin_audit(self) -> AuditedStages | None:
        run = self._run
        if run.parts.pieces is not None:
            run.audits.say("audit: no worker has memory for the whole model, so that no step is taken twice")
            return None
        return AuditedStages(run, self._pipe, self._layout, self._stages)

    def _end_audit(self, audited: AuditedStages) -> None:
        try:
            audited.end(self._run.audits, self._last_loss)
        except RuntimeError as failure:
            # The next step finds the loss of another worker.
            if loss_of(self._run.worker, failure) is None:
                raise

    def _train(self, batches: list[GlobalBatch]) -> IntervalResult:
        run, layout = self._run, self._layout
        usual, many = run.batch_size, layout.microbatches
        pieces = [cut_step(run.trial.step + i, batch, many, usual) for i, batch in enumerate(batches)]
        together = [m for piece in pieces for m in piece]
        # Read a step later: nobody waits for the sum of the step that has just ended.
        slack = layout.microbatches if layout.schedule.synchronous else layout.slack()
        monitor, record = self._monitor, self._recorder_of(batches)
        if monitor is not None:
            monitor.begin_interval()
        numbers = list if monitor is None else monitor.numbers
        notes = DeferredStepReduce(run.worker, together, slack, record, numbers)
        if layout.schedule.synchronous:
            done = self._take_batches(pieces, notes)
        else:
            done = self._take_stream(together, notes)
        notes.finish(run.trial.step + done)
        self._record_operations(run.trial.step + done)
        position = batches[done - 1].after if done else run.trial.position
        return IntervalResult(done, (position,), stopped=notes.stopped, change_asked=notes.change_asked)

    def _take_batches(self, pieces: list[list[Microbatch]], notes: DeferredStepReduce) -> int:
        """One batch after the other, each with its update; how many were taken."""
        rank, layout, first = self._run.worker.rank, self._layout, self._run.trial.step
        contents = self._fetch([m for piece in pieces for m in loaded_by(layout, rank, piece)])
        for done, piece in enumerate(pieces):
            if done and notes.stop_before(first + done):
                return done
            work = self._work(piece, lambda _: contents, lambda _: False)
            local = layout.local(len(piece), layout.pipeline_of(rank))
            ops = one_batch(layout, rank, local)
            if self._monitor is not None:
                self._monitor.begin_batch(ops, work)
            self._pipe.run(ops, work)
            notes.give(first + done, sum(float(loss) for loss in self._pipe.losses.values()))
            self._pipe.losses.clear()
        return len(pieces)

    def _take_stream(self, microbatches: list[Microbatch], notes: DeferredStepReduce) -> int:
        """All steps without draining in between; how many were taken."""
        rank = self._run.worker.rank
        work = self._work(microbatches, self._fetch, notes.stop_before)
        ops = stream(self._layout, rank, work)
        # Losses belong to the last of its stages, if to any.
        stage = max(self._layout.stages_of(rank))
        self._pipe.run(notes.watch(ops, stage, work, self._pipe.losses), work)
        self._pipe.losses.clear()
        return work.end - self._run.trial.step

    def _work(self, microbatches: list[Microbatch], fetch: Any, stop_before: Any) -> MicrobatchSource:
        return MicrobatchSource(
            self._layout,
            self._run.worker.rank,
            microbatches,
            seed=self._run.settings.seed,
            fetch=fetch,
            set_lr=self._set_lr,
            stop_before=stop_before,
        )

    def _fetch(self, microbatches: list[Microbatch]) -> Iterator[Any]:
        """The contents of microbatches of the training split, on this worker's device."""
        return self._load(self._run.parts.train_set, microbatches)

    def _load(self, source: loader.DataSource, microbatches: list[Microbatch]) -> Iterator[Any]:
        if not microbatches:
            return iter(())
        order = (GlobalBatch(m.epoch, tuple(m.samples), Position()) for m in microbatches)
        device, dtype = self._run.parts.device, self._run.parts.dtype
        return (loader.to_device(b.content, device, dtype) for b in self._run.load(source, order))

    def _set_lr(self, step: int, place: int) -> None:
        """Get ready for the update that ends with the microbatch at `place` of a step."""
        set_lr(self._pipe.optimizer, self._pipe.base_lrs, self._run.trial.lr_factor(step))
        if not is_known(self._pipe.optimizer):
            # Workers that hold the same weights draw the same.
            stage = self._layout.stages_of(self._run.worker.rank)[0]
            loader.seed_all(mix(self._run.settings.seed, step, place, stage))

    def _recorder_of(self, batches: list[GlobalBatch]) -> Callable[[int, float, float, list[float]], None]:
        """Records each step of an interval as its loss becomes known."""
        run, first = self._run, self._run.trial.step

        def record(step: int, loss: float, ended: float, sums: list[float]) -> None:
            batch = batches[step - first]
            self._last_loss = loss
            value = torch.tensor(loss, dtype=torch.float64)
            run.metrics.step(step + 1, batch.epoch, value, run.lr(step), len(batch.samples), ended)
            if self._monitor is not None:
                self._monitor.arrive(step, loss, len(batch.samples), sums)

        return record

    def evaluate(self, slots: Sequence[int] = (0,)) -> list[dict[str, float]]:
        """Mean loss and metric over the test split, sent through the pipeline."""
        run, layout, tests = self._run, self._layout, self._run.parts.test_set
        assert tests is not None
        self._pipe.average_buffers()
        size = run.settings.evaluate.batch_size or run.settings.data.batch_size
        each = max(1, size // layout.microbatches)
        pieces = [
            Microbatch(0, i, 0, batch.samples)
            for i, batch in enumerate(in_order(tests.count(run.settings.seed), each))
        ]
        work = self._work(pieces, lambda mine: self._load(tests, mine), lambda _: False)
        sums = torch.zeros(4, dtype=torch.float64)

        def measure(output: Any, target: Any, microbatch: int) -> None:
            count = len(work.microbatch(microbatch).samples)
            sums.add_(sums_of(run.parts, output, target, count))

        local = layout.local(len(pieces), layout.pipeline_of(run.worker.rank))
        with evaluated_weights(self._pipe.optimizer):
            self._pipe.evaluate(local, work, measure)
        return [mean_of_all(run.parts, sums, run.worker.world_size)]

    def state(self, slot: int = 0) -> EngineState | None:
        self._pipe.average_buffers()
        if self._run.parts.pieces is not None:
            return self._write_in_turn()
        gathered = self._pipe.gather_state()
        if self._run.worker.rank != 0:
            return None
        whole = with_gathered(self._run.parts.state(), gathered, self._tied)
        return replace(whole, unsaved=tuple(unsaved_state(self._pipe.optimizer)))

    def _write_in_turn(self) -> EngineState | None:
        """Rank 0 writes what all workers hold as it comes, so that nobody holds all of it."""
        model, optimizer = self._pipe.state()
        is_writer = self._run.worker.rank == 0
        if is_writer:
            own = model_state(self._run.parts.model)
            model |= {name: own[name] for name in self._unused if name in own}
        folder = self._run.folder.checkpoints
        paths = folder / ".step-model.part", folder / ".step-optimizer.part"
        broken = None
        for path, tensors, weights in zip(paths, (model, optimizer), (self._run.parts.weights, None)):
            specs, found = gather_in_turn(tensors, 0)
            if is_writer:
                broken = checkpoints.write_in_turn(path, specs, found, weights) or broken
        written = checkpoints.Written(*paths, self._tied, broken)
        return EngineState({}, {}, written=written) if is_writer else None

    def finish(self, save: Callable[[], None]) -> None:
        save()

    def ask_first(self, ask: Callable[[], Any]) -> Any:
        return ask_rank_0(self._run.worker, ask)

    def apply(self, change: Change) -> None:
        if isinstance(change, PlanChange):
            self._change_plan(change)
        elif isinstance(change, TopologyChange):
            self._change_topology(change)
        # Batches are cut anew for each interval; the number of microbatches stays, and their size changes.
        elif not isinstance(change, BatchSizeChange):
            raise cannot_apply(change, "a pipeline")

    def _change_topology(self, change: TopologyChange) -> None:
        """Have the replicas of each stage sum over another topology."""
        layout, spec = self._layout, read_topology_spec(change.topology)
        sizes = {len(layout.holders(stage)) for stage in range(len(layout.stages))} - {1}
        if not sizes:
            raise cannot_apply(change, "a pipeline with one worker a stage")
        if not spec.by_name:
            raise JobError(
                f"adapt: cannot apply {change}: the replicas of each stage need a topology of their own; use "
                f"a name, such as ring"
            )
        for size in sizes:
            check_topology(spec, size)
        # Noted first: should a worker be lost now, the rest goes on with it.
        self._run.set_topology(change.topology)
        self._pipe.switch_topology(spec)

    def _change_plan(self, change: PlanChange) -> None:
        run = self._run
        assert run.settings.pipeline is not None
        if run.parts.pieces is not None:
            raise JobError(
                "adapt: found a change of the plan, but no worker has memory for the whole model, which it "
                "takes to cut it anew; leave the policy out"
            )
        settings = replace(run.settings, pipeline=replace(run.settings.pipeline, plan=change.plan))
        check_pipeline(settings, run.worker.world_size)
        self._pipe.average_buffers()
        self.close()
        self._commit = None
        run.settings = settings
        # What was measured before is of the other plan.
        run.signals.forget()
        self.open()

    def choose_source(self, marks: Sequence[Mark]) -> int | None:
        run = self._run
        if self._held is None and marks[run.worker.rank] != NO_STATE:
            # It has not trained yet: it has what all start from.
            self._held = held_layers(run.parts, None, run.parts.optimizer)
        marks = self._finish_step(marks)
        self._held = self._held if self._held is not None and self._is_whole else HeldLayers()
        self._held_by = all_gather_values(sorted(self._held.model))
        source = find_complete(marks, self._held_by, tensors_of(run.parts.model))
        if source is not None:
            # Others are elsewhere in the run, and so is what they hold.
            far = [mark[0] == marks[source][0] for mark in marks]
            self._held_by = [held if is_there else [] for held, is_there in zip(self._held_by, far)]
            self._held = self._held if far[run.worker.rank] else HeldLayers()
        else:
            run.parts = with_fresh_model(run.parts, run.settings, keep_scale=False)
            self._held, self._held_by, self._is_whole = None, [], True
            self._in_trust, self._commit = HeldLayers(), None
        return source

    def _finish_step(self, marks: Sequence[Mark]) -> list[Mark]:
        """Write the update of the step that a worker was lost in, where one has written it; all call it.

        Returns how far each worker is then.
        """
        run, commit = self._run, self._commit
        ready = all_gather_values(commit is not None and commit.is_ready)
        last = max(marks, key=lambda mark: (mark[0], -mark[1]))
        behind = [is_ready and mark[0] == last[0] - 1 for is_ready, mark in zip(ready, marks)]
        self._commit = None
        if commit is not None and self._is_whole:
            is_behind = behind[run.worker.rank]
            commit.finish(write=is_behind)
            if is_behind:
                # Should another worker be lost before this one has the progress of the others.
                run.trial.advance(1, self._next_position)
            self._held = self._own_layers(commit.optimizer)
        return [last if is_behind else mark for is_behind, mark in zip(behind, marks)]

    def settle(self, staying: Sequence[int]) -> None:
        self._pipe.average_buffers()
        if not staying:
            return
        only = {name: ranks for name, ranks in self._holders.items() if not set(ranks) & set(staying)}
        moves = [(name, ranks[0], staying[i % len(staying)]) for i, (name, ranks) in enumerate(only.items())]
        self._in_trust = taken(moves, self._own_layers(self._pipe.optimizer), self._run.worker.rank)
        self._handed_over = set(only)

    def warm_up(self) -> None:
        """The first step takes no longer for a worker that joins: what it needs is made as the links are."""

    def close(self) -> None:
        run, pipeline, self._pipeline = self._run, self._pipeline, None
        if pipeline is None:
            return
        self._held = self._own_layers(pipeline.optimizer)
        was_lost = run.worker.memberships.loss() is not None
        # What holds the pipeline would keep its weights in memory.
        self._monitor = None
        pipeline.on_timings = pipeline.on_backward = pipeline.on_gradients = None
        try:
            pipeline.close()
        except RuntimeError:
            if self._is_whole and not was_lost:
                raise
        finally:
            with contextlib.suppress(*([RuntimeError] if was_lost or not self._is_whole else [])):
                self._channels.close()

    @property
    def _pipe(self) -> Pipeline:
        assert self._pipeline is not None
        return self._pipeline

    def _record_operations(self, step: int | None = None) -> None:
        """Record when each operation began and ended, in a long interval now and then."""
        event = operations_event(self._run.trial.step if step is None else step, self._pipe.timings)
        self._pipe.timings.clear()
        self._run.note(event)
        self._run.flush_events()
