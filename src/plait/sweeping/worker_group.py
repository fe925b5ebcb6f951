"""Worker groups: workers that train one array together, on shares of every batch or in stages.

They run the same code in lockstep. What only one of them can know, such as an answer of the coordinator or
what the clock says, the first one finds out for all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from plait.comm.collectives import all_gather_values, broadcast_value, gather_named
from plait.comm.groups import new_group
from plait.core.codec import decode, encode
from plait.core.errors import InputError
from plait.fusion.trials.unfused import note_trials, trials_without_gradient
from plait.launch.worker import Worker
from plait.schema.settings import TrainSettings
from plait.sweeping.datasets import DataSets
from plait.sweeping.engines.stages import GroupPipeline, link_stages
from plait.sweeping.settings import SweepSettings
from plait.sync.allreduce.buckets import AllReduce
from plait.sync.buffers import average
from plait.training import checkpoint as checkpoints
from plait.training.checkpoint import Checkpoint

# The first member may wait for trials for any time; its end is noticed at once all the same.
ANSWER_TIMEOUT = timedelta(days=365)


class WorkerGroup:
    """This worker's group, of which it is number `place` of `size`; a worker by itself is a group of one.

    `sums` carries gradients, `answers` what the first member finds out. All members make the same calls in
    one order. With a `pipeline` they hold the stages of an array, else each holds all of it.
    """

    def __init__(
        self,
        ranks: Sequence[int] = (0,),
        rank: int = 0,
        sums: dist.ProcessGroup | None = None,
        answers: dist.ProcessGroup | None = None,
    ) -> None:
        self.pipeline: GroupPipeline | None = None
        self.place = ranks.index(rank)
        self.size = len(ranks)
        self.sums = sums
        self._answers = answers
        self._first = ranks[0]

    @property
    def is_first(self) -> bool:
        return self.place == 0

    @property
    def is_alone(self) -> bool:
        return self.size == 1

    @property
    def share(self) -> tuple[int, int]:
        """Which share of a batch is this worker's, and of how many."""
        return (self.place, self.size) if self.pipeline is None else (0, 1)

    @property
    def loads(self) -> bool:
        """Whether this worker reads data."""
        return self.pipeline is None or self.is_first

    def from_first(self, find: Callable[[], Any]) -> Any:
        """What `find` returns on the first member, on all of them; plain values."""
        if self.is_alone:
            return find()
        return broadcast_value(find() if self.is_first else None, self._first, self._answers)

    def any_of(self, value: str | None) -> str | None:
        """What the first member that does not give None gives, on all of them."""
        if self.is_alone:
            return value
        return next((each for each in all_gather_values(value, self._answers) if each is not None), None)

    def checkpoint_of_first(self, find: Callable[[], Checkpoint | None]) -> Checkpoint | None:
        """The checkpoint that `find` returns on the first member, on all of them."""
        own = find() if self.is_first else None
        if self.is_alone or not self.from_first(lambda: own is not None):
            return own
        return checkpoints.broadcast(own, self._first, self._answers)

    def total(self, numbers: Tensor, device: torch.device) -> Tensor:
        """The sum of all members' numbers."""
        if self.is_alone:
            return numbers
        carried = numbers.to(device)
        dist.all_reduce(carried, group=self.sums)
        return carried.to(numbers.device)

    def gather(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """On the first member the named tensors of all; elsewhere nothing."""
        return gather_named(tensors, self._first, self._answers)

    def average(self, module: nn.Module) -> None:
        """Give all members the mean of their running statistics."""
        if not self.is_alone:
            average(list(module.buffers()), self.sums)

    def close(self) -> None:
        """End the channels between its stages; all members call it at the end."""
        if self.pipeline is not None:
            self.pipeline.channels.close()


ALONE = WorkerGroup()


class GroupClient:
    """Questions that a group has in common: its first member asks the coordinator, and all have the answer.

    The coordinator reads no data: where it has to know a data set, the worker that asked describes it.
    """

    def __init__(self, workers: WorkerGroup, worker: Worker, sets: DataSets) -> None:
        self._workers = workers
        self._worker = worker
        self._sets = sets

    def ask(self, **question: Any) -> Mapping[str, Any]:
        answer: Mapping[str, Any] = self._workers.from_first(lambda: self._asked(question))
        return answer

    def _asked(self, question: Mapping[str, Any]) -> Mapping[str, Any]:
        while "describe" in (answer := self._worker.ask(question)):
            settings = decode(TrainSettings, answer["describe"], "settings")
            self._worker.ask({"ask": "data", **encode(self._sets.describe(settings))})
        return answer


class GroupSum:
    """Sums an array's gradients and losses over a worker group, for as many trials as there are now.

    With `partial`, gradients may be those of some trials only, where modules run trial by trial: a trial has
    a gradient where it has one on any worker.
    """

    def __init__(
        self, workers: WorkerGroup, parameters: Sequence[Parameter], trials: int, partial: bool = False
    ) -> None:
        self._parameters = list(parameters)
        # The losses travel as one more gradient. First, so in the last bucket: no other waits for them. Then,
        # by parameter and trial, on how many workers there is a gradient.
        rows = 1 + (len(parameters) if partial else 0)
        self._notes = Parameter(torch.zeros(rows, trials, dtype=torch.float64, device=parameters[0].device))
        self._sync = AllReduce([self._notes, *parameters], workers.sums)

    def begin(self) -> None:
        """Forget the gradients of the step before."""
        self._sync.begin()

    def before_backward(self, last: bool) -> None:
        """Whether the backward pass that follows is this worker's last of the step."""
        self._sync.before_backward(last)

    def agree(self, losses: Tensor) -> Tensor:
        """Every member's gradients are the sum over all of them now, and so are the losses returned."""
        notes = torch.zeros_like(self._notes)
        notes[0] = losses
        for row, parameter in zip(notes[1:], self._parameters):
            if parameter.grad is not None:
                row += 1.0
                row[list(trials_without_gradient(parameter, len(row)))] = 0.0
        self._notes.grad = notes
        self._sync.agree(losses[:0])
        assert self._notes.grad is not None
        found = self._notes.grad.clone()
        for parameter, counts in zip(self._parameters, found[1:].tolist()):
            # What backward has sent by itself, of all trials, is not counted.
            note_trials(parameter, [number for number, count in enumerate(counts) if count])
        return found[0]

    def close(self) -> None:
        self._sync.close()


def check_worker_groups(settings: SweepSettings, workers: int) -> None:
    """Refuse a number of workers that groups of this size do not divide."""
    size = settings.workers_per_array
    if workers % size:
        few = f"-np {size}" if workers < size else f"-np {workers - workers % size}"
        there = f"the {workers} worker{'s' if workers > 1 else ''}; use {few}"
        if settings.train.pipeline is not None:
            raise InputError(f"--plan: found {size} stages, which do not divide {there}, or another plan")
        raise InputError(
            f"--replicas: found {size}, which does not divide {there}, or another number of replicas"
        )


def make_worker_group(worker: Worker, settings: SweepSettings, device: torch.device) -> WorkerGroup:
    """This worker's group; all workers call it together, in the process group of all."""
    found = None
    for first in range(0, worker.world_size, settings.workers_per_array):
        ranks = list(range(first, first + settings.workers_per_array))
        sums = new_group(worker.rendezvous, ranks)
        answers = new_group(worker.rendezvous, ranks, ANSWER_TIMEOUT, backend="gloo")
        if worker.rank in ranks:
            found = WorkerGroup(ranks, worker.rank, sums, answers)
    assert found is not None
    if settings.train.pipeline is not None:
        found.pipeline = link_stages(worker, settings.train, worker.rank - found.place, device)
    return found
