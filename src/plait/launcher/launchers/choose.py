"""The launcher that a job names."""

from __future__ import annotations

from plait.launcher.launchers import Launcher
from plait.launcher.launchers.local import LocalLauncher
from plait.launcher.launchers.ssh import ShellLauncher
from plait.schema.hosts import LOCAL, Host
from plait.schema.job_settings import Job
from plait.schema.placement import HostAccess, Placement


def launcher_of(placement: Placement) -> Launcher:
    """The launcher for the hosts of `placement`."""
    is_here = all(host.name == LOCAL for host in placement.hosts)
    return make_launcher(placement.on or ("local" if is_here else "ssh"), placement, placement.hosts)


def launcher_of_job(job: Job) -> Launcher:
    """The launcher that provides the hosts of `job`."""
    return make_launcher(job.engine, job.cluster, job.listed)


def make_launcher(engine: str, access: HostAccess, hosts: tuple[Host, ...]) -> Launcher:
    """The launcher of an engine; `hosts` are those of a list, where it has one."""
    match engine:
        case "local":
            return LocalLauncher()
        case "ssh":
            return ShellLauncher(hosts, access.shell)
        case "slurm":
            from plait.launcher.launchers.slurm import SlurmLauncher

            return SlurmLauncher(access)
        case _:
            from plait.launcher.launchers.ray import RayLauncher

            return RayLauncher(access)
