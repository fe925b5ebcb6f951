"""Reducers: how a buffer that every worker has filled becomes the sum of all of them, in place."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from plait.comm.rendezvous import Rendezvous

# How often a wait that may be ended looks whether it is over.
LOOK_S = 0.0005


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

    `ranks` are those of the world in the topology's order; `group` is theirs (None: the world's). Two sets of
    sums over one group need different `lane`s.
    """

    rendezvous: Rendezvous
    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None = None
    lane: int = 0

    @property
    def rank(self) -> int:
        return self.rendezvous.rank

    @property
    def hosts(self) -> tuple[str, ...]:
        """The host of each, in the topology's order."""
        return tuple(self.rendezvous.hosts[rank] for rank in self.ranks)

    @property
    def deadline_s(self) -> float:
        return self.rendezvous.timeout_s

    @property
    def place(self) -> int:
        """This worker's rank in the topology."""
        return self.ranks.index(self.rank)


def whole_world(rendezvous: Rendezvous) -> Members:
    """All workers as members."""
    return Members(rendezvous, tuple(range(len(rendezvous.hosts))))


class Native:
    """The backend's own all-reduce."""

    def __init__(
        self,
        buffers: Sequence[Tensor],
        group: dist.ProcessGroup | None,
        check: Callable[[], None] | None = None,
    ) -> None:
        self._buffers = buffers
        self._group = group
        self._check = check

    def start(self, index: int, fill: Callable[[], None] | None = None) -> Pending:
        if fill is not None:
            fill()
        work: dist.Work = dist.all_reduce(self._buffers[index], group=self._group, async_op=True)
        return work if self._check is None else _CheckedWork(work, self._check)


@dataclass(frozen=True)
class _CheckedWork:
    """A sum whose wait ends where `check` raises; the backend itself may wait for a lost peer for ever."""

    work: dist.Work
    check: Callable[[], None]

    def wait(self) -> None:
        while not self.work.is_completed():
            self.check()
            time.sleep(LOOK_S)
        self.work.wait()
