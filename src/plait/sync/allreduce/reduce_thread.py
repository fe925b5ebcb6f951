"""The engine of an all-reduce over a topology: one thread that moves pieces along the routes as they come.

Every arrival sets off what waits for it. Within a host, sums are added and results copied straight out of
the memory of the worker that has them; between hosts, pieces travel by gloo. A rank adds the sums of its
children in the topology's order and the root's result is copied as it is, so all have the same bits, and
every run the same.
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
from plait.sync.allreduce.remote_stream import RemoteStream, tag_of
from plait.sync.allreduce.sums import Members

REDUCE, BROADCAST = 0, 1
# The topic of the word that a near peer has read all results of a job.
_READ = -1


@dataclass
class Reduction:
    """One buffer to sum: this rank's `flat` lies `offset` bytes into its region, as on every rank."""

    flat: Tensor
    offset: int
    # Brings the content here, where it is elsewhere.
    fetch: Callable[[], None] | None = None
    number: int = -1
    pieces: int = 0
    sends: list[dist.Work] = field(default_factory=list)
    readers: set[int] = field(default_factory=set)
    to_copy: Counter[int] = field(default_factory=Counter)
    done: threading.Event = field(default_factory=threading.Event)


@dataclass
class _Piece:
    job: Reduction
    number: int
    view: Tensor
    begin: int
    end: int
    added: int = 0


class _Lane:
    """A route as one rank sees it: what it waits for, and what has come."""

    def __init__(self, route: Route, rank: int) -> None:
        self.reduce_children = route.reduce_children(rank)
        self.reduce_parent = route.reduce_parent(rank)
        self.broadcast_parent = route.broadcast_parent(rank)
        self.broadcast_children = route.broadcast_children(rank)
        self.count = 0
        self.reducing: deque[_Piece] = deque()
        self.receiving: deque[_Piece] = deque()
        # What has come from whom: None for a piece to be read where it lies.
        self.sums: dict[int, deque[Tensor | None]] = {child: deque() for child in self.reduce_children}
        self.results: deque[Tensor | None] = deque()
        self.noticed: Counter[tuple[int, int]] = Counter()

    def awaited(self) -> tuple[int, str] | None:
        """Which peer this rank waits for on this lane, if any, and for what."""
        if self.reducing:
            return self.reduce_children[self.reducing[0].added], "its sum"
        if self.receiving:
            assert self.broadcast_parent is not None
            return self.broadcast_parent, "the result"
        return None


