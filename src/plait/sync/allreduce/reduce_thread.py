"""The thread of an all-reduce over a topology: it forwards chunks along the routes as they arrive.

Within a host, sums are added and results copied directly from the memory of the worker that has them; between
hosts, chunks are sent by gloo. A rank adds the sums of its children in the topology's order, and the root's
result is copied, so all workers have the same bits, in every run.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from plait.comm.links.shm_regions import LocalPeer, Poller
from plait.core.errors import LostPeer, PeerError, PlaitError
from plait.schema.topology import Route, Topology
from plait.sync.allreduce.chunking import LEAST_BYTES, MOST_BYTES, cut_buffer
from plait.sync.allreduce.reducers import Members
from plait.sync.allreduce.remote_stream import RemoteStream, tag_of

REDUCE, BROADCAST = 0, 1
# The topic of the notice that a local peer has read all results of a job.
_READ = -1


@dataclass
class Reduction:
    """One buffer to sum: `flat` is `offset` bytes into this rank's region, the same on every rank."""

    flat: Tensor
    offset: int
    # Fills `flat` first, if given.
    fetch: Callable[[], None] | None = None
    number: int = -1
    chunks: int = 0
    sends: list[dist.Work] = field(default_factory=list)
    readers: set[int] = field(default_factory=set)
    to_copy: Counter[int] = field(default_factory=Counter)
    done: threading.Event = field(default_factory=threading.Event)


@dataclass
class _ChunkState:
    job: Reduction
    number: int
    view: Tensor
    begin: int
    end: int
    added: int = 0


class _Lane:
    """A route from the point of view of one rank: the chunks it waits for, and those that have arrived."""

    def __init__(self, route: Route, rank: int) -> None:
        self.reduce_children = route.reduce_children(rank)
        self.reduce_parent = route.reduce_parent(rank)
        self.broadcast_parent = route.broadcast_parent(rank)
        self.broadcast_children = route.broadcast_children(rank)
        self.count = 0
        self.reducing: deque[_ChunkState] = deque()
        self.receiving: deque[_ChunkState] = deque()
        # Arrived chunks by sender; None for a chunk to be read from the sender's memory.
        self.sums: dict[int, deque[Tensor | None]] = {child: deque() for child in self.reduce_children}
        self.results: deque[Tensor | None] = deque()
        self.noticed: Counter[tuple[int, int]] = Counter()

    def awaited(self) -> tuple[int, str] | None:
        """The peer that this rank waits for on this lane, and for what; None if there is none."""
        if self.reducing:
            return self.reduce_children[self.reducing[0].added], "its sum"
        if self.receiving:
            assert self.broadcast_parent is not None
            return self.broadcast_parent, "the result"
        return None


