"""Worker groups: neighbouring workers that train one array together, on shares of every batch or in stages.

The first of them leads: it talks to the coordinator, and the others carry out its commands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from plait.comm.collectives import broadcast_named, broadcast_value, gather_named
from plait.comm.groups import new_group
from plait.core.errors import InputError
from plait.fusion.trials.unfused import note_trials, trials_without_gradient
from plait.launch.worker import Worker
from plait.sweeping.engines.commands import Command, StepCommand, from_message, to_message
from plait.sweeping.engines.stages import GroupPipeline, link_stages
from plait.sweeping.settings import SweepSettings
from plait.sync.allreduce.buckets import AllReduce
from plait.sync.buffers import average

# A leader may send nothing for as long as it waits for trials; its end is noticed at once all the same.
COMMAND_TIMEOUT = timedelta(days=365)
_OTHER, _STEP = 0.0, 1.0


class WorkerGroup:
    """This worker's group: it is number `place` of `size`, and 0 leads.

    `sums` carries gradients, `commands` the leader's commands. All members make the same calls in one order.
    With a `pipeline` they hold the stages of an array, else all of it.
    """

    def __init__(
        self, ranks: Sequence[int], rank: int, sums: dist.ProcessGroup, commands: dist.ProcessGroup
    ) -> None:
        self.pipeline: GroupPipeline | None = None
        self.place = ranks.index(rank)
        self.size = len(ranks)
        self.sums = sums
        self._commands = commands
        self._leader = ranks[0]

    @property
    def leads(self) -> bool:
        return self.place == 0

    @property
    def share(self) -> tuple[int, int]:
        """Which share of a batch is this worker's, and of how many."""
        return (self.place, self.size) if self.pipeline is None else (0, 1)

    @property
    def loads(self) -> bool:
        """Whether this worker reads data."""
        return self.pipeline is None or self.leads

    def send_command(self, command: Command, trials: int) -> None:
        """Send the followers a command; `trials` is how many their array has now."""
        head = torch.zeros(_head_length(trials), dtype=torch.float64)
        if isinstance(command, StepCommand):
            # All that a step needs: each worker loads its own share of the batches.
            head[0] = _STEP
            head[1:] = torch.tensor(command.factors, dtype=torch.float64)
            self._broadcast(head)
            return
        head[0] = _OTHER
        self._broadcast(head)
        value, tensors = to_message(command)
        broadcast_value(value, self._leader, self._commands)
        broadcast_named(tensors, self._leader, self._commands)

    def receive_command(self, trials: int) -> Command:
        """The leader's next command; `trials` is how many this worker's array has now."""
        head = torch.zeros(_head_length(trials), dtype=torch.float64)
        self._broadcast(head)
        if head[0] == _STEP:
            return StepCommand(tuple(head[1:].tolist()))
        value = broadcast_value(None, self._leader, self._commands)
        return from_message(value, broadcast_named(None, self._leader, self._commands))

    def _broadcast(self, tensor: Tensor) -> None:
        dist.broadcast(tensor, self._leader, group=self._commands)

    def total(self, numbers: Tensor, device: torch.device) -> Tensor:
        """The sum of all members' numbers."""
        carried = numbers.to(device)
        dist.all_reduce(carried, group=self.sums)
        return carried.to(numbers.device)

    def gather(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """On the leader the named tensors of all members; elsewhere nothing."""
        return gather_named(tensors, self._leader, self._commands)

    def average(self, module: nn.Module) -> None:
        """Give all members the mean of their running statistics."""
        average(list(module.buffers()), self.sums)

    def close(self) -> None:
        """End the channels between its stages; all members call it after their last command."""
        if self.pipeline is not None:
            self.pipeline.channels.close()


def share_of(workers: WorkerGroup | None) -> tuple[int, int]:
    """Which share of a batch is this worker's, and of how many; all of it without a group."""
    return (0, 1) if workers is None else workers.share


def _head_length(trials: int) -> int:
    return 1 + max(1, trials)


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
        commands = new_group(worker.rendezvous, ranks, COMMAND_TIMEOUT, backend="gloo")
        if worker.rank in ranks:
            found = WorkerGroup(ranks, worker.rank, sums, commands)
    assert found is not None
    if settings.train.pipeline is not None:
        found.pipeline = link_stages(worker, settings.train, worker.rank - found.place, device)
    return found