class ReduceThread(threading.Thread):
    """Runs jobs along a topology. Ranks here are places in the topology; `near` are those of this host."""

    def __init__(
        self,
        members: Members,
        near: Mapping[int, LocalPeer],
        most: int = MOST_BYTES,
        least: int = LEAST_BYTES,
    ) -> None:
        super().__init__(name="plait-all-reduce", daemon=True)
        self._members = members
        self._near = dict(near)
        self._most, self._least = most, least
        self._poller = Poller(near)
        self._asked: deque[Callable[[], None]] = deque()
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
        """Begin a job; from any thread. All ranks give the same ones in the same order."""
        self._ask(lambda: self._begin(job))

    def use(self, topology: Topology) -> None:
        """Send the jobs that follow along `topology`; all ranks say so between the same two jobs."""
        self._ask(lambda: self._install(topology))

    def close(self) -> None:
        """End the thread; all jobs are done."""

        def end() -> None:
            self._closed = True

        self._ask(end)

    def fail(self, failure: BaseException) -> None:
        """End the thread, and all waits for a job of it, with `failure`; may be called from any thread."""

        def end() -> None:
            raise failure

        self._ask(end)

    def wait(self, job: Reduction) -> None:
        """Return when the job is done, or raise what went wrong."""
        # The engine has a deadline and names whom it waits for; it may have failed before it saw the job.
        while not job.done.wait(1.0) and self.failure is None:
            pass
        if self.failure is not None:
            raise self.failure
        for work in job.sends:
            work.wait(timedelta(seconds=self._members.deadline_s))

    def _ask(self, what: Callable[[], None]) -> None:
        """Have the engine's thread do something when it comes to it."""
        self._asked.append(what)
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
            # After a failure the others must not take this end for one on purpose.
            for peer in self._near.values() if self.failure is None else ():
                peer.close()
            self._poller.close()

    def _turn(self) -> None:
        """Wait for whatever comes next and do what it allows."""
        for place in self._poller.wait(self._seconds_left()):
            peer = self._near[place]
            for _, topic, number, _, _ in peer.notices():
                self._handle(place, topic, number)
            if peer.lost or peer.ended:
                self._poller.forget(peer)
        while self._asked:
            self._asked.popleft()()
        left = self._seconds_left()
        if left is not None:
            gone = any(peer.lost or peer.ended for peer in self._near.values())
            if gone or left <= 0:
                self._complain(late=left <= 0)

    def _seconds_left(self) -> float | None:
        return self._moved + self._members.deadline_s - time.monotonic() if self._jobs else None

    def _complain(self, late: bool) -> None:
        """Name the peer that a job waits for in vain, if one does."""
        ranks, own = self._members.ranks, self._members.rank
        for place, peer in self._near.items():
            if peer.lost:
                raise PeerError(
                    f"worker {ranks[place]} is gone while worker {own} summed gradients with it; look at the "
                    f"log of worker {ranks[place]}",
                    LostPeer.GONE,
                    ranks[place],
                )
        for place, what in filter(None, (lane.awaited() for lane in self._lanes)):
            if late:
                raise PeerError(
                    f"worker {own} waited {self._members.deadline_s:g} s for worker {ranks[place]} to give "
                    f"{what}; it hangs, or is slower than parallel.timeout_s allows",
                    LostPeer.SILENT,
                    ranks[place],
                )
            if place in self._near and self._near[place].ended:
                raise PeerError(
                    f"worker {own} waited for {what} of worker {ranks[place]}, which has ended",
                    LostPeer.GONE,
                    ranks[place],
                )
        if late:
            readers = sorted({ranks[place] for job in self._jobs.values() for place in job.readers})
            raise PeerError(
                f"worker {own} waited {self._members.deadline_s:g} s for workers {readers} to read the "
                f"result",
                LostPeer.SILENT,
                readers[0] if readers else None,
            )

    def _install(self, topology: Topology) -> None:
        assert not self._jobs
        self._epoch += 1
        self._lanes = [_Lane(route, self._members.place) for route in topology.routes]
        self._loads = [0] * len(self._lanes)
        for stream in self._streams.values():
            stream.end()
        self._streams = {}
        for route, lane in enumerate(self._lanes):
            sources = [(child, REDUCE) for child in lane.reduce_children]
            sources += [(lane.broadcast_parent, BROADCAST)] if lane.broadcast_parent is not None else []
            for peer, phase in sources:
                if peer not in self._near:
                    self._streams[peer, route, phase] = self._open(peer, route, phase)
        early, self._early = self._early, []
        for place, topic, number in early:
            self._handle(place, topic, number)

    def _open(self, peer: int, route: int, phase: int) -> RemoteStream:
        def arrived(memory: Tensor) -> None:
            self._ask(lambda: self._arrive(peer, route, phase, memory))

        def failed(failure: Exception) -> None:
            def fail() -> None:
                raise failure

            self._ask(fail)

        stream = RemoteStream(self._members, peer, tag_of(self._members, route, phase), arrived, failed)
        stream.start()
        return stream

    def _handle(self, place: int, topic: int, number: int) -> None:
        """Take a near peer's word: it has read a job's results, or has a piece ready."""
        self._moved = time.monotonic()
        if topic == _READ:
            job = self._jobs[number]
            job.readers.discard(place)
            self._finish(job)
            return
        epoch, route, phase = topic >> 32, (topic & 0xFFFFFFFF) >> 1, topic & 1
        if epoch != self._epoch:
            # The peer has changed to the next topology already.
            self._early.append((place, topic, number))
            return
        lane = self._lanes[route]
        if number != lane.noticed[phase, place]:
            raise PlaitError(
                f"worker {self._members.ranks[place]} announced piece {number} of route {route}, expected "
                f"{lane.noticed[phase, place]}; the workers sum different buffers"
            )
        lane.noticed[phase, place] += 1
        self._arrive(place, route, phase, None)

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
        job.pieces = len(cuts)
        for cut in cuts:
            self._loads[cut.route] += (cut.stop - cut.start) * size
            lane = self._lanes[cut.route]
            begin, end = job.offset + cut.start * size, job.offset + cut.stop * size
            piece = _Piece(job, lane.count, job.flat[cut.start : cut.stop], begin, end)
            lane.count += 1
            lane.reducing.append(piece)
            self._expect(piece, cut.route)
        least = min(self._loads, default=0)
        self._loads = [load - least for load in self._loads]
        for route in sorted({cut.route for cut in cuts}):
            self._advance(route)
        self._finish(job)

    def _expect(self, piece: _Piece, route: int) -> None:
        """Note who will read this piece from here, and where it is to come from."""
        lane, job = self._lanes[route], piece.job
        job.readers.update(child for child in lane.broadcast_children if child in self._near)
        if lane.broadcast_parent in self._near:
            assert lane.broadcast_parent is not None
            job.to_copy[lane.broadcast_parent] += 1
        elif lane.broadcast_parent is not None:
            into = piece.view.view(torch.uint8)
            self._streams[lane.broadcast_parent, route, BROADCAST].want(piece.end - piece.begin, into)
        for child in lane.reduce_children:
            if child not in self._near:
                self._streams[child, route, REDUCE].want(piece.end - piece.begin, None)

    def _arrive(self, place: int, route: int, phase: int, memory: Tensor | None) -> None:
        self._moved = time.monotonic()
        lane = self._lanes[route]
        (lane.sums[place] if phase == REDUCE else lane.results).append(memory)
        self._advance(route)

    def _advance(self, route: int) -> None:
        """Do all that this lane's arrivals allow."""
        lane = self._lanes[route]
        while lane.reducing and self._add(lane, lane.reducing[0], route):
            piece = lane.reducing.popleft()
            if lane.reduce_parent is None:
                self._pass_on(lane, piece, route)
            else:
                lane.receiving.append(piece)
                self._send(lane.reduce_parent, route, REDUCE, piece)
        while lane.receiving and lane.results:
            piece, memory = lane.receiving.popleft(), lane.results.popleft()
            if memory is None:
                self._copy(lane, piece)
            self._pass_on(lane, piece, route)

    def _add(self, lane: _Lane, piece: _Piece, route: int) -> bool:
        """Add the sums of those children that have come; whether these were all."""
        while piece.added < len(lane.reduce_children):
            child = lane.reduce_children[piece.added]
            if not lane.sums[child]:
                return False
            memory = lane.sums[child].popleft()
            if memory is None:
                piece.view.add_(self._look(child, piece))
            else:
                size = piece.end - piece.begin
                piece.view.add_(memory[:size].view(piece.view.dtype))
                self._streams[child, route, REDUCE].give_back(memory)
            piece.added += 1
        return True

    def _look(self, place: int, piece: _Piece) -> Tensor:
        """The piece as it lies in a near peer's memory."""
        region = self._near[place].region
        assert region is not None
        return region[piece.begin : piece.end].view(piece.view.dtype)

    def _copy(self, lane: _Lane, piece: _Piece) -> None:
        assert lane.broadcast_parent is not None
        piece.view.copy_(self._look(lane.broadcast_parent, piece))
        left = piece.job.to_copy
        left[lane.broadcast_parent] -= 1
        if left[lane.broadcast_parent] == 0:
            self._near[lane.broadcast_parent].announce(_READ, piece.job.number)

    def _pass_on(self, lane: _Lane, piece: _Piece, route: int) -> None:
        for child in lane.broadcast_children:
            self._send(child, route, BROADCAST, piece)
        piece.job.pieces -= 1
        self._finish(piece.job)

    def _send(self, place: int, route: int, phase: int, piece: _Piece) -> None:
        if place in self._near:
            self._near[place].announce(self._epoch << 32 | route << 1 | phase, piece.number)
            return
        members = self._members
        tag = tag_of(members, route, phase)
        flat = piece.view.view(torch.uint8)
        work = dist.isend(flat, members.ranks[place], group=members.group, tag=tag)
        assert work is not None
        piece.job.sends.append(work)

    def _finish(self, job: Reduction) -> None:
        if job.pieces == 0 and not job.readers and job.number in self._jobs:
            del self._jobs[job.number]
            job.done.set()


def layout(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where buffers of these sizes lie in a region, and how large it is; the same on every rank."""
    offsets, place = [], 0
    for size in sizes:
        offsets.append(place)
        place += -(-size // 64) * 64
    return offsets, place
