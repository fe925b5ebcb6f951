"""Reducers: how a buffer that every worker has filled becomes the sum of all of them, in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Pending(Protocol):
    """A sum on its way."""

    def wait(self) -> object:
        """Return when the buffer holds the sum."""
        ...


class Reducer(Protocol):
    """Sums the buffers of an all-reduce; all workers start the same ones in the same order."""

    def start(self, index: int, fill: Callable[[], None] | None = None) -> Pending:
        """Begin to sum buffer `index`; nobody touches it until it has been waited for.

        `fill` fills the buffer first, at once or in another thread; without it the buffer is filled.
        """
        ...


@dataclass(frozen=True)
class Spec:
    """What a buffer holds."""

    count: int
    dtype: torch.dtype
    device: torch.device

    @property
    def size_bytes(self) -> int:
        return self.count * self.dtype.itemsize


@dataclass(frozen=True)
class Members:
    """The workers that sum together, as one of them sees them.

    `ranks` are those of the world in the topology's order and `hosts` their hosts; `group` is theirs (None:
    the world's). Two sets of sums over one group need different `lane`s.
    """

    rank: int
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    group: dist.ProcessGroup | None = None
    deadline_s: float = 300.0
    lane: int = 0

    @property
    def place(self) -> int:
        """This worker's rank in the topology."""
        return self.ranks.index(self.rank)


def whole_world(host: str, deadline_s: float) -> Members:
    """All workers as members; every rank calls it with the name of its own host."""
    hosts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(hosts, host)
    return Members(dist.get_rank(), tuple(range(len(hosts))), tuple(hosts), None, deadline_s)


class Native:
    """The backend's own all-reduce."""

    def __init__(self, buffers: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
        self._buffers = buffers
        self._group = group

    def start(self, index: int, fill: Callable[[], None] | None = None) -> Pending:
        if fill is not None:
            fill()
        work: dist.Work = dist.all_reduce(self._buffers[index], group=self._group, async_op=True)
        return work
