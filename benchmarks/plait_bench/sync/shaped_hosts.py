"""Several hosts on one machine, for experiments: network namespaces on a bridge, with links slowed by tc."""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from plait.schema.hosts import Host
from plait.schema.placement import Placement

NIC = "eth0"


def missing_for_shaping() -> str | None:
    """Why such hosts cannot be made here, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for command in ("ip", "tc"):
        if shutil.which(command) is None:
            return f"the command {command} is missing (Debian: iproute2)"
    try:
        with bridged_hosts(["w0"]) as hosts:
            hosts.shape("w0", "100mbit")
            return None
    except subprocess.CalledProcessError as failure:
        return f"{' '.join(failure.cmd)} failed: {failure.stderr.decode().strip()}"


class BridgedHosts:
    """Hosts on a bridge, whose links can be slowed while they are in use."""

    def __init__(self, mark: str, names: Sequence[str]) -> None:
        self._mark = mark
        self._names = list(names)
        self._bridge = f"{mark}-bridge"
        self._shell = f"ip netns exec {mark}-{{host}}"

    def _ends(self, name: str) -> list[tuple[str, str]]:
        """Both ends of a host's link, each of which shapes what leaves it."""
        port = f"port{self._names.index(name) + 1}"
        return [(f"{self._mark}-{name}", NIC), (self._bridge, port)]

    def placement(self, workers: int) -> Placement:
        """This many workers on each of the hosts, with a thread each."""
        hosts = tuple(Host(name, workers) for name in self._names)
        return Placement(hosts, shell=self._shell, nic=NIC, threads=1)

    def shape(self, name: str, rate: str) -> None:
        """Slow the link of a host to `rate`, both ways."""
        for space, nic in self._ends(name):
            _shape(space, nic, rate)

    def free(self, name: str) -> None:
        """Let the link of a host be as fast as it can again."""
        for space, nic in self._ends(name):
            _run("tc", "-n", space, "qdisc", "del", "dev", nic, "root")


@contextmanager
def bridged_hosts(names: Sequence[str]) -> Iterator[BridgedHosts]:
    """Hosts of these names, which answer at 10.78.0.1 and so on, on the interface `NIC`."""
    mark = f"plait-{uuid.uuid4().hex[:6]}"
    bridge = f"{mark}-bridge"
    made: list[str] = []
    try:
        _add(bridge, made)
        _run("ip", "-n", bridge, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", bridge, "link", "set", "br0", "up")
        for number, name in enumerate(names, 1):
            _join(f"{mark}-{name}", bridge, number, made)
        yield BridgedHosts(mark, names)
    finally:
        for space in made:
            subprocess.run(["ip", "netns", "del", space], check=False)


def _add(space: str, made: list[str]) -> None:
    _run("ip", "netns", "add", space)
    made.append(space)


def _join(space: str, bridge: str, number: int, made: list[str]) -> None:
    """Make a namespace and plug it into the bridge."""
    _add(space, made)
    port = f"port{number}"
    _run("ip", "-n", space, "link", "add", NIC, "type", "veth", "peer", "name", port)
    _run("ip", "-n", space, "link", "set", port, "netns", bridge)
    _run("ip", "-n", space, "addr", "add", f"10.78.0.{number}/24", "dev", NIC)
    for nic in ("lo", NIC):
        _run("ip", "-n", space, "link", "set", nic, "up")
    _run("ip", "-n", bridge, "link", "set", port, "master", "br0")
    _run("ip", "-n", bridge, "link", "set", port, "up")


def _shape(space: str, nic: str, rate: str) -> None:
    words = ["root", "tbf", "rate", rate, "burst", "64kb", "latency", "50ms"]
    _run("tc", "-n", space, "qdisc", "add", "dev", nic, *words)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=10)
