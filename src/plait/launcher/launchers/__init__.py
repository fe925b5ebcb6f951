"""Where a job's agents run and who starts them: this machine, hosts with a shell, or a cluster's scheduler.

The supervisor knows launchers by the methods of `Launcher` alone. It imports no torch.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, ClassVar, Protocol

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
    """Starts commands on the hosts of a job. One that knows nothing of its hosts has these defaults.

    `signals` are those by which the engine says that it takes the hosts away; all processes of the job may
    get them, and `signalled` is told. `if_silent` is a command that agents run before they end because
    nothing is heard of this process.
    """

    signals: tuple[signal.Signals, ...] = ()
    # Whether other hosts can be taken in place of those that are taken away.
    has_others: ClassVar[bool] = False
    if_silent: tuple[str, ...] = ()

    def take_hosts(self, fewest: int, most: int, lost: Collection[str] = ()) -> tuple[Host, ...]:
        """From `fewest` to `most` hosts for a job, in the order of its ranks; waits until they are there.

        LaunchError if there will not be as many, InputError if the job asks for what cannot be. Called again
        after hosts were `lost`, by name, which are not among the hosts then unless they are back. Empty if
        there is only this machine.
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

    def signalled(self, number: int) -> bool:
        """This process, or an agent, got that signal; whether it means that the hosts are taken away.

        Called in a signal handler. If so, `notice` has the time that is left from now on.
        """
        return False

    def ask_again(self, announce: Callable[[], None]) -> None:
        """Have the engine start this command again later, because its hosts are taken away or were lost.

        Calls `announce` before; does nothing if the engine cannot, or was not asked to.
        """
