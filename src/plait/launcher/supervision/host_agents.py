"""The hosts of a launch: one agent each, what it printed last, and which hosts are lost."""

from __future__ import annotations

import os
import queue
import time
from collections import deque
from dataclasses import replace
from fnmatch import fnmatchcase

from plait.comm.handshake import new_secret
from plait.comm.running_clock import RunningClock
from plait.core.errors import LaunchError
from plait.core.names import user_folders
from plait.launcher import messages
from plait.launcher.display import Display
from plait.launcher.failure_cause import describe_status
from plait.launcher.launchers import Launcher, Stream
from plait.launcher.launchers.agent_stream import AgentProcess, Inbox
from plait.launcher.membership import Membership
from plait.launcher.messages import AgentOrder, JobMessage, Launch
from plait.launcher.supervision.launch_errors import HostLostError
from plait.schema.hosts import LOCAL, Host
from plait.schema.placement import Placement

END_S = 5.0
# Agents send a sign of life every few seconds.
AGENT_SILENT_S = 30.0
# An agent that receives nothing ends after this multiple of the time after which the supervisor gives it up.
AGENT_TIMEOUT_FACTOR = 2.0
# The clock by which agents are silent advances this much at most from one message to the next.
MOST_UNREAD_S = 2.5
LAST_LINES = 20


