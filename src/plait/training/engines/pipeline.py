"""Pipelines: workers hold stages of a model, and microbatches pass through them.

The model is one trial's, or several trials fused. Under a synchronous schedule a step is one batch and one
update, as in data-parallel runs. Under an asynchronous schedule a step has the same number of microbatches,
the schedule decides when updates happen, and the pipeline drains only at the end of an interval. Checkpoints
hold the whole model by name, so a run can resume under any plan.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from plait.adapt.changes import BatchSizeChange, Change, PlanChange, TopologyChange
from plait.adapt.members import ProgressMark, loss_of
from plait.core.errors import JobError
from plait.core.events import Event
from plait.data.call_model import evaluated_weights
from plait.data.loader import Batch
from plait.data.sampler import Position
from plait.data.seeding import mix, seed_all
from plait.launcher.worker_process import Worker
from plait.pipeline.executor import PipelineExecutor
from plait.pipeline.layout import PipelineLayout, one_batch, stream
from plait.pipeline.microbatches import Microbatch, MicrobatchSource
from plait.schema.settings import TrainSettings
from plait.schema.topology_spec import check_topology, read_topology_spec
from plait.training.checkpoint import Checkpoint, EngineState
from plait.training.components import TrialInit
from plait.training.engine import IntervalResult, cannot_apply
from plait.training.engines.train_step import AnyComponents, requests_of
from plait.training.evaluate import Totals, in_order, results
from plait.training.monitoring.stage_monitor import StageMonitor
from plait.training.stages.loss_sums import DeferredStepReduce
from plait.training.stages.trial_stages import StepBatch, TrialStages, load_microbatches
from plait.training.trial import UNKNOWN_STEPS, Trial
from plait.training.worker_group import ALONE, WorkerGroup, group_of_world

# Called for each step once its losses are known: its number in the interval, the trials' losses, its batch,
# and when this worker finished it.
OnStageStep = Callable[[int, Tensor, StepBatch, float], None]


class StageAudit(Protocol):
    """Repeats a step of trials in stages, and compares; all workers create it before the step."""

    def end(self, losses: Tensor) -> None:
        """Compare, after the step, whose losses are those of the trials; all workers call it together."""


# Called before an interval: the most steps that it may have, and the audit if its only step is audited.
BeginAudit = Callable[[PipelineExecutor], tuple[int, StageAudit | None]]


def not_audited(pipeline: PipelineExecutor) -> tuple[int, StageAudit | None]:
    """No limit and no audit."""
    return UNKNOWN_STEPS, None


class PipelineEngine:
    """The engine for trials whose stages are held by the workers of a group.

    `stages` are those of one trial or of fused trials. `on_step` is called for each step, `on_operations`
    with the timings of operations and messages, `on_opened` with the seconds that opening the pipeline took.
    `begin_audit` limits the steps of an interval and audits an interval of one step; the monitor of
    `make_monitor` measures steps. The engine can be closed and opened again, among other workers or under
    another plan.
    """

    # No worker has a step that it could take again.
    in_progress: tuple[Sequence[Batch], Sequence[float]] = ((), ())

    def __init__(
        self,
        worker: Worker,
        trials: list[Trial],
        stages: TrialStages,
        on_step: OnStageStep,
        on_operations: Callable[[Event], None] = lambda event: None,
        on_opened: Callable[[float], None] = lambda seconds: None,
        begin_audit: BeginAudit = not_audited,
        make_monitor: Callable[[PipelineExecutor], StageMonitor | None] = lambda pipeline: None,
        group: WorkerGroup | None = None,
    ) -> None:
        self._worker = worker
        self.trials = trials
        self.stages = stages
        self._on_step = on_step
        self._on_operations = on_operations
        self._on_opened = on_opened
        self._begin_audit = begin_audit
        self._make_monitor = make_monitor
        # Set in a sweep; in a run the group is that of its members.
        self._fixed_group = group
        self._group = group or ALONE
        self._pipeline: PipelineExecutor | None = None
        self._monitor: StageMonitor | None = None
        # In the current interval: the steps that were begun, how many are done, and the last known losses.
        self._begun: list[StepBatch] = []
        self.done = 0
        self._last_losses = torch.zeros(0)

    @property
    def settings(self) -> TrainSettings:
        """The settings of the first trial, for what all trials have in common."""
        return self.trials[0].settings

    @property
    def components(self) -> AnyComponents:
        """Those of the trials, in this worker's stages."""
        return self.stages.components

    @property
    def is_in_step(self) -> bool:
        """Whether a step is in progress, with its data read."""
        return len(self._begun) > self.done

    def load(self, state: Checkpoint) -> None:
        self.stages.load(state)

    def open(self) -> None:
        """Cut the model, with its present state, into stages."""
        started = time.perf_counter()
        self._pipeline = self.stages.open()
        self._group = self._fixed_group or group_of_world(self._worker)
        if self._worker.memberships.can_change:
            # A loss may be learnt late, and must not interrupt the pipeline of the next members.
            self._worker.memberships.on_loss(self._pipeline.fail)
        self._pipeline.on_timings = self._record_operations
        self._monitor = self._make_monitor(self._pipeline)
        self._on_opened(time.perf_counter() - started)

    def train(self, steps: int) -> IntervalResult:
        """Run the steps through the pipeline, which is drained at the end."""
        most, audited = self._begin_audit(self._pipe)
        self._begun, self.done = [], 0
        result = self.stages.run_interval(lambda: self._train(min(steps, most)), self._positions)
        if audited is not None and result.lost is None:
            self._end_audit(audited)
        return result

    def _positions(self, steps: int) -> tuple[Position, ...]:
        """The data positions of the trials after `steps` steps of the interval."""
        last = min(steps, len(self._begun))
        return self._begun[last - 1].after if last else tuple(trial.position for trial in self.trials)

    def _end_audit(self, audited: StageAudit) -> None:
        try:
            audited.end(self._last_losses)
        except RuntimeError as failure:
            # If a worker was lost, the next step reports it.
            if loss_of(self._worker, failure) is None:
                raise

    def _train(self, steps: int) -> IntervalResult:
        first, layout, monitor = self.trials[0].step, self.stages.layout, self._monitor
        # Read one step later, so that no worker waits for the sum of the step that has just ended.
        slack = layout.microbatches if layout.schedule.synchronous else layout.slack()
        if monitor is not None:
            monitor.begin_interval()
        sums = DeferredStepReduce(
            self._group,
            lambda: requests_of(self._worker),
            first,
            len(self.trials),
            slack,
            self._record,
            list if monitor is None else monitor.numbers,
        )
        batches = self.stages.steps(self.trials, steps)
        if layout.schedule.synchronous:
            self._take_batches(batches, sums)
        else:
            self._take_stream(batches, sums)
        sums.finish(first + self.done)
        self._record_operations(first + self.done)
        return IntervalResult(self.done, self._positions(self.done), sums.stopped, False, sums.change_asked)

    def _begin(self, batch: StepBatch, sums: DeferredStepReduce) -> None:
        sums.begin(self.trials[0].step + len(self._begun), len(batch.microbatches))
        self._begun.append(batch)

    def _take_batches(self, batches: Iterator[StepBatch], sums: DeferredStepReduce) -> None:
        """Run one batch after the other, each with its update."""
        rank, layout, first = self._worker.rank, self.stages.layout, self.trials[0].step
        while not (self.done and sums.stop_before(first + self.done)):
            batch = next(batches, None)
            if batch is None:
                return
            self._begin(batch, sums)
            work = self._work(batch.microbatches)
            local = layout.local(len(batch.microbatches), layout.pipeline_of(rank))
            ops = one_batch(layout, rank, local)
            if self._monitor is not None:
                self._monitor.begin_batch(ops, work, batch.rows)
            self._pipe.run(ops, work)
            sums.give(first + self.done, self._pipe.take_losses())
            self.done += 1

    def _take_stream(self, batches: Iterator[StepBatch], sums: DeferredStepReduce) -> None:
        """Run all steps without draining in between."""
        rank, layout, first = self._worker.rank, self.stages.layout, self.trials[0].step
        for batch in batches:
            self._begin(batch, sums)
        together = [microbatch for batch in self._begun for microbatch in batch.microbatches]
        work = self._work(together, sums.stop_before)
        # If this worker has losses, they are those of its last stage.
        stage = max(layout.stages_of(rank))
        self._pipe.run(sums.watch(stream(layout, rank, work), stage, work, self._pipe.losses), work)
        self._pipe.losses.clear()
        self.done = work.end - first

    def _work(
        self, microbatches: list[Microbatch], stop_before: Callable[[int], bool] = lambda step: False
    ) -> MicrobatchSource:
        return MicrobatchSource(
            self.stages.layout,
            self._worker.rank,
            microbatches,
            seed=self.settings.seed,
            fetch=self.stages.contents,
            set_lr=self._set_lr,
            stop_before=stop_before,
            weights_losses=not self.stages.components.weights_losses,
        )

    def _set_lr(self, step: int, index: int) -> None:
        """Set learning rates and seeds for the update after microbatch `index` of a step."""
        components, done = self.stages.components, step - self.trials[0].step
        components.set_lr([trial.lr_factor(trial.step + done) for trial in self.trials])
        if not components.is_optimizer_known:
            # Workers that hold the same weights draw the same random numbers.
            stage = self.stages.layout.stages_of(self._worker.rank)[0]
            seed_all(mix(self.settings.seed, step, index, stage))

    def _record(self, step: int, losses: Tensor, ended: float, sums: list[float]) -> None:
        """Record a step of the interval when its losses are known."""
        number = step - self.trials[0].step
        batch = self._begun[number]
        self._last_losses = losses
        if self._monitor is not None:
            self._monitor.arrive(step, float(losses[0]), batch.rows, sums)
        self._on_step(number + 1, losses, batch, ended)

    def evaluate(self, slots: Sequence[int] = (0,)) -> list[dict[str, float]]:
        """Mean loss and metrics over the test split, sent through the pipeline."""
        components = self.stages.components
        self._pipe.average_buffers()
        totals = evaluation_totals(self.stages.layout, components, self._pipe, self.trials, slots)
        return results(self._group, [components.of_trial(slot) for slot in slots], totals)

    def state(self, slot: int = 0) -> EngineState | None:
        self._pipe.average_buffers()
        return self.stages.state(slot, self._pipe, self._group)

    def check_entering(self, entering: Sequence[TrialInit]) -> None:
        """Refuse trials that cannot join the present ones, before anything changes."""
        self.stages.check_entering(entering)

    def change_trials(
        self, leaving: Sequence[int], entering: Sequence[TrialInit], trials: list[Trial]
    ) -> None:
        """Remove and add trials; `trials` are the trials after the change."""
        self._pipe.average_buffers()
        # Gradients are summed in buffers of the present shapes.
        self.close()
        self.stages.change(leaving, entering)
        self.trials = trials
        self.open()

    def apply(self, change: Change) -> None:
        if isinstance(change, PlanChange):
            self._change_plan(change)
        elif isinstance(change, TopologyChange):
            self._change_topology(change)
        # A new batch size changes the size of microbatches and not their number.
        elif not isinstance(change, BatchSizeChange):
            raise cannot_apply(change, "a pipeline")

    def _change_topology(self, change: TopologyChange) -> None:
        """Switch the all-reduce among the replicas of each stage to another topology."""
        layout, spec = self.stages.layout, read_topology_spec(change.topology)
        sizes = {len(layout.holders(stage)) for stage in range(len(layout.stages))} - {1}
        if not sizes:
            raise cannot_apply(change, "a pipeline with one worker a stage")
        if not spec.by_name:
            raise JobError(
                f"adapt: cannot apply {change}: each stage needs a separate topology for its replicas; use "
                f"a name, such as ring"
            )
        for size in sizes:
            check_topology(spec, size)
        # Recorded first: if a worker is lost now, the others continue with it.
        for trial in self.trials:
            trial.settings = replace(trial.settings, topology=spec)
        self._pipe.switch_topology(spec)

    def _change_plan(self, change: PlanChange) -> None:
        settings = self.stages.with_plan(change)
        self._pipe.average_buffers()
        self.close()
        self.trials[0].settings = settings
        self.open()

    def find_source(self, marks: Sequence[ProgressMark]) -> tuple[int, EngineState] | None:
        return self.stages.find_source(marks)

    def synchronize(self, staying: Sequence[int]) -> None:
        self._pipe.average_buffers()
        self.stages.leave_to(staying)

    def close(self) -> None:
        pipeline, self._pipeline = self._pipeline, None
        if pipeline is not None:
            # References to the pipeline would keep its weights in memory.
            self._monitor = None
            pipeline.on_timings = pipeline.on_backward = pipeline.on_gradients = None
            self.stages.close(pipeline)

    @property
    def _pipe(self) -> PipelineExecutor:
        assert self._pipeline is not None
        return self._pipeline

    def _record_operations(self, step: int | None = None) -> None:
        """Record the timings of operations and messages; in a long interval, repeatedly."""
        workers = self._worker.memberships.current.members
        for event in self._pipe.timings.take(self.trials[0].step if step is None else step, workers):
            self._on_operations(event)


