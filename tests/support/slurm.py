"""A Slurm cluster of this machine: a controller and three nodes, each in a network namespace."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from support.hosts import Hosts, missing_for_hosts

NODES = ("w0", "w1", "w2")
CONTROLLER = "ctl"
_CONFIGURATION = """\
ClusterName=plait
SlurmctldHost={controller}({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdLogFile={folder}/slurmd.%n.log
SlurmctldLogFile={folder}/slurmctld.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_interval=1
MpiDefault=none
ReturnToService=2
SlurmdTimeout=6
KillWait=20
InactiveLimit=0
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=30
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=9 PreemptMode=OFF
"""


def missing_for_slurm() -> str | None:
    """Why a cluster cannot be started here, or None."""
    programs = ("slurmctld", "slurmd", "srun", "munged", "nsenter", "unshare")
    missing = [name for name in programs if shutil.which(name, path=_path()) is None]
    if missing:
        return f"a Slurm cluster needs {', '.join(missing)} (Debian: slurm-wlm and munge)"
    return missing_for_hosts()


def _path() -> str:
    return os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


class SlurmCluster:
    """Nodes w0, w1 and w2 with two CPUs each; commands run next to the controller or on a node."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.hosts = Hosts()
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}
        self.environment = {
            **os.environ,
            "PATH": _path(),
            "SLURM_CONF": str(folder / "slurm.conf"),
        }

    def start(self) -> None:
        self.hosts.make(CONTROLLER, *NODES)
        address = self.hosts.address
        text = _CONFIGURATION.format(controller=CONTROLLER, address=address(CONTROLLER), folder=self.folder)
        text += "".join(f"NodeName={node} NodeAddr={address(node)} CPUs=2 State=UNKNOWN\n" for node in NODES)
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "state").mkdir()
        lines = [f"{address(host)} {host}\n" for host in (CONTROLLER, *NODES)]
        (self.folder / "hosts").write_text("".join(["127.0.0.1 localhost\n", *lines]))
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        names = {
            "key-file": "key",
            "socket": "socket",
            "pid-file": "pid",
            "log-file": "log",
            "seed-file": "seed",
        }
        files = [f"--{option}={self.folder}/munge.{name}" for option, name in names.items()]
        # What is below a folder that anyone may write to is refused without --force.
        self._daemons.append(self._start(["munged", "--foreground", "--force", *files]))
        wait_until(lambda: (self.folder / "munge.socket").exists(), 10, "munged opens its socket")
        self._daemons.append(self._start(self.on(CONTROLLER, ["slurmctld", "-D"])))
        for node in NODES:
            self.start_node(node)
        idle = ["sinfo", "-h", "-o", "%D %t", "-p", "all"]
        wait_until(lambda: self.run(idle) == f"{len(NODES)} idle", 30, "all nodes are idle")

    def start_node(self, node: str) -> None:
        (self.folder / f"spool.{node}").mkdir(exist_ok=True)
        self._nodes[node] = self._start(self.on(node, ["slurmd", "-D", "-N", node]))

    def on(self, host: str, command: Sequence[str]) -> list[str]:
        """The command in the namespace of a host, where the hosts have names.

        Not by `ip netns exec`, which hides /sys/fs/cgroup.
        """
        space = f"--net=/run/netns/{self.hosts.space(host)}"
        named = f'hostname {host}; mount --bind {self.folder}/hosts /etc/hosts; exec "$@"'
        return ["nsenter", space, "unshare", "-um", "sh", "-c", named, "sh", *command]

    def _start(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        output = (self.folder / "daemons.log").open("ab")
        with output:
            return subprocess.Popen(command, env=self.environment, stdout=output, stderr=output)

    def popen(
        self, command: Sequence[str], host: str = CONTROLLER, **options: object
    ) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.on(host, command),
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            **options,  # type: ignore[call-overload]
        )

    def run(self, command: Sequence[str], host: str = CONTROLLER, timeout: float = 60) -> str:
        """What a command next to the controller prints; raises with its errors if it fails."""
        done = subprocess.run(
            self.on(host, command),
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def state(self, job: str) -> str:
        """The state of a job, empty if Slurm has forgotten it."""
        done = subprocess.run(
            self.on(CONTROLLER, ["squeue", "-h", "-t", "all", "-j", job, "-o", "%T"]),
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return done.stdout.strip()

    def kill_node(self, node: str) -> None:
        """All processes of the node end and its link is down, as if its power were cut."""
        self.hosts.cut(node)
        for pid in self.hosts.processes_of(node):
            try:
                os.kill(pid, 9)
            except ProcessLookupError:
                continue

    def processes(self) -> list[int]:
        """Processes on the nodes that belong to jobs."""
        daemons = {each.pid for each in self._nodes.values()}
        return [pid for node in NODES for pid in self.hosts.processes_of(node) if pid not in daemons]

    def stop(self) -> None:
        for host in (*NODES, CONTROLLER):
            for pid in self.hosts.processes_of(host):
                try:
                    os.kill(pid, 9)
                except ProcessLookupError:
                    continue
        for daemon in (*self._daemons, *self._nodes.values()):
            daemon.kill()
            daemon.wait(10)
        self.hosts.remove()


def wait_until(is_true: Callable[[], object], seconds: float, what: str) -> None:
    """Wait until something holds; fails with `what` if it does not within `seconds`."""
    end = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.1)
