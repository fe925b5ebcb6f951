"""Sums over the workers of a pipeline, overlapped with its work: each step's loss, and requests."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from plait.launch.worker import Worker
from plait.pipeline.microbatches import Microbatch, MicrobatchSource
from plait.planner.schedules.operations import Backward, Op


class DeferredStepReduce:
    """Sums over all workers, one for each step, that nobody waits for while the pipeline is full.

    A step's sum is read when all workers have long given theirs: `slack` microbatches after its last one,
    which is more than they can be apart. All read the same, so all stop before the same step. `on_loss` is
    called with each step, its loss, when this worker was done with it, and the sums of workers' `numbers`.
    `stopped` and `change_asked` say what workers asked for in the steps whose sums were read.
    """

    def __init__(
        self,
        worker: Worker,
        microbatches: Sequence[Microbatch],
        slack: int,
        on_loss: Callable[[int, float, float, list[float]], None],
        numbers: Callable[[], list[float]] = list,
    ) -> None:
        self._worker = worker
        self._slack = slack
        self._on_loss = on_loss
        self._numbers = numbers
        self._steps = Counter(m.step for m in microbatches)
        self._ends = _ends(microbatches)
        self._next_to_give = self._next_to_read = microbatches[0].step
        self._given: dict[int, tuple[Tensor, dist.Work | None, float]] = {}
        self.stopped = self.change_asked = False

    def give(self, step: int, loss: float) -> None:
        """Add this worker's part of a step's loss; called for each step in turn."""
        assert step == self._next_to_give
        self._next_to_give += 1
        change = self._worker.memberships.is_asked
        own = [loss, float(self._worker.stop_requested()), float(change), *self._numbers()]
        values = torch.tensor(own, dtype=torch.float64)
        shared = self._worker.world_size > 1
        work = dist.all_reduce(values, async_op=True) if shared else None
        self._given[step] = values, work, time.perf_counter()

    def stop_before(self, step: int) -> bool:
        """Whether a worker had asked to stop, or for other members, in the steps whose sums can be known."""
        begin = self._ends[step] - self._steps[step]
        while self._next_to_read < step and self._ends[self._next_to_read] + self._slack <= begin:
            self._read()
        return self.stopped or self.change_asked

    def finish(self, end: int) -> None:
        """Read the sums of all steps before `end`; the pipeline has drained."""
        while self._next_to_read < end:
            self._read()

    def _read(self) -> None:
        values, work, ended = self._given.pop(self._next_to_read)
        if work is not None:
            work.wait()
        loss, stops, changes, *sums = values.tolist()
        self.stopped, self.change_asked = self.stopped or stops > 0, self.change_asked or changes > 0
        self._on_loss(self._next_to_read, loss, ended, sums)
        self._next_to_read += 1

    def watch(
        self, ops: Iterator[Op], stage: int, work: MicrobatchSource, losses: dict[int, Tensor]
    ) -> Iterator[Op]:
        """`ops` as they are; each step's loss is given once this worker is done with the step in `stage`."""
        sums: dict[int, float] = {}
        for op in ops:
            yield op
            if isinstance(op, Backward) and op.stage == stage:
                own = work.microbatch(op.microbatch)
                for step in range(self._next_to_give, own.step):
                    self.give(step, sums.pop(step, 0.0))
                if op.microbatch in losses:
                    share = len(own.samples) / work.samples_of(own.step)
                    loss = float(losses.pop(op.microbatch)) / work.weight(op.microbatch)
                    sums[own.step] = sums.get(own.step, 0.0) + loss * share
        for step in range(self._next_to_give, work.end):
            self.give(step, sums.pop(step, 0.0))


def _ends(microbatches: Sequence[Microbatch]) -> dict[int, int]:
    """The number of microbatches up to the end of each step."""
    return {m.step: i + 1 for i, m in enumerate(microbatches)}
