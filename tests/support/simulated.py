"""Workers in a simulation: a store, mailboxes and leases in one process, in any order that a seed gives.

The code under test runs as it is, one thread a worker, of which one runs at a time. Before each word with the
store or a mailbox the simulation chooses who goes on, and may stop a worker for a while, or kill it. Time is
simulated: a thousand seconds pass in a moment, and a wait without end is found at once.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from plait.comm.links.packing import Content, Message

BEATS = 5
WINDOW = 8


class DictStore:
    """What a TCPStore does, in one process; `before` is called with each operation and its key."""

    def __init__(self, before: Callable[[str, str], None] = lambda operation, key: None) -> None:
        self.values: dict[str, bytes] = {}
        self._before = before

    def set(self, key: str, value: str) -> None:
        self._before("set", key)
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        self._before("get", key)
        # A real store would wait for the key, and then give up.
        return self.values[key]

    def add(self, key: str, amount: int) -> int:
        self._before("add", key)
        self.values[key] = str(int(self.values.get(key, b"0")) + amount).encode()
        return int(self.values[key])

    def check(self, keys: Sequence[str]) -> bool:
        self._before("check", keys[0])
        return all(key in self.values for key in keys)

    def compare_set(self, key: str, expected: str, wanted: str) -> bytes:
        self._before("compare_set", key)
        if key not in self.values and expected:
            return expected.encode()
        if self.values.get(key, b"") == expected.encode():
            self.values[key] = wanted.encode()
        return self.values[key]

    def delete_key(self, key: str) -> bool:
        self._before("delete_key", key)
        return self.values.pop(key, None) is not None


class Hang(AssertionError):
    """Some workers wait without end."""


class _Killed(BaseException):
    """Ends the thread of a worker that was killed."""


@dataclass
class _Packet:
    arrives: float
    channel: int
    content: Content


@dataclass(eq=False)
class SimulatedWorker:
    """One worker: what its code is given, and how it stands."""

    simulation: Simulation
    rank: int
    skew_s: float = 0.0
    store: Any = None
    mailbox: Any = None
    presence: Any = None
    wakes: float = 0.0
    waits_for_mail: bool = False
    stopped_until: float = -1.0
    next_beat: float = 0.0
    has_beaten: bool = True
    killed: bool = False
    result: Any = None
    failure: BaseException | None = None
    where: str = ""
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    thread: threading.Thread | None = None

    def now(self) -> float:
        """This worker's own clock."""
        return self.simulation.now + self.skew_s

    def sleep(self, seconds: float) -> None:
        self.simulation.switch(self, "sleep", self.simulation.now + seconds)


