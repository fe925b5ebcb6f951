"""The hosts of a job, as the user names them, and their addresses."""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from plait.core.errors import InputError
from plait.core.names import did_you_mean
from plait.core.shown import shown

LOCAL = "localhost"
# An upper bound: no machine runs more workers.
MAX_SLOTS = 1 << 16
# A name becomes an argument of cluster.shell: a leading dash would make it an option, and characters that are
# special to a shell are not allowed.
_NAME = re.compile(r"[\w.@%/+=][\w.@%/+=-]*")
_SLOTS = re.compile(r"0*[1-9][0-9]{0,9}")


@dataclass(frozen=True)
class Host:
    """A machine and the number of workers it runs.

    `address` is where the job's other hosts reach it; None if it is found from the name.
    """

    name: str
    slots: int
    address: str | None = None


def parse_hosts(entries: Sequence[str], key: str, slots: int = 1) -> tuple[Host, ...]:
    """Parse `["w0:2", "w1:2"]`; a name without a number runs `slots` workers. Errors name `key`."""
    hosts: dict[str, Host] = {}
    for entry in entries:
        host = _parse_host(entry, key, slots)
        if host.name in hosts:
            raise InputError(
                f"{key}: {shown(host.name)} is listed twice; list it once with all its workers, such as w0:2"
            )
        hosts[host.name] = host
    if not hosts:
        raise InputError(f"{key}: found no host, expected at least one, such as w0:2")
    return tuple(hosts.values())


def _parse_host(entry: str, key: str, default: int) -> Host:
    name, colon, slots = entry.strip().partition(":")
    if not name or (colon and not _SLOTS.fullmatch(slots)):
        raise InputError(f"{key}: found {shown(entry)}, expected 'host' or 'host:workers', such as w0:2")
    if not _NAME.fullmatch(name):
        raise InputError(
            f"{key}: found {shown(entry)}, expected a host's name or address: letters, digits, "
            f"'.', '-', '_' and '@', and no '-' in front"
        )
    if int(slots or default) > MAX_SLOTS:
        raise InputError(f"{key}: found {shown(entry)}, expected at most {MAX_SLOTS:,} workers on a host")
    return Host(name, int(slots or default))


def address_of(nic: str | None, host: Host, single_host: bool) -> str:
    """The address at which the job's other hosts reach this machine; any address if it is the `single_host`.

    With `nic`, the address of that interface; otherwise that of `host` or, if it has none, what its name
    resolves to.
    """
    name = host.name
    if nic is None and host.address is not None:
        return host.address
    if nic is None and single_host:
        return "127.0.0.1" if name == LOCAL else _resolved(name)
    if nic is None:
        address = _resolved(name)
        if address.startswith("127."):
            # Debian maps a machine's own name to 127.0.1.1; on another host it means that host itself.
            raise InputError(
                f"-H: on {name} its own name resolves to {address}, which other hosts cannot reach; "
                f"name the interface to use with --nic"
            )
        return address
    import psutil  # slow to import, and needed for other hosts only

    interfaces = psutil.net_if_addrs()
    if nic not in interfaces:
        raise InputError(f"--nic: {name} has no interface {nic!r}{did_you_mean(nic, interfaces)}")
    for entry in interfaces[nic]:
        if entry.family == socket.AF_INET:
            return str(entry.address)
    raise InputError(f"--nic: interface {nic!r} of {name} has no IPv4 address")


def _resolved(host: str) -> str:
    try:
        return socket.gethostbyname(host)
    except OSError:
        raise InputError(
            f"-H: the name {host!r} does not resolve on that host; "
            f"name the interface to use with --nic, or give addresses instead of names"
        ) from None


def interface_of(address: str) -> str | None:
    """The network interface that has `address`, or None."""
    import psutil

    for nic, addresses in psutil.net_if_addrs().items():
        if any(a.address == address for a in addresses):
            return nic
    return None
