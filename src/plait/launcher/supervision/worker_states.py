"""What is known of the workers of a launch, and of its coordinator."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from plait.launcher import messages
from plait.launcher.display import WorkerState
from plait.launcher.failure_cause import RankState
from plait.launcher.messages import COORDINATOR, Failure
from plait.schema.hosts import Host

# What a worker in trouble, or the agent of its host, reports.
Trouble = Failure | messages.WorkerSilence | messages.WorkerEnd


class WorkerStates:
    """The states by the numbers of the workers, which are not used again, and what the workers returned."""

    def __init__(self, hosts: Sequence[Host], has_coordinator: bool) -> None:
        names = [host.name for host in hosts for _ in range(host.slots)]
        self.ranks = [RankState(rank, host) for rank, host in enumerate(names)]
        self.coordinator = RankState(COORDINATOR, names[0]) if has_coordinator else None
        self.results: dict[int, Any] = {}
        self._signs = 0

    def __getitem__(self, rank: int) -> RankState:
        if rank != COORDINATOR:
            return self.ranks[rank]
        assert self.coordinator is not None
        return self.coordinator

    def __iter__(self) -> Iterator[RankState]:
        yield from self.ranks
        if self.coordinator is not None:
            yield self.coordinator

    def add(self, worker: int, host: str) -> None:
        assert worker == len(self.ranks)
        self.ranks.append(RankState(worker, host))

    def record_pids(self, pids: Mapping[int, int]) -> None:
        for rank, pid in pids.items():
            self.ranks[rank].pid = pid

    def record_trouble(self, sign: Trouble) -> bool:
        """Record a worker's failure report, its missing heartbeat, or its end; whether it is the first."""
        state = self[sign.rank]
        match sign:
            case Failure():
                state.failure = sign
            case messages.WorkerEnd():
                state.status = sign.status
            case messages.WorkerSilence():
                state.silent_s = sign.seconds
        if state.done or state.trouble_index is not None:
            return False
        self._signs += 1
        state.trouble_index = self._signs
        return True

    def shown(self, ranks: Iterable[int]) -> tuple[WorkerState, ...]:
        """The workers for a display."""
        return tuple(WorkerState(s.rank, s.host, s.pid or 0) for s in (self.ranks[rank] for rank in ranks))
