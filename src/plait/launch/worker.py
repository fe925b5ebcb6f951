"""One worker process: its place in the job, requests to stop, and its report when it fails."""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from plait.comm.groups import WorldConnections, join_world
from plait.comm.handshake import Address
from plait.comm.rendezvous import Rendezvous
from plait.comm.store import StoreClient, StoreTimeout
from plait.core.codec import decode
from plait.core.errors import InputError, LostPeer, PeerError, PlaitError
from plait.core.logs import hand_on_warnings
from plait.core.names import resolve
from plait.launch import messages
from plait.launch.lines import LineBuffer
from plait.launch.membership import Membership, Memberships
from plait.launch.messages import (
    COORDINATOR,
    CoordinatorAnswer,
    CoordinatorQuestion,
    Failure,
    JobMessage,
    WorkerOrder,
    from_line,
    to_line,
)

BEAT_S = 0.5
# Signs of life in the time after which a worker counts as silent.
BEATS = 5
# How often a wait in the store looks whether a member was lost.
LOOK_S = 0.1
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
# Torch's errors have no class of their own for a peer that is gone or silent, only words.
_TORCH_GONE = ("Connection closed by peer", "Connection reset", "Broken pipe", "NCCL error")
_TORCH_SILENT = ("Timed out waiting", "timed out", "Timeout")


class JobStore(dist.Store):
    """The job's store with the face that torch's process groups know: all its keys, or those below `prefix`.

    A wait of one that has a `check`, which raises when a member is lost, ends then: nobody would set the key.
    """

    def __init__(
        self, client: StoreClient, prefix: str = "", check: Callable[[], None] | None = None
    ) -> None:
        super().__init__()
        self._client = client
        self._prefix = prefix
        self._check = check
        self.address = client.address.text

    def set(self, key: str, value: str | bytes) -> None:
        self._client.set(self._prefix + key, value)

    def get(self, key: str) -> bytes:
        if self._check is not None:
            self.wait([key])
        return self._client.get(self._prefix + key)

    def add(self, key: str, number: int) -> int:
        return self._client.add(self._prefix + key, number)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return self._client.compare_set(self._prefix + key, expected, desired)

    def check(self, keys: Sequence[str]) -> bool:
        return self._client.check([self._prefix + key for key in keys])

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        names = [self._prefix + key for key in keys]
        seconds = self._client.timeout_s if timeout is None else timeout.total_seconds()
        if self._check is None:
            self._client.wait(names, seconds)
            return
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > LOOK_S:
            self._check()
            with contextlib.suppress(StoreTimeout):
                self._client.wait(names, LOOK_S)
                return
        self._client.wait(names, max(0.0, left))

    def delete_key(self, key: str) -> bool:
        return self._client.delete_key(self._prefix + key)

    def append(self, key: str, value: str | bytes) -> None:
        self._client.append(self._prefix + key, value)

    def num_keys(self) -> int:
        return self._client.num_keys()

    def set_timeout(self, timeout: timedelta) -> None:
        self._client.timeout_s = timeout.total_seconds()

    # Torch's own code looks for these under their names in C++.
    deleteKey = delete_key
    getNumKeys = num_keys
    setTimeout = set_timeout


class Worker(Protocol):
    """This process in its job: rank, world size, the job's store, and the request to stop.

    `hosts` names the host of each rank, and `host` this worker's. `id` is this process's number in the job;
    where workers come and go (`memberships.can_change`) its rank is its place among the members, and -1
    until it is one of them.
    """

    @property
    def id(self) -> int: ...
    @property
    def rank(self) -> int: ...
    @property
    def memberships(self) -> Memberships: ...
    @property
    def local_rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def host(self) -> str: ...
    @property
    def hosts(self) -> tuple[str, ...]: ...
    @property
    def timeout_s(self) -> float: ...
    @property
    def store(self) -> dist.Store: ...
    @property
    def rendezvous(self) -> Rendezvous: ...

    def stop_requested(self) -> bool:
        """Whether this worker's host was asked to end the job cleanly; costs next to nothing."""

    def ask_to_stop(self) -> None:
        """Have this worker ask to end the job cleanly, as a request from outside does."""

    def report(self, progress: dict[str, Any]) -> None:
        """Send the job's progress to the supervisor; one worker calls it a few times a second at most."""

    def ask(self, question: Mapping[str, Any]) -> Mapping[str, Any]:
        """What the job's coordinator answers, however long that takes."""

    def join(self, backend: str) -> None:
        """Make the process group of all workers; every rank calls it."""


