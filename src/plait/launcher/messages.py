"""The messages between the supervisor, the agents and the workers of a job: one JSON object per line.

A line holds the `kind` of the message, which is the name of its class, and its fields. Agents forward
messages between the supervisor and their workers. It imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, dataclass_transform

from plait.core.codec import decode, encode
from plait.core.errors import ArtefactError, LostPeer
from plait.launcher.membership import Membership
from plait.schema.hosts import MAX_SLOTS, Host
from plait.schema.placement import Placement

# The ranks of processes that are no workers: the one that checks the request, and the coordinator.
CHECK, COORDINATOR = -2, -1


def process_name(rank: int) -> str:
    """The file name of a process's logs, without its ending."""
    return "coordinator" if rank == COORDINATOR else f"rank{rank}"


@dataclass_transform(frozen_default=True)
class JobMessage:
    """Base of all messages. Subclasses become frozen dataclasses and are registered for `from_line`."""

    kinds: ClassVar[dict[str, type[JobMessage]]] = {}

    def __init_subclass__(cls) -> None:
        JobMessage.kinds[cls.__name__] = dataclass(frozen=True)(cls)


def to_line(message: JobMessage) -> bytes:
    return json.dumps({"kind": type(message).__name__, **encode(message)}).encode() + b"\n"


def from_line(line: bytes | str) -> JobMessage | None:
    """The message of a line; None if the line is no message, such as the greeting of a remote shell."""
    try:
        content = json.loads(line)
        return decode(JobMessage.kinds[content.pop("kind")], content)
    except (ValueError, KeyError, TypeError, AttributeError, ArtefactError):
        return None


@dataclass(frozen=True)
class Launch:
    """What to run and where: `entry` and `check` are functions by name, `settings` their JSON argument.

    `coordinator`, if given, is the function of an additional process on the first host, which answers the
    workers' questions. Its return value is the job's result.
    """

    placement: Placement
    entry: str
    settings: Mapping[str, Any]
    logs: Path | None = None  # the folder for the output of workers, which is not kept without one
    check: str | None = None
    preload: tuple[str, ...] = ()  # modules imported once per host, before its workers are forked
    coordinator: str | None = None
    saves: bool = True  # whether workers that are asked to stop have something to save first


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """The arguments of a run's processes in addition to its settings, whose type depends on the kind of run.

    `run` is the id of the run, and `workers` the number of its workers; None if that may change. With
    `in_process` the only worker is the user's own process, whose logging and torch stay as they are.
    """

    folder: Path
    resume: bool
    run: str | None = None
    workers: int | None = None
    in_process: bool = False


# From the supervisor to an agent, and from there to its workers.


class AgentOrder(JobMessage):
    """The first message to an agent: the launch, and the index of the agent's host.

    `capacity` is the largest number of workers on the host. An agent that has received nothing for
    `supervisor_timeout_s` ends; None if it notices at once that the supervisor has ended. `signals` are
    those that are meant for the supervisor; all processes of a host may get them. `if_silent` is a command
    to run before the agent ends because it has received nothing.
    """

    launch: Launch
    index: int
    capacity: int
    membership: Membership
    secret: str
    folder: str
    modules: tuple[str, ...]
    supervisor_timeout_s: float | None
    signals: tuple[int, ...] = ()
    if_silent: tuple[str, ...] = ()

    @property
    def host(self) -> Host:
        return self.launch.placement.hosts[self.index]

    @property
    def is_single(self) -> bool:
        """Whether this is the only host, and no other may come."""
        placement = self.launch.placement
        return len(placement.hosts) == 1 and not placement.may_get_hosts

    @property
    def most_others(self) -> int:
        """How many other hosts there may be, of which some come later."""
        placement = self.launch.placement
        return MAX_SLOTS if placement.may_get_hosts else len(placement.hosts) - 1

    @property
    def first_rank(self) -> int:
        return sum(host.slots for host in self.launch.placement.hosts[: self.index])


class StartAll(JobMessage):
    """Start the workers of the first membership; the job's store is at that address."""

    store: str


