"""One worker process: its rank and connections, requests to stop, and its report when it fails."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

from plait.comm.data_group import abort_all
from plait.comm.groups import abandon_world, cut_connections, join_world
from plait.comm.handshake import Address
from plait.comm.job_store import JobStore
from plait.comm.rendezvous import Rendezvous
from plait.comm.store import StoreClient
from plait.core.codec import decode
from plait.core.errors import InputError, PeerError, PlaitError
from plait.core.logs import forward_warnings
from plait.core.names import resolve
from plait.launcher import messages
from plait.launcher.membership import Membership, Memberships
from plait.launcher.messages import CoordinatorAnswer, CoordinatorQuestion
from plait.launcher.workers.agent_link import BEAT_S, AgentLink
from plait.launcher.workers.worker_failure import describe_failure
from plait.schema.hosts import interface_of

# Heartbeats per lease.
BEATS = 5
# How long a joining worker waits until it is made a member.
JOIN_S = 86400.0


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

    def __init__(self, request: messages.WorkerRequest, agent: AgentLink) -> None:
        self.id = request.rank
        self.host = request.order.host.name
        self.local_rank = request.local_rank
        self.timeout_s = request.placement.timeout_s
        self.memberships = agent.memberships
        self._agent = agent
        self._secret = bytes.fromhex(request.order.secret)
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

    def __init__(self, request: messages.WorkerRequest, agent: AgentLink) -> None:
        assert request.membership is not None
        self.membership = request.membership
        self.is_elastic = request.is_elastic
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


def check(argument: Mapping[str, Any], descriptors: Sequence[int]) -> None:
    """Run the requested check on the settings; reports an error, and ends. The fork server calls it."""
    launch = decode(messages.Launch, argument)
    assert launch.check is not None
    try:
        resolve(launch.check, "check")(launch.settings)
    except InputError as failure:
        socket.socket(fileno=descriptors[0]).sendall(messages.to_line(messages.Refusal(str(failure))))
        os._exit(1)


def enter(argument: Mapping[str, Any], descriptors: Sequence[int]) -> None:
    """The main function of a worker or the coordinator: run the requested entry and report its return value.

    The fork server calls it.
    """
    request = decode(messages.WorkerRequest, argument)
    is_worker = request.rank != messages.COORDINATOR
    lease_s = request.placement.lease_s
    may_lose = request.is_elastic or lease_s is not None
    memberships = Memberships(request.rank, can_change=may_lose, can_grow=request.is_elastic)
    beat_s = BEAT_S if lease_s is None else min(BEAT_S, lease_s / BEATS)
    agent = AgentLink(descriptors[0], memberships, is_worker, beat_s)
    # Ctrl-C reaches the whole terminal; the supervisor alone decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    forward_warnings(lambda text: agent.send(messages.WarningReport(text)))
    try:
        _set_environment(request)
        torch.set_num_threads(request.threads)
        process = LaunchedWorker(request, agent) if is_worker else CoordinatorProcess(request, agent)
        value = resolve(request.entry, "entry")(process, request.order.launch.settings)
        agent.send(messages.ResultReport(request.rank, value))
    except BaseException as failure:
        agent.send(describe_failure(request.rank, request.order.host.name, failure))
        sys.stdout.flush()
        sys.stderr.flush()
        # A process group with a dead peer can block in its destructor.
        os._exit(1)


def _set_environment(request: messages.WorkerRequest) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    order = request.order
    numbers = (request.rank, request.local_rank, len(order.membership.members), order.capacity)
    os.environ.update({name: str(number) for name, number in zip(names, numbers)})
    nic = request.placement.nic or interface_of(request.address)
    if nic is not None:
        # The interface that the other hosts use; the libraries might choose another one.
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = nic