class Simulation:
    """A world of `size` workers whose order, delays and disturbances follow from `seed`.

    Before each step of a worker, with `stop_chance` it is stopped for one of `stops_s`; one worker at most is
    killed, with `kill_chance`. `message_s` is the range of a message's delay, `skews_s` the workers' clocks.
    """

    def __init__(
        self,
        size: int,
        seed: int,
        *,
        lease_s: float = 5.0,
        message_s: tuple[float, float] = (0.0001, 0.003),
        stop_chance: float = 0.0,
        stops_s: Sequence[float] = (2.0,),
        kill_chance: float = 0.0,
        skews_s: Sequence[float] = (),
        limit_s: float = 2000.0,
    ) -> None:
        self.now = 0.0
        self.random = random.Random(seed)
        self.lease_s = lease_s
        self.stops = 0
        self._message_s = message_s
        self._stop_chance, self._stops_s, self._kill_chance = stop_chance, stops_s, kill_chance
        self._limit_s = limit_s
        self._main = threading.Semaphore(0)
        self.values = DictStore()
        self.packets: dict[tuple[int, int], deque[_Packet]] = defaultdict(deque)
        self.beats = [0] * size
        skews = [*skews_s, *[0.0] * size][:size]
        self.workers = [SimulatedWorker(self, rank, skew) for rank, skew in zip(range(size), skews)]
        for worker in self.workers:
            worker.store = _Store(self, worker)
            worker.mailbox = SimulatedMail(self, worker)
            worker.presence = SimulatedPresence(self, worker)

    def run(self, body: Callable[[SimulatedWorker], Any]) -> list[Any]:
        """What `body` returned for each worker; None of one that was killed. The first to fail ends it."""
        for worker in self.workers:
            worker.thread = threading.Thread(target=self._body, args=(worker, body), daemon=True)
            worker.thread.start()
        try:
            while self._living():
                self._turn()
                for worker in self.workers:
                    if worker.failure is not None:
                        raise worker.failure
        finally:
            self._end_all()
        return [worker.result for worker in self.workers]

    def switch(self, worker: SimulatedWorker, where: str, wakes: float, for_mail: bool = False) -> None:
        """Let others go on; `worker` does so itself at time `wakes`, or when a message has come."""
        if worker.killed:
            raise _Killed
        worker.where, worker.wakes, worker.waits_for_mail = where, wakes, for_mail
        self._main.release()
        worker.turn.acquire()
        if worker.killed:
            raise _Killed

    def send(self, source: int, target: int, channel: int, content: Content) -> None:
        queue = self.packets[source, target]
        before = queue[-1].arrives if queue else 0.0
        arrives = max(before, self.now + self.random.uniform(*self._message_s))
        queue.append(_Packet(arrives, channel, content))

    def is_dead(self, rank: int) -> bool:
        return self.workers[rank].thread is None

    def _body(self, worker: SimulatedWorker, body: Callable[[SimulatedWorker], Any]) -> None:
        worker.turn.acquire()
        try:
            if not worker.killed:
                worker.result = body(worker)
        except _Killed:
            pass
        except BaseException as failure:
            worker.failure = failure
        worker.thread = None
        self._main.release()

    def _turn(self) -> None:
        for worker in self._living():
            if worker.next_beat <= self.now and worker.stopped_until <= self.now:
                worker.presence.beat()
                worker.has_beaten = True
                worker.next_beat = self.now + self.lease_s / BEATS
        able = [worker for worker in self._living() if self._is_able(worker)]
        if not able:
            self._advance()
            return
        worker = self.random.choice(able)
        self.now += self.random.uniform(0.0, 0.0002)
        # Its lease is renewed between two stops, so that these do not add up.
        if worker.has_beaten and self.random.random() < self._stop_chance:
            worker.has_beaten = False
            self.stops += 1
            worker.stopped_until = self.now + self.random.choice(self._stops_s)
            worker.next_beat = worker.stopped_until + self.random.uniform(0, self.lease_s / BEATS)
            return
        if self.random.random() < self._kill_chance:
            self._kill_chance = 0.0
            worker.killed = True
        worker.turn.release()
        self._main.acquire()

    def _living(self) -> list[SimulatedWorker]:
        return [worker for worker in self.workers if worker.thread is not None]

    def _is_able(self, worker: SimulatedWorker) -> bool:
        if worker.stopped_until > self.now:
            return False
        return worker.wakes <= self.now or (worker.waits_for_mail and self._next_mail(worker) <= self.now)

    def _next_mail(self, worker: SimulatedWorker) -> float:
        queues = [self.packets[other.rank, worker.rank] for other in self.workers]
        news = [queue[0].arrives for queue in queues if queue]
        if any(self.is_dead(peer) and not worker.mailbox.is_gone(peer) for peer in worker.mailbox.peers()):
            news.append(self.now)
        return min(news, default=float("inf"))

    def _advance(self) -> None:
        """Nobody can go on now: let time pass until someone can."""
        times = [worker.next_beat for worker in self._living() if worker.stopped_until <= self.now]
        for worker in self._living():
            news = self._next_mail(worker) if worker.waits_for_mail else float("inf")
            times.append(max(worker.stopped_until, min(worker.wakes, news)))
        self.now = min(t for t in times if t > self.now)
        if self.now > self._limit_s:
            waits = [f"worker {worker.rank} at {worker.where}" for worker in self._living()]
            raise Hang(f"after {self.now:.0f} simulated seconds: {', '.join(waits)}")

    def _end_all(self) -> None:
        for worker in self._living():
            thread = worker.thread
            worker.killed = True
            worker.turn.release()
            if thread is not None:
                thread.join(10.0)