class ElasticWorker(Worker, Protocol):
    """A worker of a job whose workers come and go."""

    def enter(self, membership: Membership) -> None:
        """Take the place that `membership` gives this worker; the process group is not made yet."""

    def leave_world(self) -> None:
        """End the process group, also where a member of it is lost."""

    def report_ready(self) -> None:
        """This worker can take part as soon as it is made a member."""

    def report_joined(self) -> None:
        """This worker has taken its place in the version that it entered, with the state of the others."""

    def report_left(self) -> None:
        """This worker has left in agreement with the others, and ends."""

    def report_broken(self, loss: PeerError) -> None:
        """The members of the version that this worker entered could not work together; it waits for another.

        The worker to blame is named where it is known.
        """

    def ask_to_resize(self, workers: int, why: str) -> None:
        """Ask the supervisor for that number of workers; they change once joiners are ready."""


class LaunchedWorker:
    """A worker that an agent has started; `agent` links it with that agent."""

    def __init__(self, order: WorkerOrder, agent: AgentLink) -> None:
        self.id = order.rank
        self.host = order.host
        self.local_rank = order.local_rank
        self.timeout_s = order.timeout_s
        self.memberships = agent.memberships
        self._agent = agent
        self._secret = bytes.fromhex(order.secret)
        self._address = order.address
        self._client = StoreClient(Address(order.store), self._secret, self.id, self.timeout_s)
        self.store = JobStore(self._client)
        self._world: WorldConnections | None = None
        self._world_lock = threading.Lock()
        # Torch keeps no hold of a store that is made in Python.
        self._stores = [self.store]
        self.rank = -1
        self.hosts: tuple[str, ...] = ()
        if order.membership is not None:
            self.enter(order.membership)

    @property
    def world_size(self) -> int:
        return len(self.hosts)

    def enter(self, membership: Membership) -> None:
        self.rank = membership.rank_of(self.id)
        self.hosts = membership.hosts
        store = self.store
        self.memberships.enter(membership)
        if self.memberships.can_change:
            self.memberships.on_loss(self._cut_world)
            store = JobStore(
                self._client, f"plait/version/{membership.version}/", self.memberships.raise_loss
            )
            self._stores.append(store)
        self.rendezvous = Rendezvous(
            store,
            self._secret,
            self.rank,
            self.hosts,
            self._address,
            self.timeout_s,
            check=self.memberships.raise_loss if self.memberships.can_change else None,
        )

    def leave_world(self) -> None:
        if self.rank >= 0 and (loss := self.memberships.loss()) is not None:
            self._cut_world(loss)
        with self._world_lock:
            self._world = None
            if dist.is_initialized():
                dist.destroy_process_group()

    def _cut_world(self, loss: PeerError) -> None:
        """Wake threads that wait for others in the process group."""
        with self._world_lock:
            if self._world is not None:
                self._world.cut()

    def stop_requested(self) -> bool:
        return self._agent.stop_requested

    def ask_to_stop(self) -> None:
        self._agent.stop_requested = True

    def report(self, progress: dict[str, Any]) -> None:
        self._agent.send(messages.ProgressReport(progress))

    def ask(self, question: Mapping[str, Any]) -> Mapping[str, Any]:
        answer = self._agent.ask(CoordinatorQuestion(self.id, question))
        if answer.failure is not None:
            raise (InputError if answer.wrong_input else PlaitError)(answer.failure)
        return answer.content

    def join(self, backend: str) -> None:
        world = join_world(backend, self.rendezvous)
        with self._world_lock:
            self._world = world
        self.memberships.raise_loss()

    def report_ready(self) -> None:
        self._agent.send(messages.ReadyReport(self.id))

    def report_joined(self) -> None:
        self._agent.send(messages.JoinReport(self.id, self.memberships.current.version))

    def report_left(self) -> None:
        self._agent.send(messages.LeaveReport(self.id))

    def report_broken(self, loss: PeerError) -> None:
        current = self.memberships.current
        peer = None if loss.peer is None else current.members[loss.peer]
        self._agent.send(messages.BreakReport(self.id, current.version, peer, str(loss)))

    def ask_to_resize(self, workers: int, why: str) -> None:
        self._agent.send(messages.ResizeRequest(workers, why))


