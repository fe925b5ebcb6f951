"""The launcher that a job names."""

from __future__ import annotations

from plait.launcher.launchers import Launcher
from plait.launcher.launchers.local import LocalLauncher
from plait.launcher.launchers.ssh import ShellLauncher
from plait.schema.hosts import LOCAL
from plait.schema.placement import Placement


def launcher_of(placement: Placement) -> Launcher:
    """The launcher for the hosts of `placement`."""
    if all(host.name == LOCAL for host in placement.hosts):
        return LocalLauncher(placement.hosts)
    return ShellLauncher(placement.hosts, placement.shell)
