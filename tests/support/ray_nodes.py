"""A Ray cluster on one machine: a head and nodes, each with its raylet in a network namespace of its own."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from support.hosts import Hosts, missing_for_hosts

PORT = 6399
HEAD = "head"
# For each command; a raylet takes a few seconds to start.
DEADLINE_S = 180


def missing_for_ray() -> str | None:
    """Why there can be no Ray cluster here, or None."""
    if importlib.util.find_spec("ray") is None:
        return 'ray is not installed: pip install "plait[ray]"'
    return missing_for_hosts()


class RayNodes:
    """The cluster; the driver of a test runs on the head, which holds no workers."""

    def __init__(self, *names: str, cpus: int = 1) -> None:
        self._hosts = Hosts()
        # Short: it holds sockets, whose paths have 107 characters at most.
        self._folder = tempfile.TemporaryDirectory(prefix="plr")
        self._hosts.make(HEAD, *names)
        self._cpus = cpus
        self.addresses = {name: f"10.77.0.{number}" for number, name in enumerate((HEAD, *names), 1)}
        self.address = f"{self.addresses[HEAD]}:{PORT}"
        head = ["--head", f"--port={PORT}", "--num-cpus=0", "--include-dashboard=false"]
        try:
            self._start(HEAD, [*head, f"--temp-dir={self._folder.name}"])
            # One after the other: raylets of one machine look which names of sockets are free.
            for name in names:
                self.start(name)
        except BaseException:
            self.close()
            raise

    def start(self, name: str) -> None:
        """Start the raylet of a node."""
        self._start(name, [f"--address={self.address}", f"--num-cpus={self._cpus}"])

    def _start(self, name: str, options: list[str]) -> None:
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *options]
        common = ["--object-store-memory=80000000", "--disable-usage-stats"]
        here = [f"--node-ip-address={self.addresses[name]}", f"--node-name={name}"]
        self.run(name, [*command, *common, *here])

    def command(self, name: str, command: list[str]) -> list[str]:
        """`command` as it is run on a node."""
        return ["nsenter", f"--net=/run/netns/{self._hosts.space(name)}", *command]

    def environment(self) -> dict[str, str]:
        """The variables of raylets and of drivers, with this process's Python path."""
        path = os.pathsep.join(folder for folder in sys.path if folder)
        return {
            **os.environ,
            "PYTHONPATH": path,
            "RAY_ADDRESS": self.address,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_DISABLE_IMPORT_WARNING": "1",
            "OMP_NUM_THREADS": "1",
            "RAY_raylet_start_wait_time_s": str(DEADLINE_S),
        }

    def run(self, name: str, command: list[str]) -> str:
        """Run a command on a node; returns its output."""
        done = subprocess.run(
            self.command(name, command),
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        assert done.returncode == 0, f"{' '.join(command)}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
        return done.stdout

    def start_driver(self, command: list[str], folder: Path) -> subprocess.Popen[str]:
        """Start a command on the head."""
        return subprocess.Popen(
            self.command(HEAD, command),
            env=self.environment(),
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def kill(self, name: str) -> None:
        """End a node as a pulled plug would: its link is down, and all of its processes are gone."""
        self._hosts.cut(name)
        self._end(self.processes(name))

    def drain(self, name: str) -> None:
        """Tell Ray that a node is taken away in a minute."""
        (node,) = self.ask(f"print(*alive({name!r}))").split()
        ray = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", f"--address={self.address}"]
        reason = ["--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=a test"]
        self.run(HEAD, [*ray, f"--node-id={node}", *reason, "--deadline-remaining-seconds=60"])

    def ask(self, question: str) -> str:
        """What a script on the head prints; `alive(name)` are the nodes of that name that Ray knows."""
        script = "import time, ray; ray.init(address='auto', logging_level='ERROR')\n"
        script += "living = lambda: (n for n in ray.nodes() if n['Alive'])\n"
        script += "alive = lambda name: [n['NodeID'] for n in living() if n['NodeName'] == name]\n"
        return self.run(HEAD, [sys.executable, "-c", script + question])

    def restart(self, name: str) -> None:
        """Plug it in again, once Ray has noticed that it is gone: two nodes would have its name."""
        self.ask(f"while alive({name!r}): time.sleep(0.2)")
        self._hosts.join(name)
        self.start(name)

    def processes(self, name: str) -> list[int]:
        space = self._hosts.space(name)
        found = subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True, check=True)
        return [int(pid) for pid in found.stdout.split()]

    def close(self) -> None:
        """End all processes in the namespaces, which only this cluster has, and remove them."""
        for name in self.addresses:
            self._end(self.processes(name))
        self._hosts.remove()
        self._folder.cleanup()

    def _end(self, pids: list[int]) -> None:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        end = time.monotonic() + 10
        while any(Path(f"/proc/{pid}").exists() and not _is_zombie(pid) for pid in pids):
            assert time.monotonic() < end
            time.sleep(0.05)


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
