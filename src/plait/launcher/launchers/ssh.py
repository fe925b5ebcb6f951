"""Agents on hosts that a shell reaches: ssh, or another command that runs a command on a host."""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence

from plait.core.errors import LaunchError
from plait.launcher.launchers import Launcher, Stream
from plait.launcher.launchers.local import open_stream
from plait.schema.hosts import LOCAL, Host

# How long a host may take to answer when hosts are chosen.
PROBE_S = 10.0


class ShellLauncher(Launcher):
    """The hosts of a list. `shell` runs a command on `{host}`; this machine, by its name, needs none."""

    def __init__(self, hosts: Sequence[Host], shell: str) -> None:
        self._hosts = tuple(hosts)
        self._shell = shell

    def take_hosts(self, fewest: int, most: int, lost: Collection[str] = ()) -> tuple[Host, ...]:
        if fewest == most == len(self._hosts) and not lost:
            return self._hosts  # all of them: their agents will tell
        answers = self._probe()
        there = tuple(host for host in self._hosts if answers[host.name] == 0)
        if len(there) < fewest:
            gone = ", ".join(host.name for host in self._hosts if host not in there)
            raise LaunchError(
                f"{len(there)} of the hosts can be reached, expected {fewest} at least (cluster.nodes): no "
                f"answer from {gone} within {PROBE_S:.0f} s"
            )
        return there[:most]

    def _probe(self) -> dict[str, int | None]:
        """The exit status of a command on each host; None without an answer."""
        streams = {host.name: self.start(host, ["true"], {}) for host in self._hosts}
        end = time.monotonic() + PROBE_S
        answers: dict[str, int | None] = {}
        for name, stream in streams.items():
            try:
                answers[name] = stream.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                answers[name] = None
                stream.kill()
        return answers

    def start(self, host: Host, command: Sequence[str], environment: Mapping[str, str]) -> Stream:
        # The shell itself may need its own environment; the agent gets the job's with its order.
        return open_stream(self.command(host, command), {})

    def reached_by(self, host: Host) -> str:
        return shlex.join(self._prefix(host))

    def command(self, host: Host, command: Sequence[str]) -> list[str]:
        """`command` as it is run there."""
        prefix = self._prefix(host)
        # ssh joins its arguments with spaces, and a shell on the remote host splits them.
        is_ssh = any(os.path.basename(word) == "ssh" for word in prefix)
        return [*prefix, *(map(shlex.quote, command) if is_ssh else command)]

    def _prefix(self, host: Host) -> list[str]:
        return [] if host.name == LOCAL else shlex.split(self._shell.format(host=shlex.quote(host.name)))
