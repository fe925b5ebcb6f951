"""The microbatches of an interval of steps: samples, weights, and where the interval ends."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from plait.data.sampler import GlobalBatch, share
from plait.data.seeding import mix
from plait.pipeline.layout import PipelineLayout, microbatches_per_update
from plait.planner.schedules.in_flight import Schedule
from plait.planner.schedules.operations import Update


@dataclass(frozen=True)
class Microbatch:
    """Its samples, its step (counted over the whole run) and its index within the step.

    Of fused trials, `rows` is the number of samples of each.
    """

    step: int
    index: int
    epoch: int
    samples: Sequence[int]
    rows: tuple[int, ...] = ()


class Work(Protocol):
    """What the microbatches of this worker's pipeline are."""

    def content(self, microbatch: int) -> tuple[Any, Any]:
        """Inputs and target; asked of workers of the first stage only."""

    def weight(self, microbatch: int) -> float:
        """The loss's share in the batch."""

    def samples(self, microbatch: int) -> tuple[int, ...]:
        """How many samples it holds, of each trial."""

    def seed(self, microbatch: int, stage: int) -> int:
        """Where random numbers start."""

    def set_rate(self, update: Update) -> None:
        """Set the learning rate of an update."""

    def factor(self, update: Update) -> float:
        """What this worker's gradients are multiplied by before they are summed."""


