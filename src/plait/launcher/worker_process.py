"""One worker process: its rank and connections, requests to stop, and its report when it fails."""

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
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

from plait.comm.data_group import abort_all
from plait.comm.groups import abandon_world, cut_connections, join_world
from plait.comm.handshake import Address
from plait.comm.rendezvous import Rendezvous
from plait.comm.store import StoreClient, StoreTimeout
from plait.core.codec import decode
from plait.core.errors import InputError, LostPeer, PeerError, PlaitError
from plait.core.logs import forward_warnings
from plait.core.names import resolve
from plait.launcher import messages
from plait.launcher.membership import Membership, Memberships
from plait.launcher.messages import (
    COORDINATOR,
    CoordinatorAnswer,
    CoordinatorQuestion,
    Failure,
    JobMessage,
    WorkerRequest,
    from_line,
    to_line,
)
from plait.launcher.worker_output import LineBuffer

BEAT_S = 0.5
# Heartbeats per lease.
BEATS = 5
# How long a joining worker waits until it is made a member.
JOIN_S = 86400.0
# How often a wait in the store checks whether a member was lost.
LOOK_S = 0.1
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
# Torch has no exception class for a lost peer; only the message tells.
_TORCH_GONE = ("Connection closed by peer", "Connection reset", "Broken pipe", "NCCL error")
_TORCH_SILENT = ("Timed out waiting", "timed out", "Timeout")


class JobStore(StoreClient, dist.Store):
    """`client` with the interface of torch's `Store`: all its keys, or those below `prefix`.

    `check` is called during waits and raises if a member is lost, which would never set the key.
    """

    def __init__(
        self, client: StoreClient, prefix: str = "", check: Callable[[], None] | None = None
    ) -> None:
        dist.Store.__init__(self)
        vars(self).update(vars(client))  # its connections are shared
        self._prefix = prefix
        self._check = check

    def get(self, key: str, seconds: float | None = None) -> bytes:
        if self._check is not None:
            self.wait([key])
        return super().get(key)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:  # type: ignore[override]
        seconds = self.timeout_s if timeout is None else timeout.total_seconds()
        end = time.monotonic() + seconds
        while self._check is not None and seconds > LOOK_S:
            self._check()
            with contextlib.suppress(StoreTimeout):
                super().wait(keys, LOOK_S)
                return
            seconds = end - time.monotonic()
        super().wait(keys, max(0.0, seconds))

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout_s = timeout.total_seconds()

    # Torch calls these by their C++ names.
    deleteKey = StoreClient.delete_key
    getNumKeys = StoreClient.num_keys
    setTimeout = set_timeout


class Worker(Protocol):
    """This process in its job: rank, world size, the job's store, and the request to stop.

    `hosts` has the host of each rank, and `host` is this worker's. `id` is the number of this process in the
    job. If workers may change (`memberships.can_change`), its rank is its index among the members, and -1
    until it is a member.
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
        """Whether this worker was asked to end the job cleanly; cheap enough to call in every step."""

    def ask_to_stop(self) -> None:
        """Make `stop_requested` return True, as a request from outside does."""

    def report(self, progress: dict[str, Any]) -> None:
        """Send the job's progress to the supervisor; called by one worker, a few times a second at most."""

    def ask(self, question: Mapping[str, Any]) -> Mapping[str, Any]:
        """Send a question to the job's coordinator and wait for its answer, without a timeout."""

    def join(self, backend: str) -> None:
        """Create the process group of all workers; every rank calls it."""


