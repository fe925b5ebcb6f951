"""What a pipeline engine trains: the stages that this worker holds of one trial, or of fused trials."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from plait.adapt.changes import PlanChange
from plait.adapt.members import ProgressMark, most_advanced
from plait.data import loader
from plait.data.sampler import GlobalBatch, Position
from plait.pipeline.executor import PipelineExecutor
from plait.pipeline.layout import PipelineLayout
from plait.pipeline.microbatches import Microbatch
from plait.schema.settings import TrainSettings
from plait.training.checkpoint import Checkpoint, EngineState
from plait.training.components import TrialInit
from plait.training.engine import IntervalResult, cannot_apply
from plait.training.engines.pipeline_setup import State
from plait.training.engines.train_step import AnyComponents
from plait.training.trial import Trial
from plait.training.worker_group import WorkerGroup


@dataclass(frozen=True)
class StepBatch:
    """The microbatches of a step, and the positions of its trials after it."""

    microbatches: list[Microbatch]
    after: tuple[Position, ...]
    epoch: int
    samples: int

    @property
    def rows(self) -> tuple[int, ...]:
        """The samples of each trial."""
        rows = (microbatch.rows or (len(microbatch.samples),) for microbatch in self.microbatches)
        return tuple(map(sum, zip(*rows)))


class TrialStages(ABC):
    """The stages of one trial, or of fused trials, on this worker.

    `components` are those of the trials; once the stages are open, with the optimizer of this worker's
    stages. All workers of the group call each method together, except `load`. By default workers, the plan
    and the trials stay as they are.
    """

    layout: PipelineLayout
    components: AnyComponents

    @abstractmethod
    def open(self) -> PipelineExecutor:
        """Build the stages with the present state of the components."""

    def close(self, pipeline: PipelineExecutor) -> None:
        """Close the pipeline; the state of its stages is kept."""
        pipeline.close()

    @abstractmethod
    def steps(self, trials: Sequence[Trial], count: int) -> Iterator[StepBatch]:
        """The next `count` steps, read lazily; fewer if the data end."""

    @abstractmethod
    def contents(self, microbatches: list[Microbatch]) -> Iterator[Any]:
        """Inputs and targets of microbatches of `steps` that enter through this worker, on its device."""

    def state(self, slot: int, pipeline: PipelineExecutor, group: WorkerGroup) -> EngineState | None:
        """The state of the trial in `slot`, on the first worker."""
        return self.gather(slot, self.local_state(slot, pipeline), group)

    def local_state(self, slot: int, pipeline: PipelineExecutor) -> State:
        """The part of a trial's state of which this worker is the first holder."""
        return pipeline.state()

    @abstractmethod
    def gather(self, slot: int, local: State, group: WorkerGroup) -> EngineState | None:
        """The whole state on the first worker, of what each worker of the group has as `local`."""

    def check_entering(self, entering: Sequence[TrialInit]) -> None:
        """Refuse trials that cannot join the present ones, before anything changes."""
        assert not entering

    def change(self, leaving: Sequence[int], entering: Sequence[TrialInit]) -> None:
        """Remove the trials in the slots `leaving` and add those of `entering`; the pipeline is closed."""
        raise AssertionError

    def run_interval(
        self, train: Callable[[], IntervalResult], positions: Callable[[int], tuple[Position, ...]]
    ) -> IntervalResult:
        """The result of `train` or, if a worker is lost in it, of the steps that all others have completed.

        `positions` gives the data positions of the trials after a number of steps. By default the loss of a
        worker is the end.
        """
        return train()

    def load(self, state: Checkpoint) -> None:
        """Load the tensors of a checkpoint, unless trials bring their state when they join."""
        return

    def with_plan(self, change: PlanChange) -> TrainSettings:
        """The settings with another plan; JobError if the stages cannot be cut that way."""
        raise cannot_apply(change, "an array of trials")

    def find_source(self, marks: Sequence[ProgressMark]) -> tuple[int, EngineState] | None:
        """See `Engine.find_source`."""
        return most_advanced(marks), EngineState({}, {})

    def leave_to(self, staying: Sequence[int]) -> None:
        """Send the ranks in `staying` the layers that only leaving ranks hold."""
        return


def load_microbatches(
    source: loader.DataSource,
    settings: TrainSettings,
    components: AnyComponents,
    microbatches: list[Microbatch],
) -> Iterator[Any]:
    """Inputs and targets of microbatches for all trials, read by the job's loader processes."""
    if not microbatches:
        return
    order = (GlobalBatch(m.epoch, tuple(m.samples), Position()) for m in microbatches)
    pin = components.device.type == "cuda"
    read = loader.load(
        source,
        order,
        seed=settings.seed,
        rank=0,
        world_size=1,
        loaders=settings.data.loaders,
        pin=pin,
    )
    for batch in read:
        yield components.stacked([batch.content] * components.trials, batch.count)
