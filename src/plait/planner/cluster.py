"""The machines of a plan, from the user's numbers or from measurements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from plait.core.errors import PlanError
from plait.core.shown import shown
from plait.schema.plans.cluster import Cluster, Device, Level

if TYPE_CHECKING:  # planning needs no torch
    from plait.profiler.link_bandwidth import Link, Sum


def machines(
    counts: tuple[int, ...] | int,
    bytes_per_s: tuple[float, ...] | float,
    memory_bytes: float | None = None,
    devices: tuple[Device, ...] = (),
    latency_s: float = 0.0,
) -> Cluster:
    """A cluster: `machines(4, 1e9)`, or `machines((4, 4), (10e9, 1.25e9))`, innermost level first.

    Args:
        counts: how many devices a host has, how many hosts the cluster has, ...; one number for one level.
        bytes_per_s: the bandwidth of the links of each level.
        memory_bytes: the memory of each device; None is no limit.
        devices: one entry per device, if they are unlike.
        latency_s: that of each transfer.

    Examples:
        ```python
        plait.machines(4, 1e9, memory_bytes=16e9)  # four devices
        plait.machines((4, 4), (10e9, 1.25e9))  # four hosts of four devices
        ```
    """
    counts = (counts,) if isinstance(counts, int) else counts
    rates = (bytes_per_s,) if isinstance(bytes_per_s, (int, float)) else bytes_per_s
    if not (_are(counts, int) and _are(rates, (int, float))):
        raise PlanError(
            f"found {shown(counts)} devices and {shown(rates)} bytes/s, expected numbers: machines(4, 1e9), "
            f"or machines((4, 4), (10e9, 1.25e9)) with the devices of a host first"
        )
    if len(counts) != len(rates):
        raise PlanError(
            f"found {len(counts)} levels of devices ({'x'.join(map(str, counts))}) and {len(rates)} "
            f"bandwidths; expected one bandwidth for each level, the innermost first"
        )
    levels = tuple(Level(count, float(rate)) for count, rate in zip(counts, rates))
    return Cluster(levels, memory_bytes, devices, latency_s)


def _are(values: Any, kinds: type | tuple[type, ...]) -> bool:
    return isinstance(values, (tuple, list)) and all(isinstance(value, kinds) for value in values)


def measured_machines(
    counts: tuple[int, ...],
    links: Sequence[Link],
    sums: Sequence[Sum],
    memory_bytes: float | None = None,
    devices: tuple[Device, ...] = (),
    overhead_s: float = 0.0,
) -> Cluster:
    """A cluster with one or two levels, with the speeds measured within and between hosts.

    Every level has the speed of its slowest link and all-reduce; a single level that of the slowest of all.
    """
    local = _measured(counts[0], [x for x in links if x.same_host], [x for x in sums if x.same_host])
    remote = _measured(
        counts[-1], [x for x in links if not x.same_host], [x for x in sums if not x.same_host]
    )
    if len(counts) == 1:
        levels: tuple[Level | None, ...] = (_measured(counts[0], links, sums),)
    else:
        levels = (local, remote)
    known = tuple(level for level in levels if level is not None)
    if len(counts) > 2 or len(known) < len(counts):
        kinds = sum(level is not None for level in (local, remote))
        raise PlanError(
            f"found {len(counts)} levels ({'x'.join(map(str, counts))}), but links of {kinds} were measured; "
            f"expected a bandwidth for each level, the innermost first"
        )
    return Cluster(known, memory_bytes, devices, max(link.latency_s for link in links), overhead_s)


def _measured(count: int, links: Sequence[Link], sums: Sequence[Sum]) -> Level | None:
    if not links:
        return None
    return Level(
        count,
        min(link.bytes_per_s for link in links),
        min((each.bytes_per_s for each in sums), default=None),
        max((each.latency_s for each in sums), default=0.0),
    )
