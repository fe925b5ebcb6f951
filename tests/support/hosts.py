"""Several hosts on one machine: network namespaces joined by a bridge that has a namespace of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid


def missing_for_hosts() -> str | None:
    """Why namespaces cannot be made here, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need the command ip (Debian: iproute2)"
    probe = f"pl-probe-{uuid.uuid4().hex[:6]}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        return f"network namespaces cannot be made here: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", probe], check=False)
    return None


class Hosts:
    """Hosts w0, w1, ... reachable from each other at 10.77.0.N; `shell` is what reaches them."""

    def __init__(self) -> None:
        self._id = uuid.uuid4().hex[:6]
        self._bridge = f"pl-{self._id}-br"
        self._names: dict[str, str] = {}
        self._made: list[str] = []

    @property
    def shell(self) -> str:
        return f"ip netns exec pl-{self._id}-{{host}}"

    def space(self, name: str) -> str:
        """The namespace of a host."""
        return self._names[name]

    def address(self, name: str) -> str:
        """Where the others reach a host."""
        return f"10.77.0.{list(self._names).index(name) + 1}"

    def make(self, *names: str) -> None:
        self._add(self._bridge)
        _ip(self._bridge, "link", "add", "br0", "type", "bridge")
        _ip(self._bridge, "link", "set", "br0", "up")
        for number, name in enumerate(names, 1):
            space = f"pl-{self._id}-{name}"
            self._names[name] = space
            self._add(space)
            port = f"port{number}"
            _run("ip", "-n", space, "link", "add", "eth0", "type", "veth", "peer", "name", port)
            _run("ip", "-n", space, "link", "set", port, "netns", self._bridge)
            _ip(space, "addr", "add", f"10.77.0.{number}/24", "dev", "eth0")
            for nic in ("lo", "eth0"):
                _ip(space, "link", "set", nic, "up")
            _ip(self._bridge, "link", "set", port, "master", "br0")
            _ip(self._bridge, "link", "set", port, "up")

    def _add(self, space: str) -> None:
        _run("ip", "netns", "add", space)
        self._made.append(space)

    def cut(self, name: str) -> None:
        """Take the host's link down, as a pulled cable would."""
        _ip(self._names[name], "link", "set", "eth0", "down")

    def join(self, name: str) -> None:
        """Bring the host's link up again."""
        _ip(self._names[name], "link", "set", "eth0", "up")

    def processes(self) -> list[int]:
        """Processes that still run in any of the hosts."""
        return [pid for name in self._names for pid in self.processes_of(name)]

    def processes_of(self, name: str) -> list[int]:
        """Processes that run in that host."""
        command = ["ip", "netns", "pids", self._names[name]]
        found = subprocess.run(command, capture_output=True, text=True, check=True)
        return [int(pid) for pid in found.stdout.split()]

    def remove(self) -> None:
        for space in self._made:
            subprocess.run(["ip", "netns", "del", space], check=False)


def _ip(space: str, *words: str) -> None:
    _run("ip", "-n", space, *words)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=10)