def microbatch_count(count: int, usual: int, microbatches: int) -> int:
    """The number of microbatches for `count` samples, if a batch of `usual` samples has `microbatches`.

    A smaller last batch of an epoch keeps the size of microbatches, not their number: none has a single
    sample (which batch normalisation cannot handle, and which under stash would be an update) unless all
    have.
    """
    microbatches = min(microbatches, usual)
    if count >= usual:
        return microbatches
    fitting = math.ceil(count * microbatches / usual)
    return fitting if usual < 2 * microbatches else max(1, min(fitting, count // 2))


def cut_step(step: int, batch: GlobalBatch, microbatches: int, usual: int) -> list[Microbatch]:
    """A step's batch in microbatches whose sizes differ by at most one; see `microbatch_count`."""
    count = microbatch_count(len(batch.samples), usual, microbatches)
    return [Microbatch(step, i, batch.epoch, share(batch.samples, i, count)) for i in range(count)]


def loaded_by(
    pipeline_layout: PipelineLayout, rank: int, microbatches: Sequence[Microbatch]
) -> list[Microbatch]:
    """The microbatches that this worker loads, in order; none unless it holds the first stage."""
    pipeline = pipeline_layout.pipeline_of(rank)
    layout = pipeline_layout.layouts[pipeline]
    numbered = enumerate(microbatches[pipeline :: pipeline_layout.pipelines])
    return [microbatch for i, microbatch in numbered if layout.worker(0, i) == rank]


class MicrobatchSource:
    """The microbatches of an interval of steps, for the pipeline of `rank`; it does not drain between steps.

    `fetch` yields the contents of this worker's microbatches, in order; only the first stage uses it.
    `set_lr` is called with the step of an update and the index of the update's last microbatch in that step.
    `stop_before` is called before each step and returns, equal on all workers, whether the interval ends.
    Without `weights_losses` losses have the weights of their microbatches already.
    """

    def __init__(
        self,
        pipeline_layout: PipelineLayout,
        rank: int,
        microbatches: Sequence[Microbatch],
        *,
        seed: int,
        fetch: Callable[[list[Microbatch]], Iterator[Any]],
        set_lr: Callable[[int, int], None] = lambda step, index: None,
        stop_before: Callable[[int], bool] = lambda step: False,
        weights_losses: bool = True,
    ) -> None:
        self._pipeline_layout = pipeline_layout
        self._rank = rank
        self._pipeline = pipeline_layout.pipeline_of(rank)
        self._layout = pipeline_layout.layouts[self._pipeline]
        self._seed = seed
        self._set_lr = set_lr
        self._stop_before = stop_before
        self._weights_losses = weights_losses
        self._fetch = fetch
        self._begun = microbatches[0].step
        self._samples = Counter[int]()
        self._microbatches: list[Microbatch] = []
        self.total = 0
        self._contents: Iterator[Any] = iter(())
        self.add(microbatches)

    def add(self, microbatches: Sequence[Microbatch]) -> None:
        """Continue the interval with the microbatches of further steps.

        The contents of all earlier ones have been read, and the earlier steps ended with a round of every
        stage.
        """
        self._microbatches += microbatches
        for microbatch in microbatches:
            self._samples[microbatch.step] += len(microbatch.samples)
        self.total += len(microbatches)
        self._contents = self._fetch(loaded_by(self._pipeline_layout, self._rank, microbatches))

    def microbatch(self, index: int, pipeline: int | None = None) -> Microbatch:
        """Microbatch `index` of a pipeline, by default of this worker's pipeline."""
        first = self._pipeline if pipeline is None else pipeline
        return self._microbatches[index * self._pipeline_layout.pipelines + first]

    def samples_of(self, step: int) -> int:
        """The number of samples in all microbatches of a step."""
        return self._samples[step]

    @property
    def end(self) -> int:
        """The step after the last."""
        return self._microbatches[self.total - 1].step + 1

    def admits(self, pipeline: int, microbatch: int) -> bool:
        """Whether the interval still includes this microbatch; a stop ends it between two steps."""
        number = microbatch * self._pipeline_layout.pipelines + pipeline
        last = self._microbatches[min(number, self.total - 1)].step if self.total else self._begun
        while self._begun < last:
            self._begun += 1
            if self._stop_before(self._begun):
                self.total = sum(m.step < self._begun for m in self._microbatches[: self.total])
                break
        return number < self.total

    def content(self, microbatch: int) -> tuple[Any, Any]:
        inputs, target = next(self._contents)
        return inputs, target

    def weight(self, microbatch: int) -> float:
        schedule = self._pipeline_layout.schedule
        if schedule is Schedule.STASH or not self._weights_losses:
            return 1.0
        current = self.microbatch(microbatch)
        if schedule is Schedule.TWO_BUFFERED:
            size = microbatches_per_update(self._pipeline_layout, 0)
            members = self._round(microbatch // size, size, len(self._microbatches))
            return len(current.samples) / sum(len(m.samples) for m in members)
        return len(current.samples) / self._samples[current.step]

    def samples(self, microbatch: int) -> tuple[int, ...]:
        current = self.microbatch(microbatch)
        return current.rows or (len(current.samples),)

    def seed(self, microbatch: int, stage: int) -> int:
        current = self.microbatch(microbatch)
        return mix(self._seed, current.step, current.index, stage)

    def set_rate(self, update: Update) -> None:
        """Set the learning rate of the step that an update belongs to."""
        synchronous = self._pipeline_layout.schedule.synchronous
        members = self._microbatches if synchronous else self._members(update)
        self._set_lr(members[-1].step, members[-1].index)

    def factor(self, update: Update) -> float:
        """What this worker's gradients are multiplied by before they are summed."""
        if self._pipeline_layout.schedule.synchronous:
            return 1.0
        size = microbatches_per_update(self._pipeline_layout, update.stage)
        whole = sum(len(m.samples) for m in self._members(update))
        if self._pipeline_layout.schedule is Schedule.TWO_BUFFERED:
            # If the interval ended early, the losses were weighted for a larger round.
            planned = self._round(update.version - 1, size, len(self._microbatches))
            return sum(len(m.samples) for m in planned) / whole
        replica = self._layout.stages[update.stage].index(self._rank)
        index = (update.version - 1) * size + replica
        if index * self._pipeline_layout.pipelines + self._pipeline >= self.total:
            return 1.0
        return len(self.microbatch(index).samples) / whole

    def _members(self, update: Update) -> Sequence[Microbatch]:
        """The microbatches, of all pipelines, whose gradients an update uses."""
        size = microbatches_per_update(self._pipeline_layout, update.stage)
        # Decide now whether the round is shortened, so that replicas which get here later decide the same.
        last = min(update.version * size * self._pipeline_layout.pipelines, self.total) - 1
        self.admits(last % self._pipeline_layout.pipelines, last // self._pipeline_layout.pipelines)
        return self._round(update.version - 1, size, self.total)

    def _round(self, number: int, size: int, total: int) -> Sequence[Microbatch]:
        """The microbatches of all pipelines between two updates, among the first `total`."""
        together = size * self._pipeline_layout.pipelines
        return self._microbatches[number * together : min((number + 1) * together, total)]