def evaluation_totals(
    layout: PipelineLayout,
    components: AnyComponents,
    pipeline: PipelineExecutor,
    trials: Sequence[Trial],
    slots: Sequence[int],
) -> list[Totals]:
    """This worker's part of the evaluation of each trial in `slots` on the test split.

    The pipelines of `layout` take microbatches of the test split in turn; all their workers call it together.
    A worker of the last stage has totals, those of others are zero.
    """
    settings, tests = trials[slots[0]].settings, components.of_trial(slots[0]).test_set
    assert tests is not None
    size = settings.evaluate.batch_size or settings.data.batch_size
    samples = in_order(tests.count(settings.seed), max(1, size // layout.microbatches))
    microbatches = [Microbatch(0, i, 0, batch.samples) for i, batch in enumerate(samples)]
    work = MicrobatchSource(
        layout,
        pipeline.rank,
        microbatches,
        seed=settings.seed,
        fetch=lambda local: load_microbatches(tests, settings, components, local),
    )
    totals = [Totals(components.of_trial(slot)) for slot in slots]

    def measure(output: Any, target: Any, microbatch: int) -> None:
        given = work.microbatch(microbatch)
        for own, slot in zip(totals, slots):
            components.add_to(own, slot, output, target, len(given.samples), (given.index, 0))

    with evaluated_weights(pipeline.optimizer):
        pipeline.evaluate(layout.local(len(microbatches), layout.pipeline_of(pipeline.rank)), work, measure)
    return totals
