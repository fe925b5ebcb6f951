"""Groups of workers that train the same trials in lockstep; the first worker decides for all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plait.comm.channels import Channels
from plait.comm.collectives import all_gather_values, broadcast_value, gather_named
from plait.comm.groups import new_group_of_members
from plait.comm.rendezvous import Rendezvous
from plait.core.errors import LostPeer, PeerError, PlaitError
from plait.launcher.worker_process import Worker
from plait.launcher.workers.worker_failure import as_loss
from plait.sync.allreduce.reducers import Members, whole_world
from plait.training import checkpoint as checkpoints
from plait.training.checkpoint import Checkpoint


@dataclass(frozen=True)
class StageLinks:
    """What connects workers that hold stages: channels, and process groups of those that sum gradients.

    `loads` says whether this worker holds the first stage, which reads the data.
    """

    channels: Channels
    rendezvous: Rendezvous
    loads: bool
    _members: dict[tuple[int, ...], Members] = field(default_factory=dict)

    def members_of(self, ranks: Sequence[int]) -> Members | None:
        """These ranks with their process group, which they ask for in one order; None on other ranks."""
        key = tuple(ranks)
        if self.rendezvous.rank in key and key not in self._members:
            self._members[key] = Members(self.rendezvous, key, new_group_of_members(self.rendezvous, key))
        return self._members.get(key)


class WorkerGroup:
    """This worker's group, of which it is number `place` of `size`; a worker by itself is a group of one.

    `sums` carries gradients, `answers` what the first member finds out. All members make the same calls in
    one order. With `links` between them they hold stages of an array, else each holds all of it.
    """

    def __init__(
        self,
        ranks: Sequence[int] = (0,),
        rank: int = 0,
        sums: dist.ProcessGroup | None = None,
        answers: dist.ProcessGroup | None = None,
        members: Members | None = None,
    ) -> None:
        self.links: StageLinks | None = None
        # The workers that sum gradients, if there are several.
        self.members = members
        self.rank = rank
        self.ranks = tuple(ranks)
        self.place = ranks.index(rank)
        self.size = len(ranks)
        self.sums = sums
        self._answers = answers
        self.first_rank = ranks[0]

    @property
    def is_first(self) -> bool:
        return self.place == 0

    @property
    def is_alone(self) -> bool:
        return self.size == 1

    @property
    def share(self) -> tuple[int, int]:
        """The index of this worker's share of a batch, and the number of shares."""
        return (self.place, self.size) if self.links is None else (0, 1)

    @property
    def loads(self) -> bool:
        """Whether this worker reads data."""
        return self.links is None or self.links.loads

    def from_first(self, find: Callable[[], Any]) -> Any:
        """Call `find` on the first member and broadcast its result, which consists of plain values."""
        if self.is_alone:
            return find()
        value = find() if self.is_first else None
        with _peer_errors():
            return broadcast_value(value, self.first_rank, self._answers)

    def of_all(self, value: Any) -> list[Any]:
        """The plain values of all members, by place, on all of them."""
        if self.is_alone:
            return [value]
        with _peer_errors():
            return all_gather_values(value, self._answers)

    def any_of(self, value: str | None) -> str | None:
        """The first value that is not None among those of all members, on all of them."""
        return next((each for each in self.of_all(value) if each is not None), None)

    def checkpoint_of_first(self, find: Callable[[], Checkpoint | None]) -> Checkpoint | None:
        """Call `find` on the first member and broadcast the checkpoint that it returns."""
        local = find() if self.is_first else None
        if self.is_alone or not self.from_first(lambda: local is not None):
            return local
        with _peer_errors():
            return checkpoints.broadcast(local, self.first_rank, self._answers)

    def total(self, numbers: Tensor, device: torch.device) -> Tensor:
        """The sum of all members' numbers."""
        if self.is_alone:
            return numbers
        carried = numbers.to(device)
        with _peer_errors():
            dist.all_reduce(carried, group=self.sums)
        return carried.to(numbers.device)

    def gather(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The named tensors of all members on the first one; empty on others."""
        with _peer_errors():
            return gather_named(tensors, self.first_rank, self._answers)

    def close(self) -> None:
        """Close the channels between its stages; all members call it at the end."""
        if self.links is not None:
            self.links.channels.close()


@contextlib.contextmanager
def _peer_errors() -> Iterator[None]:
    """Turn the failure of a collective into PeerError: it is no failure of this worker or of a trial."""
    try:
        yield
    except PlaitError:
        raise
    except RuntimeError as failure:
        raise as_loss(failure) or PeerError(str(failure), LostPeer.GONE) from None


ALONE = WorkerGroup()


def group_of_world(worker: Worker) -> WorkerGroup:
    """The group of all workers of a run."""
    if worker.world_size == 1:
        return ALONE
    return WorkerGroup(range(worker.world_size), worker.rank, members=whole_world(worker.rendezvous))
