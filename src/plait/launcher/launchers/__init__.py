"""Where a job's agents run and who starts them: this machine, hosts with a shell, or a cluster's scheduler.

The supervisor knows launchers by the methods of `Launcher` alone. It imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Protocol

from plait.schema.hosts import Host


class Stream(Protocol):
    """A started command with pipes: what `subprocess.Popen(..., text=True)` is."""

    @property
    def stdin(self) -> IO[str] | None: ...
    @property
    def stdout(self) -> Iterable[str] | None: ...
    @property
    def stderr(self) -> Iterable[str] | None: ...

    def poll(self) -> int | None:
        """Its exit status, or None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status; raises subprocess.TimeoutExpired if it still runs after `timeout` seconds."""

    def kill(self) -> None:
        """End it, without waiting; its output ends then, also if its host is gone."""


@dataclass(frozen=True)
class HostChanges:
    """What happened to a job's hosts since the last look: names of lost ones, and new ones it may use."""

    lost: tuple[str, ...] = ()
    new: tuple[Host, ...] = ()


class Launcher:
    """Starts commands on the hosts of a job. One that knows nothing of its hosts has these defaults."""

    def take_hosts(self, fewest: int, most: int) -> tuple[Host, ...]:
        """From `fewest` to `most` hosts for a job, in the order of its ranks; waits until they are there.

        LaunchError if there will not be as many, InputError if the job asks for what cannot be. Called again
        after a host was lost, which is not among the hosts then unless it is back.
        """
        raise NotImplementedError

    def start(self, host: Host, command: Sequence[str], environment: Mapping[str, str]) -> Stream:
        """Start `command` on one of the hosts, with `environment` in addition to its own variables.

        Returns at once; LaunchError if it cannot even be tried. The command is an agent, which ends its
        workers when its input ends.
        """
        raise NotImplementedError

    def reached_by(self, host: Host) -> str:
        """How the host is reached, for messages, such as `ssh w0`; empty if there is nothing to say."""
        return ""

    def changed(self) -> HostChanges:
        """What has changed since the last call; asked every second, so it must not wait."""
        return HostChanges()

    def notice(self) -> float | None:
        """In how many seconds the hosts are taken away, once that is known; must not wait."""
        return None

    def give_back(self, hosts: Sequence[Host]) -> None:
        """The job needs these hosts no more."""