class LaunchedWorker:
    """A worker started by an agent; `agent` is the connection to it.

    In addition to what a `Worker` offers, it joins and leaves a job whose workers may change.
    """

    def __init__(self, request: WorkerRequest, agent: AgentLink) -> None:
        self.id = request.rank
        self.host = request.host
        self.local_rank = request.local_rank
        self.timeout_s = request.timeout_s
        self.memberships = agent.memberships
        self._agent = agent
        self._secret = bytes.fromhex(request.secret)
        self._address = request.address
        self._client = StoreClient(Address(request.store), self._secret, self.id, self.timeout_s)
        self.store = JobStore(self._client)
        # Whether the process group of the rendezvous exists.
        self._has_world = False
        self._world_lock = threading.Lock()
        # Torch does not keep a reference to a store that was created in Python.
        self._stores = [self.store]
        if request.membership is not None:
            self.enter(request.membership)

    @property
    def rank(self) -> int:
        return self.memberships.current.rank_of(self.id) if self.memberships.has_entered else -1

    @property
    def hosts(self) -> tuple[str, ...]:
        return self.memberships.current.hosts if self.memberships.has_entered else ()

    @property
    def world_size(self) -> int:
        return len(self.hosts)

    def enter(self, membership: Membership) -> None:
        """Be a member of that version from now on; the process group is not created yet."""
        store, check = self.store, None
        self.memberships.enter(membership)
        if self.memberships.can_change:
            check = self.memberships.raise_loss
            group, version = membership.group, membership.version
            prefix = f"plait/version/{version}/" if group is None else f"plait/members/{group}/"
            store = JobStore(self._client, prefix, check)
            self._stores.append(store)
        self.rendezvous = Rendezvous(
            store, self._secret, self.rank, self.hosts, self._address, self.timeout_s, check
        )
        if check is not None:
            self.memberships.on_loss(partial(self._cut_world, self.rendezvous))

    def leave_world(self) -> None:
        """Destroy the process group, also if a member of it is lost."""
        if (loss := self.memberships.loss()) is not None:
            self._cut_world(self.rendezvous, loss)
        if self.memberships.has_entered:
            abort_all(self.rendezvous)
        with self._world_lock:
            self._has_world = False
            if dist.is_initialized():
                (dist.destroy_process_group if loss is None else abandon_world)()

    def _cut_world(self, rendezvous: Rendezvous, loss: PeerError) -> None:
        """Wake threads that wait for peers in the process group of a version, which may be left meanwhile."""
        abort_all(rendezvous)
        with self._world_lock:
            if self._has_world and rendezvous is self.rendezvous:
                cut_connections(rendezvous)

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
        join_world(backend, self.rendezvous)
        with self._world_lock:
            self._has_world = True
        self.memberships.raise_loss()

    def await_membership(self) -> Membership:
        """Report that this worker is ready, and wait for the first version with it.

        The job continues without it until then; the supervisor ends workers that are not needed.
        """
        self._agent.send(messages.ReadyReport(self.id))
        return self.memberships.after(-1, JOIN_S)

    def report_joined(self) -> None:
        """Report that this worker has joined the version that it entered and has the state of the others."""
        self._agent.send(messages.JoinReport(self.id, self.memberships.current.version))

    def report_broken(self, loss: PeerError) -> None:
        """Report that the members of the entered version cannot communicate; this worker waits for another.

        The report names the lost worker if `loss` does.
        """
        current = self.memberships.current
        peer = None if loss.peer is None else current.members[loss.peer]
        self._agent.send(messages.BreakReport(self.id, current.version, peer, str(loss)))

    def ask_to_leave(self) -> None:
        """Ask the supervisor for a version without this worker, which is not replaced."""
        self._agent.send(messages.LeaveRequest(self.id))

    def ask_to_resize(self, workers: int, why: str) -> None:
        """Ask the supervisor for that number of workers; the change waits until new workers are ready."""
        self._agent.send(messages.ResizeRequest(workers, why))


AnswerFunction = Callable[[Mapping[str, Any]], Mapping[str, Any]]


class CoordinatorProcess:
    """The process that answers the questions of the workers; `membership` is the first one."""

    def __init__(self, request: WorkerRequest, agent: AgentLink) -> None:
        assert request.membership is not None
        self.membership = request.membership
        self.is_elastic = request.elastic
        self._agent = agent

    def report(self, progress: dict[str, Any]) -> None:
        self._agent.send(messages.ProgressReport(progress))

    def serve(self, answer: AnswerFunction, follow: Callable[[Membership], None]) -> None:
        """Answer questions one at a time until all workers have ended; `follow` receives new memberships."""
        while True:
            match self._agent.inbox.get():
                case CoordinatorQuestion() as question:
                    self._agent.send(_make_answer(question, answer))
                case messages.NewMembership(membership):
                    follow(membership)
                case messages.CloseCoordinator():
                    return


def _make_answer(question: CoordinatorQuestion, answer: AnswerFunction) -> CoordinatorAnswer:
    try:
        return CoordinatorAnswer(question.rank, answer(question.content))
    except Exception as failure:  # the worker waits for an answer
        message = str(failure) if isinstance(failure, PlaitError) else traceback.format_exc()
        return CoordinatorAnswer(question.rank, {}, message, isinstance(failure, InputError))


class AgentLink:
    """The socket to this host's agent: receives requests to stop and answers, sends questions and reports.

    It also sends heartbeats, so that a stopped process is noticed. If the agent ends, this process is killed.
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
        # Answers or, in the coordinator, questions and new memberships.
        self.inbox: queue.SimpleQueue[JobMessage | None] = queue.SimpleQueue()
        for target in (self._receive, self._send_beats):
            threading.Thread(target=target, name="plait-agent-link", daemon=True).start()

    def send(self, message: JobMessage) -> None:
        with self._lock:
            self._socket.sendall(to_line(message))

    def ask(self, question: CoordinatorQuestion) -> CoordinatorAnswer:
        """The coordinator's answer; called by one thread only."""
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
    """Run the requested check on the settings; reports an error, and ends. The fork server calls it."""
    request = decode(messages.CheckRequest, argument)
    try:
        resolve(request.check, "check")(request.settings)
    except InputError as failure:
        socket.socket(fileno=descriptors[0]).sendall(to_line(messages.Refusal(str(failure))))
        os._exit(1)