AnswerFunction = Callable[[Mapping[str, Any]], Mapping[str, Any]]


class CoordinatorProcess:
    """The process that answers the questions of the workers; `membership` is the first one."""

    def __init__(self, order: WorkerOrder, agent: AgentLink) -> None:
        assert order.membership is not None
        self.membership = order.membership
        self.is_elastic = order.elastic
        self._agent = agent

    def report(self, progress: dict[str, Any]) -> None:
        self._agent.send(messages.ProgressReport(progress))

    def serve(self, answer: AnswerFunction, follow: Callable[[Membership], None]) -> None:
        """Answer questions one after the other, and follow the members, until all workers have ended."""
        while True:
            match self._agent.inbox.get():
                case CoordinatorQuestion() as question:
                    self._agent.send(_answered(question, answer))
                case messages.NewMembership(membership):
                    follow(membership)
                case messages.CloseCoordinator():
                    return


def _answered(question: CoordinatorQuestion, answer: AnswerFunction) -> CoordinatorAnswer:
    try:
        return CoordinatorAnswer(question.rank, answer(question.content))
    except Exception as failure:  # the worker must not wait for ever
        words = str(failure) if isinstance(failure, PlaitError) else traceback.format_exc()
        return CoordinatorAnswer(question.rank, {}, words, isinstance(failure, InputError))


class AgentLink:
    """The socket to this host's agent: requests to stop and answers come, questions and reports go.

    Signs of life go there too, so that a process that is stopped is noticed. When the agent is gone, so is
    this process.
    """

    def __init__(
        self, descriptor: int, memberships: Memberships, is_worker: bool = True, beat_s: float = BEAT_S
    ) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._lock = threading.Lock()
        self.memberships = memberships
        self._is_worker = is_worker
        self.stop_requested = False
        self._beat_s = beat_s
        # Answers or, for the coordinator, all that there is to answer.
        self.inbox: queue.SimpleQueue[JobMessage | None] = queue.SimpleQueue()
        for target in (self._receive, self._send_beats):
            threading.Thread(target=target, name="plait-agent-link", daemon=True).start()

    def send(self, message: JobMessage) -> None:
        with self._lock:
            self._socket.sendall(to_line(message))

    def ask(self, question: CoordinatorQuestion) -> CoordinatorAnswer:
        """The coordinator's answer; one thread asks."""
        self.send(question)
        answer = self.inbox.get()
        assert isinstance(answer, CoordinatorAnswer)
        return answer

    def _receive(self) -> None:
        lines = LineBuffer()
        while data := self._read():
            for line in lines.take(data):
                match from_line(line):
                    case messages.Stop():
                        self.stop_requested = True
                    case messages.NewMembership(membership) if self._is_worker:
                        self.memberships.put(membership)
                    case messages.Dismissal():
                        self.memberships.dismiss()
                    case message:
                        self.inbox.put(message)
        os.kill(os.getpid(), signal.SIGKILL)

    def _read(self) -> bytes:
        try:
            return self._socket.recv(4096)
        except OSError:
            return b""

    def _send_beats(self) -> None:
        while True:
            time.sleep(self._beat_s)
            self.send(messages.Beat())