class HostAgents:
    """The agents, by the index of their host in the placement; hosts that come later are added to it.

    A host that was lost and came back has two indices.
    """

    def __init__(self, launch: Launch, launcher: Launcher, display: Display) -> None:
        placement = launch.placement
        forwarded = {
            name: value
            for name, value in os.environ.items()
            if any(fnmatchcase(name, pattern) for pattern in placement.forward)
        }
        placement = replace(placement, environment={**forwarded, **placement.environment})
        self.launch = replace(launch, placement=placement)
        self.inbox: Inbox = queue.SimpleQueue()
        self.lost: set[int] = set()
        self._launcher, self._display = launcher, display
        self._secret = new_secret()
        self._agents: list[AgentProcess] = []
        self._clock = RunningClock(MOST_UNREAD_S)
        self._printed: list[deque[str]] = []

    def __len__(self) -> int:
        return len(self._agents)

    @property
    def placement(self) -> Placement:
        return self.launch.placement

    def name(self, index: int) -> str:
        return self.placement.hosts[index].name

    def index_of(self, name: str) -> int | None:
        """The last index of a host of that name."""
        indices = [index for index, host in enumerate(self.placement.hosts) if host.name == name]
        return indices[-1] if indices else None

    def is_there(self, name: str) -> bool:
        """Whether a host of that name has an agent and is not lost."""
        index = self.index_of(name)
        return index is not None and index not in self.lost

    def capacity(self) -> list[int]:
        """The largest number of workers for each host: no limit on this machine, otherwise its slots."""
        hosts, rules = self.placement.hosts, self.placement.elastic
        slots = self.placement.capacity or tuple(host.slots for host in hosts)
        if rules is not None and len(hosts) == 1 and hosts[0].name == LOCAL:
            return [max(rules.max_allowed, slots[0])]
        return list(slots)

    def start(self, membership: Membership) -> None:
        """Start the agents of all hosts; LaunchError if one cannot even be tried."""
        for host in self.placement.hosts:
            self._order(self._start(host), membership)

    def add(self, host: Host, membership: Membership) -> None:
        """Start the agent of a new host, which has no workers yet; LaunchError if that cannot be tried."""
        stream = self._start(host)
        capacity = (*self.capacity(), host.slots)
        hosts = (*self.placement.hosts, replace(host, slots=0))
        placement = replace(self.placement, hosts=hosts, capacity=capacity)
        self.launch = replace(self.launch, placement=placement)
        self._order(stream, membership)

    def _start(self, host: Host) -> Stream:
        # Without the current folder on its Python path.
        command = [self.placement.interpreter, "-P", "-u", "-m", "plait.launcher.agent"]
        try:
            return self._launcher.start(host, command, self.placement.environment)
        except LaunchError as failure:
            raise LaunchError(f"{host.name}: {failure}") from None

    def _order(self, stream: Stream, membership: Membership) -> None:
        """Give the agent of the next host its order."""
        index = len(self._agents)
        agent = AgentProcess(index, stream, self.inbox, self._clock.read())
        self._agents.append(agent)
        self._printed.append(deque(maxlen=LAST_LINES))
        # An agent on this machine notices at once when this process ends; across a network it may not.
        is_local = self.name(index) == LOCAL
        order = AgentOrder(
            launch=self.launch,
            index=index,
            capacity=self.capacity()[index],
            membership=membership,
            secret=self._secret.hex(),
            folder=os.getcwd(),
            modules=tuple(user_folders()),
            supervisor_timeout_s=None if is_local else AGENT_TIMEOUT_FACTOR * self.timeout_s,
            signals=self._launcher.signals,
            if_silent=self._launcher.if_silent,
        )
        agent.send(order)

    def send(self, index: int, message: JobMessage) -> None:
        self._agents[index].send(message)

    def broadcast(self, message: JobMessage) -> None:
        for agent in self._agents:
            agent.send(message)

    def print(self, index: int, line: messages.OutputLine) -> None:
        """Display a line of a host."""
        self._printed[index].append(line.text)
        (self._display.wrote if line.is_stdout else self._display.printed)(line.text)

    @property
    def timeout_s(self) -> float:
        """How long an agent may send nothing."""
        return max(AGENT_SILENT_S, 3 * self.placement.link_timeout_s)

    def hear(self, index: int) -> None:
        """A message of that host has come."""
        self._agents[index].last_seen_s = self._clock.read()

    def silent_s(self, index: int) -> float:
        """For how long nothing has come from that host."""
        return self._clock.read() - self._agents[index].last_seen_s

    def silent(self) -> list[int]:
        """The hosts whose agents run and have sent nothing for `timeout_s`."""
        return [a.index for a in self._agents if a.is_running and self.silent_s(a.index) > self.timeout_s]

    def describe_end(self, index: int) -> str:
        """How an agent has ended."""
        status, by = self._agents[index].wait(1.0), self._launcher.reached_by(self.placement.hosts[index])
        where = f" (reached by {by})" if by else ""
        how = "is still there" if status is None else describe_status(status)
        return f"the agent on {self.name(index)}{where} {how}"

    def describe_silence(self, index: int) -> str:
        return (
            f"the agent on {self.name(index)} has shown no sign of life for {self.timeout_s:.0f} s; all "
            f"workers were ended. Go on with --resume"
        )

    def describe_loss(self, index: int) -> str:
        return f"{self.name(index)} is lost: nothing is heard of it; all workers were ended"

    def describe_link(self, index: int) -> str:
        seconds = self.placement.link_timeout_s
        return (
            f"{self.name(index)} and {self.name(0)} could not reach each other for {seconds:.0f} s; all "
            f"workers were ended. When the link is back, go on with --resume"
        )

    def last_lines(self, index: int) -> str:
        return "\n".join(self._printed[index]) or "(nothing)"

    def failed(self, message: str) -> LaunchError:
        """The error that ends the job, which may be started again if hosts were lost."""
        names = tuple(self.name(index) for index in sorted(self.lost))
        return HostLostError(message, names) if names else LaunchError(message)

    def kill(self, index: int) -> None:
        """End what leads to a host."""
        self._agents[index].end()

    def end(self) -> None:
        """Close the connections, upon which agents kill their workers and end; then kill what still runs.

        What leads to a lost host is killed at once: no agent answers there.
        """
        for agent in self._agents:
            agent.close()
            if agent.index in self.lost:
                agent.end()
        end = time.monotonic() + END_S
        for agent in self._agents:
            if agent.wait(max(0.1, end - time.monotonic())) is None:
                agent.end()
        for agent in self._agents:
            agent.join_readers(max(0.1, end - time.monotonic()))
        # Display what they printed last; later requests to stop have no effect.
        while not self.inbox.empty():
            index, message = self.inbox.get()
            if isinstance(message, messages.OutputLine):
                self.print(index, message)
