"""Agents on hosts that a shell reaches: ssh, or another command that runs a command on a host."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence

from plait.launcher.launchers import Launcher, Stream
from plait.launcher.launchers.local import open_stream
from plait.schema.hosts import LOCAL, Host


class ShellLauncher(Launcher):
    """The hosts of a list. `shell` runs a command on `{host}`; this machine, by its name, needs none."""

    def __init__(self, hosts: Sequence[Host], shell: str) -> None:
        self._hosts = tuple(hosts)
        self._shell = shell

    def take_hosts(self, fewest: int, most: int) -> tuple[Host, ...]:
        return self._hosts

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
