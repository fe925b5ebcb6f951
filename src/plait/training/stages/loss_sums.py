"""All-reduces of losses and requests over the workers of a pipeline, overlapped with its work."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from plait.pipeline.microbatches import MicrobatchSource
from plait.planner.schedules.operations import Backward, Op
from plait.training.engines.train_step import StepRequests
from plait.training.worker_group import WorkerGroup


class DeferredStepReduce:
    """One all-reduce per step over the workers of a group that does not stall a full pipeline.

    The sum of a step is read `slack` microbatches after its last one. Workers are never that many
    microbatches apart, so all of them have started the reduce by then. All read the same sums, so all stop
    before the same step. `on_losses` is called with the step, the losses of all `trials`, the time when this
    worker finished the step, and the sums of workers' `numbers`. `stopped` and `change_asked` are the
    requests of workers in the steps whose sums were read.
    """

    def __init__(
        self,
        group: WorkerGroup,
        requests: Callable[[], StepRequests],
        first: int,
        trials: int,
        slack: int,
        on_losses: Callable[[int, Tensor, float, list[float]], None],
        numbers: Callable[[], list[float]] = list,
    ) -> None:
        self._group = group
        self._requests = requests
        self._trials = trials
        self._slack = slack
        self._on_losses = on_losses
        self._numbers = numbers
        # The number of microbatches up to the end of each step.
        self._ends = {first - 1: 0}
        self._next_to_give = self._next_to_read = first
        self._given: dict[int, tuple[Tensor, dist.Work | None, float]] = {}
        self.stopped = self.change_asked = False

    def begin(self, step: int, microbatches: int) -> None:
        """Announce a step of `microbatches` microbatches; called for each step in turn."""
        self._ends[step] = self._ends[step - 1] + microbatches

    def give(self, step: int, losses: Tensor) -> None:
        """Start the all-reduce of a step with this worker's losses; called for each step in turn."""
        assert step == self._next_to_give
        self._next_to_give += 1
        local = self._requests()
        requests = torch.tensor([local.stop, local.change, *self._numbers()], dtype=torch.float64)
        values = torch.cat([losses.cpu(), requests])
        shared = not self._group.is_alone
        work = dist.all_reduce(values, group=self._group.sums, async_op=True) if shared else None
        self._given[step] = values, work, time.perf_counter()

    def stop_before(self, step: int) -> bool:
        """Whether, in the steps whose sums are complete, a worker asked to stop or for other members."""
        begin = self._ends[step - 1]
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
        losses, (stops, changes, *sums) = values[: self._trials], values[self._trials :].tolist()
        self.stopped, self.change_asked = self.stopped or stops > 0, self.change_asked or changes > 0
        self._on_losses(self._next_to_read, losses, ended, sums)
        self._next_to_read += 1

    def watch(
        self, ops: Iterator[Op], stage: int, work: MicrobatchSource, losses: dict[int, Tensor]
    ) -> Iterator[Op]:
        """Yield `ops` unchanged, and `give` each step's loss once this worker has finished it in `stage`."""
        sums: dict[int, Tensor] = {}
        nothing = torch.zeros(self._trials, dtype=torch.float64)
        for op in ops:
            yield op
            if isinstance(op, Backward) and op.stage == stage:
                microbatch = work.microbatch(op.microbatch)
                for step in range(self._next_to_give, microbatch.step):
                    self.give(step, sums.pop(step, nothing))
                if op.microbatch in losses:
                    share = len(microbatch.samples) / work.samples_of(microbatch.step)
                    loss = float(losses.pop(op.microbatch)) / work.weight(op.microbatch)
                    sums[microbatch.step] = sums.get(microbatch.step, nothing) + loss * share
        for step in range(self._next_to_give, work.end):
            self.give(step, sums.pop(step, nothing))