class _Store:
    """The store as one worker reaches it: each operation is a moment at which others may go first."""

    def __init__(self, simulation: Simulation, worker: SimulatedWorker) -> None:
        self._simulation = simulation
        self._worker = worker

    def __getattr__(self, name: str) -> Callable[..., Any]:
        operation = getattr(self._simulation.values, name)

        def call(*args: Any) -> Any:
            self._simulation.switch(self._worker, f"{name} {args[0]}", self._simulation.now)
            return operation(*args)

        return call


class SimulatedMail:
    """A mailbox as `Mailbox` is one: a worker that waits or sends sees what has come."""

    def __init__(self, simulation: Simulation, worker: SimulatedWorker) -> None:
        self.rank = worker.rank
        self.bytes_sent = 0
        self.refused = 0
        self._simulation = simulation
        self._worker = worker
        self._arrived: dict[tuple[int, int], deque[Message]] = defaultdict(deque)
        self._under_way: dict[tuple[int, int], int] = defaultdict(int)
        self._gone: set[int] = set()

    def release(self, peer: int, channel: int) -> None:
        """The peer has released a message of the channel."""
        self._under_way[peer, channel] -= 1

    def peers(self) -> list[int]:
        return [worker.rank for worker in self._simulation.workers if worker.rank != self.rank]

    def send(
        self, peer: int, channel: int, number: int, tensors: Sequence[Tensor | None], note: str = ""
    ) -> bool:
        self._simulation.switch(self._worker, f"send {number} to {peer}", self._simulation.now)
        self._read()
        if self.is_gone(peer):
            return False
        if self._under_way[peer, channel] >= WINDOW:
            self.refused += 1
            return False
        self._under_way[peer, channel] += 1
        copied = tuple(None if t is None else t.detach().clone() for t in tensors)
        self._simulation.send(self.rank, peer, channel, Content(number, copied, note))
        return True

    def take(self, peer: int, channel: int) -> Message | None:
        arrived = self._arrived[peer, channel]
        return arrived.popleft() if arrived else None

    def is_gone(self, peer: int) -> bool:
        return peer in self._gone

    def wait(self, seconds: float) -> None:
        simulation = self._simulation
        simulation.switch(self._worker, "wait for messages", simulation.now + seconds, for_mail=True)
        self._read()

    def close(self) -> None:
        pass

    def _read(self) -> None:
        for peer in self.peers():
            queue = self._simulation.packets[peer, self.rank]
            while queue and queue[0].arrives <= self._simulation.now:
                packet = queue.popleft()
                self._arrived[peer, packet.channel].append(self._message(peer, packet))
            if not queue and self._simulation.is_dead(peer):
                self._gone.add(peer)

    def _message(self, peer: int, packet: _Packet) -> Message:
        sender = self._simulation.workers[peer].mailbox

        def release() -> None:
            sender.release(self.rank, packet.channel)

        return Message(packet.content, release)


class SimulatedPresence:
    """Leases, beaten by the simulation while a worker is not stopped."""

    def __init__(self, simulation: Simulation, worker: SimulatedWorker) -> None:
        size = len(simulation.beats)
        self.members = tuple(range(size))
        self._simulation = simulation
        self._worker = worker
        self._last_seen_s = [0.0] * size
        self._words = [-1] * size
        self._looked = 0.0

    def living(self) -> tuple[int, ...]:
        now, lease_s = self._simulation.now, self._simulation.lease_s
        judges = now - self._looked < 3 * lease_s / BEATS
        rank = self._worker.rank
        return tuple(
            other
            for other in self.members
            if other == rank or not (judges and now - self._last_seen_s[other] > lease_s)
        )

    def lost(self) -> set[int]:
        return set(self.members) - set(self.living())

    def close(self) -> None:
        pass

    def beat(self) -> None:
        simulation = self._simulation
        simulation.beats[self._worker.rank] += 1
        paused = simulation.now - self._looked > 3 * simulation.lease_s / BEATS
        self._looked = simulation.now
        for other, word in enumerate(simulation.beats):
            if paused or self._words[other] != word:
                self._last_seen_s[other] = simulation.now
            self._words[other] = word


@contextlib.contextmanager
def changed(module: Any, **values: Any) -> Iterator[None]:
    """Constants of a module, changed for a while."""
    before = {name: getattr(module, name) for name in values}
    for name, value in values.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)
