"""What the supervisor, the agents and the workers of a job send each other: one JSON object a line.

A line holds the `kind` of the message, which is the name of its class, and its fields. What workers report
their agent passes on to the supervisor, and what is meant for workers the supervisor sends to their agents.
It imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, dataclass_transform

from plait.core.codec import decode, encode
from plait.core.errors import ArtefactError, LostPeer
from plait.launch.membership import Membership
from plait.schema.hosts import Host
from plait.schema.placement import Placement

# The numbers of processes that are no workers: the one that checks the order, and the coordinator.
CHECK, COORDINATOR = -2, -1


def process_name(rank: int) -> str:
    """The name of a process's logs."""
    return "coordinator" if rank == COORDINATOR else f"rank{rank}"


@dataclass_transform(frozen_default=True)
class JobMessage:
    """Base of all messages: a subclass is a frozen dataclass, and known to `from_line` once it is defined."""

    kinds: ClassVar[dict[str, type[JobMessage]]] = {}

    def __init_subclass__(cls) -> None:
        JobMessage.kinds[cls.__name__] = dataclass(frozen=True)(cls)


def to_line(message: JobMessage) -> bytes:
    return json.dumps({"kind": type(message).__name__, **encode(message)}).encode() + b"\n"


def from_line(line: bytes | str) -> JobMessage | None:
    """The message of a line; None where it is something else, such as the greeting of a remote shell."""
    try:
        content = json.loads(line)
        return decode(JobMessage.kinds[content.pop("kind")], content)
    except (ValueError, KeyError, TypeError, AttributeError, ArtefactError):
        return None


@dataclass(frozen=True)
class Launch:
    """What to run and where: `entry` and `check` are functions by name, `settings` their JSON argument.

    `coordinator`, where there is one, is the function of a further process on the first host, which answers
    the workers' questions. What it returns is the job's result.
    """

    placement: Placement
    entry: str
    settings: Mapping[str, Any]
    logs: Path | None = None  # the folder for what workers print; none is kept where there is none
    check: str | None = None
    preload: tuple[str, ...] = ()  # modules imported once a host, before its workers are forked
    coordinator: str | None = None
    saves: bool = True  # whether workers that are asked to stop have something to save first


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """What the processes of a run receive besides its settings, whose type depends on the kind of run.

    `run` is the id of the run, and `workers` the number of workers that it starts with.
    """

    folder: Path
    resume: bool
    run: str | None = None
    workers: int | None = None


# From the supervisor to an agent, and from there to its workers.


class AgentOrder(JobMessage):
    """The first message to an agent: the launch, and its part in it.

    `capacity` is the number of workers that its host may hold. An agent that has heard nothing for
    `supervisor_timeout_s` ends; None where it sees at once that the supervisor has ended.
    """

    launch: Launch
    index: int
    capacity: int
    membership: Membership
    secret: str
    folder: str
    modules: tuple[str, ...]
    supervisor_timeout_s: float | None

    @property
    def host(self) -> Host:
        return self.launch.placement.hosts[self.index]

    @property
    def hosts(self) -> int:
        """The number of hosts."""
        return len(self.launch.placement.hosts)

    @property
    def first_rank(self) -> int:
        return sum(host.slots for host in self.launch.placement.hosts[: self.index])


class StartAll(JobMessage):
    """Start the workers of the first membership; the job's store is at that address."""

    store: str


class StartWorker(JobMessage):
    """Start a worker that joins the running job, at that place of its host."""

    rank: int
    slot: int


class EndWorkers(JobMessage):
    """Kill these workers."""

    ranks: tuple[int, ...]


class Stop(JobMessage):
    """Finish the step, write a checkpoint and end."""


class NewMembership(JobMessage):
    """Other workers are the members from now on."""

    membership: Membership


class Dismissal(JobMessage):
    """These workers may end: the members without them have taken their places."""

    ranks: tuple[int, ...]


class Beat(JobMessage):
    """A sign of life; all of them send it to whom they report to, and the supervisor to its agents."""


class CloseCoordinator(JobMessage):
    """All workers have ended: the coordinator has no more to answer."""


# From a worker to the coordinator and back; agents and the supervisor pass them on.


class CoordinatorQuestion(JobMessage):
    """What a worker asks the coordinator."""

    rank: int
    content: Mapping[str, Any]


class CoordinatorAnswer(JobMessage):
    """The answer to the worker of that rank; `failure` says why there is none."""

    rank: int
    content: Mapping[str, Any]
    failure: str | None = None
    wrong_input: bool = False


# From an agent to the supervisor.


class HostReady(JobMessage):
    """The host accepts the order. The first host names the address of the job's store."""

    store: str


class Refusal(JobMessage):
    """The order cannot be carried out, for a reason that its author can change."""

    why: str


class CheckFailure(JobMessage):
    """The process that checks the order has crashed; what it printed says why."""


class WorkerPids(JobMessage):
    """The processes of the host's workers, by rank."""

    pids: Mapping[int, int]


class OutputLine(JobMessage):
    """What a worker printed."""

    text: str


class WorkerSilence(JobMessage):
    """A worker has shown no sign of life for so long."""

    rank: int
    seconds: float


class WorkerEnd(JobMessage):
    """A worker's process has ended."""

    rank: int
    status: int


class UnreachableHost(JobMessage):
    """The first host and that of this index cannot reach each other."""

    index: int


# From a worker to its agent and, but for the first, to the supervisor.


class CheckResult(JobMessage):
    """What is wrong with the order, if anything."""

    why: str | None


class ProgressReport(JobMessage):
    """How far the job has come."""

    progress: Mapping[str, Any]


class WarningReport(JobMessage):
    """What a worker warned of."""

    text: str


class ResultReport(JobMessage):
    """What a worker's entry returned."""

    rank: int
    value: Any


class Failure(JobMessage):
    """Why a worker ended. `lost` says how it misses another worker, `peer`, where that is all it knows.

    `everywhere` is set where the reason holds for all workers alike, such as a full disk.
    """

    rank: int
    host: str
    summary: str
    traceback: str
    exit_status: int
    lost: LostPeer | None = None
    peer: int | None = None
    everywhere: bool = False


class ReadyReport(JobMessage):
    """A worker can take part as soon as it is made a member."""

    rank: int


class JoinReport(JobMessage):
    """A member has taken its place in a version of the membership."""

    rank: int
    version: int


class LeaveReport(JobMessage):
    """A worker has left in agreement with the others."""

    rank: int


class BreakReport(JobMessage):
    """The members of a version could not work together; `peer` is to blame where it is known."""

    rank: int
    version: int
    peer: int | None
    why: str


class ResizeRequest(JobMessage):
    """A policy asks for that number of workers."""

    workers: int
    why: str


# The arguments of the processes that an agent has forked.


@dataclass(frozen=True)
class CheckOrder:
    """Call `check` with the settings, and report what it refuses."""

    check: str
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class WorkerOrder:
    """The place of a worker, or the coordinator, in the job.

    Without a membership it waits until it is made a member.

    `elastic` says whether workers may join and leave, `lease_s` whether they go on without one that is lost,
    as those of an elastic job do, and how long the signs of life of each may be apart.
    """

    rank: int
    host: str
    local_rank: int
    membership: Membership | None
    elastic: bool
    store: str
    secret: str
    address: str
    timeout_s: float
    entry: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    lease_s: float | None = None
    world_size: int = 1
    local_size: int = 1
    nic: str | None = None
    threads: int = 1