def check(argument: Mapping[str, Any], descriptors: Sequence[int]) -> None:
    """Run the order's check on its settings; sends the agent what is wrong with them, if anything."""
    order = decode(messages.CheckOrder, argument)
    why = None
    try:
        resolve(order.check, "check")(order.settings)
    except InputError as failure:
        why = str(failure)
    socket.socket(fileno=descriptors[0]).sendall(to_line(messages.CheckResult(why)))


def enter(argument: Mapping[str, Any], descriptors: Sequence[int]) -> None:
    """Be a worker, or the coordinator: run the order's entry and report what it returned.

    The fork server calls it.
    """
    order = decode(WorkerOrder, argument)
    is_worker = order.rank != COORDINATOR
    lease_s, may_lose = order.lease_s, order.elastic or order.lease_s is not None
    memberships = Memberships(order.rank, can_change=may_lose, can_grow=order.elastic)
    beat_s = BEAT_S if lease_s is None else min(BEAT_S, lease_s / BEATS)
    agent = AgentLink(descriptors[0], memberships, is_worker, beat_s)
    # Ctrl-C reaches the whole terminal; the supervisor alone decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    hand_on_warnings(lambda text: agent.send(messages.WarningReport(text)))
    try:
        _set_environment(order)
        torch.set_num_threads(order.threads)
        process = LaunchedWorker(order, agent) if is_worker else CoordinatorProcess(order, agent)
        value = resolve(order.entry, "entry")(process, order.settings)
        agent.send(messages.ResultReport(order.rank, value))
    except BaseException as failure:
        agent.send(describe_failure(order.rank, order.host, failure))
        sys.stdout.flush()
        sys.stderr.flush()
        # A process group with a dead peer can block in its destructor.
        os._exit(1)


def _set_environment(order: WorkerOrder) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    numbers = (order.rank, order.local_rank, order.world_size, order.local_size)
    os.environ.update({name: str(number) for name, number in zip(names, numbers)})
    if order.nic is not None:
        # The interface that the other hosts know; the libraries' own guess may be another.
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = order.nic


def describe_failure(rank: int, host: str, failure: BaseException) -> Failure:
    """The report of a worker that `failure` ended."""
    lost, peer = _lost_peer(failure)
    known = isinstance(failure, PlaitError)
    summary = str(failure) if known else f"{type(failure).__name__}: {failure}"
    if known:  # elsewhere the traceback has them
        summary = "\n".join([summary, *getattr(failure, "__notes__", ())])
    if lost is not None and not known:
        summary = f"{_MISSED[lost]} ({str(failure).strip().splitlines()[0]})"
    return Failure(
        rank=rank,
        host=host,
        summary=summary,
        # What is said in words needs no traceback.
        traceback="" if known or lost is not None else "".join(traceback.format_exception(failure)),
        exit_status=failure.exit_status if isinstance(failure, PlaitError) else 1,
        lost=lost,
        peer=peer,
        everywhere=failure.everywhere if isinstance(failure, PlaitError) else _is_of_the_disk(failure),
    )


_MISSED = {
    LostPeer.GONE: "another worker has broken off the connection",
    LostPeer.SILENT: "waited in vain for another worker: it hangs, or the network between them is cut",
}


def _is_of_the_disk(failure: BaseException) -> bool:
    return isinstance(failure, OSError) and failure.errno in DISK_ERRORS


def as_loss(failure: BaseException) -> PeerError | None:
    """`failure` as the loss of another worker, where it says no more than that; without its traceback.

    A traceback would keep the broken process group alive.
    """
    kind, peer = _lost_peer(failure)
    return None if kind is None else PeerError(str(failure), kind, peer)


def _lost_peer(failure: BaseException) -> tuple[LostPeer | None, int | None]:
    """How another worker is missed where `failure` says no more than that, and its rank where known."""
    if isinstance(failure, PeerError):
        return failure.kind, failure.peer
    if isinstance(failure, RuntimeError) and not isinstance(failure, PlaitError):
        words = str(failure)
        for kind, signs in ((LostPeer.GONE, _TORCH_GONE), (LostPeer.SILENT, _TORCH_SILENT)):
            if any(sign in words for sign in signs):
                return kind, None
    return None, None
