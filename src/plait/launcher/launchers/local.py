"""Agents on this machine."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Collection, Mapping, Sequence

from plait.core.errors import LaunchError
from plait.launcher.launchers import Launcher, Stream
from plait.launcher.launchers.pipes import open_pipes
from plait.schema.hosts import Host


def open_stream(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
    """A process of this machine with pipes; LaunchError if it cannot be started."""
    try:
        return open_pipes(command, {**os.environ, **environment})
    except OSError as failure:
        raise LaunchError(f"cannot run {shlex.join(command)}: {failure.strerror}") from None


class LocalLauncher(Launcher):
    """This machine, and no other hosts."""

    def take_hosts(self, fewest: int, most: int, lost: Collection[str] = ()) -> tuple[Host, ...]:
        return ()

    def start(self, host: Host, command: Sequence[str], environment: Mapping[str, str]) -> Stream:
        return open_stream(command, environment)