class ReduceThread(threading.Thread):
    """Runs jobs along a topology. Peers are named by their ranks in it; `local` has those of this host."""

    def __init__(
        self,
        members: Members,
        local: Mapping[int, LocalPeer],
        most: int = MOST_BYTES,
        least: int = LEAST_BYTES,
    ) -> None:
        super().__init__(name="plait-all-reduce", daemon=True)
        self._members = members
        self._local = dict(local)
        self._most, self._least = most, least
        self._poller = Poller(local)
        self._calls: deque[Callable[[], None]] = deque()
        self._lanes: list[_Lane] = []
        self._loads: list[int] = []
        self._streams: dict[tuple[int, int, int], RemoteStream] = {}
        self._epoch = -1
        self._early: list[tuple[int, int, int]] = []
        self._jobs: dict[int, Reduction] = {}
        self._count = 0
        self._moved = time.monotonic()
        self._closed = False
        self.failure: BaseException | None = None

    def take(self, job: Reduction) -> None:
        """Start a job; may be called from any thread. All ranks start the same jobs in the same order."""
        self._call(lambda: self._begin(job))

    def use(self, topology: Topology) -> None:
        """Run later jobs along `topology`; all ranks call it between the same two jobs."""
        self._call(lambda: self._install(topology))

    def close(self) -> None:
        """End the thread; called when all jobs are done."""

        def end() -> None:
            self._closed = True

        self._call(end)

    def fail(self, failure: BaseException) -> None:
        """End the thread, and all waits for a job of it, with `failure`; may be called from any thread."""

        def end() -> None:
            raise failure

        self._call(end)

    def wait(self, job: Reduction) -> None:
        """Wait until the job is done; raises the thread's error if it has failed."""
        # The thread has a deadline and its error names the peer; it may have failed before it saw the job.
        while not job.done.wait(1.0) and self.failure is None:
            pass
        if self.failure is not None:
            raise self.failure
        for work in job.sends:
            work.wait(timedelta(seconds=self._members.deadline_s))

    def _call(self, what: Callable[[], None]) -> None:
        """Call `what` in the reducing thread."""
        self._calls.append(what)
        self._poller.call()

    def run(self) -> None:
        try:
            while not self._closed:
                self._turn()
        except BaseException as failure:
            self.failure = failure
            for job in list(self._jobs.values()):
                job.done.set()
        finally:
            for stream in self._streams.values():
                stream.end()
            # After a failure the connections stay open: a close would look intended to the others.
            for peer in self._local.values() if self.failure is None else ():
                peer.close()
            self._poller.close()

    def _turn(self) -> None:
        """Wait for the next events and handle them."""
        for index in self._poller.wait(self._seconds_left()):
            peer = self._local[index]
            for _, topic, number, _, _ in peer.notices():
                self._handle(index, topic, number)
            if peer.lost or peer.ended:
                self._poller.forget(peer)
        while self._calls:
            self._calls.popleft()()
        left = self._seconds_left()
        if left is not None:
            gone = any(peer.lost or peer.ended for peer in self._local.values())
            if gone or left <= 0:
                self._raise_if_lost(late=left <= 0)

    def _seconds_left(self) -> float | None:
        return self._moved + self._members.deadline_s - time.monotonic() if self._jobs else None

    def _raise_if_lost(self, late: bool) -> None:
        """Raise a PeerError that names the peer if a job waits for one that is lost or late."""
        ranks, rank = self._members.ranks, self._members.rank
        for index, peer in self._local.items():
            if peer.lost:
                raise PeerError(
                    f"worker {ranks[index]} is gone while worker {rank} summed gradients with it; look at "
                    f"the log of worker {ranks[index]}",
                    LostPeer.GONE,
                    ranks[index],
                )
        for index, what in filter(None, (lane.awaited() for lane in self._lanes)):
            if late:
                raise PeerError(
                    f"worker {rank} waited {self._members.deadline_s:g} s for worker {ranks[index]} to give "
                    f"{what}; it hangs, or is slower than parallel.timeout_s allows",
                    LostPeer.SILENT,
                    ranks[index],
                )
            if index in self._local and self._local[index].ended:
                raise PeerError(
                    f"worker {rank} waited for {what} of worker {ranks[index]}, which has ended",
                    LostPeer.GONE,
                    ranks[index],
                )
        if late:
            readers = sorted({ranks[index] for job in self._jobs.values() for index in job.readers})
            raise PeerError(
                f"worker {rank} waited {self._members.deadline_s:g} s for workers {readers} to read the "
                f"result",
                LostPeer.SILENT,
                readers[0] if readers else None,
            )

    def _install(self, topology: Topology) -> None:
        assert not self._jobs
        self._epoch += 1
        self._lanes = [_Lane(route, self._members.group_rank) for route in topology.routes]
        self._loads = [0] * len(self._lanes)
        for stream in self._streams.values():
            stream.end()
        self._streams = {}
        for route, lane in enumerate(self._lanes):
            sources = [(child, REDUCE) for child in lane.reduce_children]
            sources += [(lane.broadcast_parent, BROADCAST)] if lane.broadcast_parent is not None else []
            for peer, phase in sources:
                if peer not in self._local:
                    self._streams[peer, route, phase] = self._open(peer, route, phase)
        early, self._early = self._early, []
        for index, topic, number in early:
            self._handle(index, topic, number)

    def _open(self, peer: int, route: int, phase: int) -> RemoteStream:
        def arrived(memory: Tensor) -> None:
            self._call(lambda: self._arrive(peer, route, phase, memory))

        stream = RemoteStream(self._members, peer, tag_of(self._members, route, phase), arrived, self.fail)
        stream.start()
        return stream

    def _handle(self, index: int, topic: int, number: int) -> None:
        """Handle a notice of a local peer: it has read a job's results, or has a chunk ready."""
        self._moved = time.monotonic()
        if topic == _READ:
            job = self._jobs[number]
            job.readers.discard(index)
            self._finish(job)
            return
        epoch, route, phase = topic >> 32, (topic & 0xFFFFFFFF) >> 1, topic & 1
        if epoch != self._epoch:
            # The peer has already switched to the next topology.
            self._early.append((index, topic, number))
            return
        lane = self._lanes[route]
        if number != lane.noticed[phase, index]:
            raise PlaitError(
                f"worker {self._members.ranks[index]} announced chunk {number} of route {route}, expected "
                f"{lane.noticed[phase, index]}; the workers sum different buffers"
            )
        lane.noticed[phase, index] += 1
        self._arrive(index, route, phase, None)

    def _begin(self, job: Reduction) -> None:
        if not self._jobs:
            self._moved = time.monotonic()
        if job.fetch is not None:
            job.fetch()
        job.number = self._count
        self._count += 1
        self._jobs[job.number] = job
        size = job.flat.element_size()
        cuts = cut_buffer(job.flat.numel(), size, self._loads, self._most, self._least)
        job.chunks = len(cuts)
        for cut in cuts:
            self._loads[cut.route] += (cut.stop - cut.start) * size
            lane = self._lanes[cut.route]
            begin, end = job.offset + cut.start * size, job.offset + cut.stop * size
            chunk = _ChunkState(job, lane.count, job.flat[cut.start : cut.stop], begin, end)
            lane.count += 1
            lane.reducing.append(chunk)
            self._expect(chunk, cut.route)
        least = min(self._loads, default=0)
        self._loads = [load - least for load in self._loads]
        for route in sorted({cut.route for cut in cuts}):
            self._advance(route)
        self._finish(job)

    def _expect(self, chunk: _ChunkState, route: int) -> None:
        """Register the readers of this chunk, and the receives that it needs."""
        lane, job = self._lanes[route], chunk.job
        job.readers.update(child for child in lane.broadcast_children if child in self._local)
        if lane.broadcast_parent in self._local:
            assert lane.broadcast_parent is not None
            job.to_copy[lane.broadcast_parent] += 1
        elif lane.broadcast_parent is not None:
            into = chunk.view.view(torch.uint8)
            self._streams[lane.broadcast_parent, route, BROADCAST].expect(chunk.end - chunk.begin, into)
        for child in lane.reduce_children:
            if child not in self._local:
                self._streams[child, route, REDUCE].expect(chunk.end - chunk.begin, None)

    def _arrive(self, index: int, route: int, phase: int, memory: Tensor | None) -> None:
        self._moved = time.monotonic()
        lane = self._lanes[route]
        (lane.sums[index] if phase == REDUCE else lane.results).append(memory)
        self._advance(route)

    def _advance(self, route: int) -> None:
        """Process the chunks of this lane as far as their inputs have arrived."""
        lane = self._lanes[route]
        while lane.reducing and self._add(lane, lane.reducing[0], route):
            chunk = lane.reducing.popleft()
            if lane.reduce_parent is None:
                self._pass_on(lane, chunk, route)
            else:
                lane.receiving.append(chunk)
                self._send(lane.reduce_parent, route, REDUCE, chunk)
        while lane.receiving and lane.results:
            chunk, memory = lane.receiving.popleft(), lane.results.popleft()
            if memory is None:
                self._copy(lane, chunk)
            self._pass_on(lane, chunk, route)

    def _add(self, lane: _Lane, chunk: _ChunkState, route: int) -> bool:
        """Add the sums of the children that have arrived; returns whether these are all."""
        while chunk.added < len(lane.reduce_children):
            child = lane.reduce_children[chunk.added]
            if not lane.sums[child]:
                return False
            memory = lane.sums[child].popleft()
            if memory is None:
                chunk.view.add_(self._region_of(child, chunk))
            else:
                size = chunk.end - chunk.begin
                chunk.view.add_(memory[:size].view(chunk.view.dtype))
                self._streams[child, route, REDUCE].return_memory(memory)
            chunk.added += 1
        return True

    def _region_of(self, index: int, chunk: _ChunkState) -> Tensor:
        """The chunk in a local peer's memory."""
        region = self._local[index].region
        assert region is not None
        return region[chunk.begin : chunk.end].view(chunk.view.dtype)

    def _copy(self, lane: _Lane, chunk: _ChunkState) -> None:
        assert lane.broadcast_parent is not None
        chunk.view.copy_(self._region_of(lane.broadcast_parent, chunk))
        left = chunk.job.to_copy
        left[lane.broadcast_parent] -= 1
        if left[lane.broadcast_parent] == 0:
            self._local[lane.broadcast_parent].announce(_READ, chunk.job.number)

    def _pass_on(self, lane: _Lane, chunk: _ChunkState, route: int) -> None:
        for child in lane.broadcast_children:
            self._send(child, route, BROADCAST, chunk)
        chunk.job.chunks -= 1
        self._finish(chunk.job)

    def _send(self, index: int, route: int, phase: int, chunk: _ChunkState) -> None:
        if index in self._local:
            self._local[index].announce(self._epoch << 32 | route << 1 | phase, chunk.number)
            return
        members = self._members
        tag = tag_of(members, route, phase)
        flat = chunk.view.view(torch.uint8)
        work = dist.isend(flat, members.ranks[index], group=members.group, tag=tag)
        assert work is not None
        chunk.job.sends.append(work)

    def _finish(self, job: Reduction) -> None:
        if job.chunks == 0 and not job.readers and job.number in self._jobs:
            del self._jobs[job.number]
            job.done.set()


def layout(sizes: Sequence[int]) -> tuple[list[int], int]:
    """The offsets of buffers of these sizes in a region, and its size; the same on every rank."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // 64) * 64
    return offsets, end