def enter(argument: Mapping[str, Any], descriptors: Sequence[int]) -> None:
    """The main function of a worker or the coordinator: run the requested entry and report its return value.

    The fork server calls it.
    """
    request = decode(WorkerRequest, argument)
    is_worker = request.rank != COORDINATOR
    lease_s, may_lose = request.lease_s, request.elastic or request.lease_s is not None
    memberships = Memberships(request.rank, can_change=may_lose, can_grow=request.elastic)
    beat_s = BEAT_S if lease_s is None else min(BEAT_S, lease_s / BEATS)
    agent = AgentLink(descriptors[0], memberships, is_worker, beat_s)
    # Ctrl-C reaches the whole terminal; the supervisor alone decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    forward_warnings(lambda text: agent.send(messages.WarningReport(text)))
    try:
        _set_environment(request)
        torch.set_num_threads(request.threads)
        process = LaunchedWorker(request, agent) if is_worker else CoordinatorProcess(request, agent)
        value = resolve(request.entry, "entry")(process, request.settings)
        agent.send(messages.ResultReport(request.rank, value))
    except BaseException as failure:
        agent.send(describe_failure(request.rank, request.host, failure))
        sys.stdout.flush()
        sys.stderr.flush()
        # A process group with a dead peer can block in its destructor.
        os._exit(1)


def _set_environment(request: WorkerRequest) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    numbers = (request.rank, request.local_rank, request.world_size, request.local_size)
    os.environ.update({name: str(number) for name, number in zip(names, numbers)})
    if request.nic is not None:
        # The interface that the other hosts use; the libraries might choose another one.
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = request.nic


def describe_failure(rank: int, host: str, failure: BaseException) -> Failure:
    """The report of a worker that `failure` ended."""
    lost, peer = _lost_peer(failure)
    known = isinstance(failure, PlaitError)
    summary = str(failure) if known else f"{type(failure).__name__}: {failure}"
    if known:  # otherwise the traceback has the notes
        summary = "\n".join([summary, *getattr(failure, "__notes__", ())])
    if lost is not None and not known:
        summary = _describe_loss(failure, lost)
    if is_out_of_memory(failure):
        summary = f"{summary}\n{OUT_OF_MEMORY}"
    return Failure(
        rank=rank,
        host=host,
        summary=summary,
        # These messages need no traceback.
        traceback="" if known or lost is not None else "".join(traceback.format_exception(failure)),
        exit_status=failure.exit_status if isinstance(failure, PlaitError) else 1,
        lost=lost,
        peer=peer,
        everywhere=failure.everywhere if isinstance(failure, PlaitError) else _is_disk_error(failure),
    )


OUT_OF_MEMORY = (
    "out of memory; try a smaller data.batch_size, the same batch in parts (accumulate, or in a pipeline "
    "parallel.microbatches), precision: bf16, or layers spread over several workers (parallel.plan: auto)"
)


def is_out_of_memory(failure: BaseException) -> bool:
    """Whether a device or the host ran out of memory."""
    kinds = (torch.OutOfMemoryError, MemoryError)
    return isinstance(failure, kinds) or "DefaultCPUAllocator" in str(failure)


_LOST_PEER_MESSAGES = {
    LostPeer.GONE: "another worker has closed the connection",
    LostPeer.SILENT: "timed out waiting for another worker: it hangs, or the network between them is cut",
}


def _describe_loss(failure: BaseException, kind: LostPeer) -> str:
    text = str(failure)
    if isinstance(failure, PeerError):
        return text
    return f"{_LOST_PEER_MESSAGES[kind]} ({text.strip().splitlines()[0]})"


def _is_disk_error(failure: BaseException) -> bool:
    return isinstance(failure, OSError) and failure.errno in DISK_ERRORS


def as_loss(failure: BaseException) -> PeerError | None:
    """A PeerError without traceback if `failure` only says that a peer was lost, else None.

    A traceback would keep the broken process group alive.
    """
    kind, peer = _lost_peer(failure)
    return None if kind is None else PeerError(_describe_loss(failure, kind), kind, peer)


def _lost_peer(failure: BaseException) -> tuple[LostPeer | None, int | None]:
    """How a peer was lost, if `failure` only says that, and the peer's rank if known."""
    if isinstance(failure, PeerError):
        return failure.kind, failure.peer
    if isinstance(failure, RuntimeError) and not isinstance(failure, PlaitError):
        message = str(failure)
        for kind, signs in ((LostPeer.GONE, _TORCH_GONE), (LostPeer.SILENT, _TORCH_SILENT)):
            if any(sign in message for sign in signs):
                return kind, None
    return None, None
