"""The machines of a job, as the user names them, and the addresses they answer at."""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from plait.core.errors import InputError
from plait.core.names import did_you_mean
from plait.core.shown import shown

LOCAL = "localhost"
# More than any machine can hold.
MOST_SLOTS = 1 << 16
# A name becomes a word of cluster.shell: one that begins with a dash would be taken for an option there, and
# what a shell gives a meaning to has no place in it.
_NAME = re.compile(r"[\w.@%/+=][\w.@%/+=-]*")
_SLOTS = re.compile(r"0*[1-9][0-9]{0,9}")


@dataclass(frozen=True)
class Host:
    """A machine and how many workers it holds."""

    name: str
    slots: int


def parse_hosts(entries: Sequence[str], key: str) -> tuple[Host, ...]:
    """`["w0:2", "w1:2"]` as hosts; a name alone holds one worker. `key` is where they were written."""
    hosts: dict[str, Host] = {}
    for entry in entries:
        host = _parse_host(entry, key)
        if host.name in hosts:
            raise InputError(
                f"{key}: {shown(host.name)} is named twice; give it once with all its workers, such as w0:2"
            )
        hosts[host.name] = host
    if not hosts:
        raise InputError(f"{key}: found no host, expected at least one, such as w0:2")
    return tuple(hosts.values())


def _parse_host(entry: str, key: str) -> Host:
    name, colon, slots = entry.strip().partition(":")
    if not name or (colon and not _SLOTS.fullmatch(slots)):
        raise InputError(f"{key}: found {shown(entry)}, expected 'host' or 'host:workers', such as w0:2")
    if not _NAME.fullmatch(name):
        raise InputError(
            f"{key}: found {shown(entry)}, expected a host's name or address: letters, digits, "
            f"'.', '-', '_' and '@', and no '-' in front"
        )
    if int(slots or 1) > MOST_SLOTS:
        raise InputError(f"{key}: found {shown(entry)}, expected at most {MOST_SLOTS:,} workers on a host")
    return Host(name, int(slots or 1))


def address_of(nic: str | None, host: str, alone: bool) -> str:
    """The address at which this machine can be reached by the job's other hosts, unless it is `alone`.

    With `nic` it is that interface's; else what `host`, the name the user gave this machine, resolves to.
    """
    if nic is None and alone:
        return "127.0.0.1" if host == LOCAL else _resolved(host)
    if nic is None:
        address = _resolved(host)
        if address.startswith("127."):
            # Debian gives a machine's own name such an address, which means another machine elsewhere.
            raise InputError(
                f"-H: on {host} its own name means {address}, which other hosts cannot reach; "
                f"name the interface to use with --nic"
            )
        return address
    interfaces = psutil.net_if_addrs()
    if nic not in interfaces:
        raise InputError(f"--nic: {host} has no interface {nic!r}{did_you_mean(nic, interfaces)}")
    for entry in interfaces[nic]:
        if entry.family == socket.AF_INET:
            return str(entry.address)
    raise InputError(f"--nic: interface {nic!r} of {host} has no IPv4 address")


def _resolved(host: str) -> str:
    try:
        return socket.gethostbyname(host)
    except OSError:
        raise InputError(
            f"-H: the name {host!r} does not resolve on that host; "
            f"name the interface to use with --nic, or give addresses instead of names"
        ) from None


def interface_of(address: str) -> str | None:
    """The interface that carries `address`, or None when none does."""
    for nic, addresses in psutil.net_if_addrs().items():
        if any(a.address == address for a in addresses):
            return nic
    return None