class StartWorker(JobMessage):
    """Start a worker that joins the running job, in that slot of its host."""

    rank: int
    slot: int


class EndWorkers(JobMessage):
    """Kill these workers."""

    ranks: tuple[int, ...]


class Stop(JobMessage):
    """Finish the step, write a checkpoint and end."""


class NewMembership(JobMessage):
    """The membership has changed."""

    membership: Membership


class Dismissal(JobMessage):
    """These workers may end: all members of a version without them have joined."""

    ranks: tuple[int, ...]


class Beat(JobMessage):
    """A heartbeat: from workers to their agent, from agents to the supervisor, and back to the agents."""


class CloseCoordinator(JobMessage):
    """All workers have ended, so the coordinator ends too."""


# From a worker to the coordinator and back; agents and the supervisor forward them.


class CoordinatorQuestion(JobMessage):
    """A question of a worker to the coordinator."""

    rank: int
    content: Mapping[str, Any]


class CoordinatorAnswer(JobMessage):
    """The answer to the worker of that rank; `failure` is the error message if there is none."""

    rank: int
    content: Mapping[str, Any]
    failure: str | None = None
    wrong_input: bool = False


# From an agent to the supervisor.


class HostReady(JobMessage):
    """The host accepts the job. The first host sends the address of the job's store."""

    store: str


class Refusal(JobMessage):
    """The job cannot be run because of its settings."""

    why: str


class CheckFailure(JobMessage):
    """The process that checks the settings has failed; its output says why, unless it sent `Refusal`."""


class WorkerPids(JobMessage):
    """The pids of the host's workers, by rank."""

    pids: Mapping[int, int]


class OutputLine(JobMessage):
    """A line that a worker printed, to its standard output or to standard error."""

    text: str
    is_stdout: bool = False


class WorkerSilence(JobMessage):
    """A worker has sent no heartbeat for `seconds`."""

    rank: int
    seconds: float


class WorkerEnd(JobMessage):
    """A worker's process has ended."""

    rank: int
    status: int


class Signalled(JobMessage):
    """The agent got a signal that is meant for the supervisor."""

    number: int


class UnreachableHost(JobMessage):
    """The first host and the host of this index cannot reach each other."""

    index: int


# From a worker to its agent, which forwards them to the supervisor.


class ProgressReport(JobMessage):
    """The progress of the job."""

    progress: Mapping[str, Any]


class WarningReport(JobMessage):
    """A warning of a worker."""

    text: str


class ResultReport(JobMessage):
    """The return value of a worker's entry."""

    rank: int
    value: Any


class Failure(JobMessage):
    """Why a worker failed. If it only lost another worker, `lost` says how, and `peer` is that worker.

    `everywhere` is set if the cause holds for all workers, such as a full disk.
    """

    rank: int
    host: str
    summary: str
    traceback: str = ""
    exit_status: int = 1
    lost: LostPeer | None = None
    peer: int | None = None
    everywhere: bool = False


class ReadyReport(JobMessage):
    """A worker is ready to become a member."""

    rank: int


class JoinReport(JobMessage):
    """A member has joined a version of the membership."""

    rank: int
    version: int


class BreakReport(JobMessage):
    """The members of a version cannot communicate; `peer` is the cause, if known."""

    rank: int
    version: int
    peer: int | None
    why: str


class LeaveRequest(JobMessage):
    """A member wants to leave."""

    rank: int


class ResizeRequest(JobMessage):
    """A policy asks for that number of workers."""

    workers: int
    why: str


@dataclass(frozen=True)
class WorkerRequest:
    """The argument of a process that an agent starts: run `entry` as a worker, or as the coordinator.

    `order` is what the agent was told, and `address` where other hosts reach this one. Without a membership
    the worker waits until it is made a member.
    """

    rank: int
    local_rank: int
    membership: Membership | None
    order: AgentOrder
    store: str
    address: str
    entry: str
    threads: int = 1

    @property
    def placement(self) -> Placement:
        return self.order.launch.placement

    @property
    def is_elastic(self) -> bool:
        """Whether workers may join and leave."""
        return self.placement.elastic is not None
