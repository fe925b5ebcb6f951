"""Reducers: sum a buffer over all workers, in place."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from plait.comm.data_group import DataGroup
from plait.comm.rendezvous import Rendezvous

# The polling interval of waits that may be interrupted.
LOOK_S = 0.0005


# Waits until the buffer of a sum that was started holds it.
WaitForSum = Callable[[], object]


class Reducer(Protocol):
    """Sums the buffers of an all-reduce; all workers start the same ones in the same order."""

    def start(self, index: int, fill: Callable[[], None] | None = None) -> WaitForSum:
        """Start the sum of buffer `index`, which must not be used until the returned function has waited.

        `fill` is called first, at once or in another thread, to fill the buffer; None if it is filled.
        """
        ...


@dataclass(frozen=True)
class Spec:
    """The number of elements, the type and the device of a buffer."""

    count: int
    dtype: torch.dtype
    device: torch.device

    @property
    def size_bytes(self) -> int:
        return self.count * self.dtype.itemsize


@dataclass(frozen=True)
class Members:
    """The workers that sum together, from the point of view of one of them.

    `ranks` are their ranks in the world, in the topology's order; `group` is their process group (None: the
    world). Two sets of sums over one group at a time need different `lane`s.
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
        """The host of each member, in the topology's order."""
        return tuple(self.rendezvous.hosts[rank] for rank in self.ranks)

    @property
    def deadline_s(self) -> float:
        return self.rendezvous.timeout_s

    @property
    def group_rank(self) -> int:
        """This worker's rank in the topology: its index in `ranks`."""
        return self.ranks.index(self.rank)


def whole_world(rendezvous: Rendezvous) -> Members:
    """All workers as members."""
    return Members(rendezvous, tuple(range(len(rendezvous.hosts))))


class Native:
    """The backend's own all-reduce: that of `group`, or of `data` if given."""

    def __init__(
        self,
        buffers: Sequence[Tensor],
        group: dist.ProcessGroup | None,
        check: Callable[[], None] | None = None,
        data: DataGroup | None = None,
    ) -> None:
        self._buffers = buffers
        self._group = group
        self._check = check
        self._data = data

    def start(self, index: int, fill: Callable[[], None] | None = None) -> WaitForSum:
        if fill is not None:
            fill()
        if self._data is not None:
            return self._data.all_reduce(self._buffers[index])
        work: dist.Work = dist.all_reduce(self._buffers[index], group=self._group, async_op=True)
        return work.wait if self._check is None else partial(_wait_checked, work, self._check)


def _wait_checked(work: dist.Work, check: Callable[[], None]) -> None:
    """Wait, calling `check`, which may raise; the backend may wait for a lost peer forever."""
    while not work.is_completed():
        check()
        time.sleep(LOOK_S)
    work.wait()
