"""The cluster that a plan is made for: levels of bandwidth, and devices that may differ."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

from plait.core.errors import PlanError
from plait.core.shown import shown

if TYPE_CHECKING:  # settings need no numpy
    import numpy as np
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]

# Planning for this many takes a minute.
MOST_DEVICES = 1 << 14
# The least bandwidth and speed; smaller values would overflow in sums of times.
LEAST = 1e-9


@dataclass(frozen=True)
class Level:
    """One level of the cluster: `count` units joined by links of `bytes_per_s`.

    Replicas sum their gradients at `sum_bytes_per_s`, or at the speed of the links if that is None. Each sum
    takes `sum_latency_s` in addition.
    """

    count: int
    bytes_per_s: float
    sum_bytes_per_s: float | None = None
    sum_latency_s: float = 0.0

    @overload
    def sync_s(self, parameter_bytes: float) -> float: ...
    @overload
    def sync_s(self, parameter_bytes: Floats) -> Floats: ...
    def sync_s(self, parameter_bytes: Any) -> Any:
        """Seconds in which infinitely many units sum their gradients; m units take 1 - 1/m of it.

        Each unit sends and receives all bytes but its share twice, as PipeDream counts them.
        """
        transfer = 4 * parameter_bytes / (self.sum_bytes_per_s or self.bytes_per_s)
        return transfer + self.sum_latency_s * (parameter_bytes > 0)


@dataclass(frozen=True)
class Device:
    """A device relative to the profiled one: with `speed` 0.5 it takes twice as long."""

    speed: float = 1.0
    memory_bytes: float | None = None


@dataclass(frozen=True)
class Cluster:
    """Levels from the innermost out (devices in a host, hosts in a cluster), and the devices' memory.

    `devices` is empty if all are like the profiled one; otherwise it has one entry per device, in the order
    of placement. `latency_s` is that of each transfer, `overhead_s` the time that each microbatch costs the
    worker of a stage in addition to its layers: half of it forward and half backward.

    Examples:
        ```python
        cluster = plait.machines((4, 2), (10e9, 1e9), memory_bytes=16e9)
        cluster.count  # 8
        ```
    """

    levels: tuple[Level, ...]
    memory_bytes: float | None = None
    devices: tuple[Device, ...] = ()
    latency_s: float = 0.0
    overhead_s: float = 0.0

    def __post_init__(self) -> None:
        _check(self)

    @property
    def count(self) -> int:
        """The number of devices."""
        return math.prod(level.count for level in self.levels)

    def flat(self, count: int | None = None) -> Level:
        """All devices (or `count` units) as one level, as fast as the slowest."""
        return Level(
            count or self.count,
            min(level.bytes_per_s for level in self.levels),
            min(level.sum_bytes_per_s or level.bytes_per_s for level in self.levels),
            max(level.sum_latency_s for level in self.levels),
        )

    @property
    def mixed(self) -> bool:
        """Whether the devices differ from one another or from the profiled one."""
        return any(device.speed != 1.0 for device in self.devices) or len(self._memories()) > 1

    @property
    def smallest_memory_bytes(self) -> float:
        """The memory of the smallest device; infinite if no limit was given."""
        limits = self._memories() or {self.memory_bytes}
        return min(math.inf if limit is None else limit for limit in limits)

    def device(self, index: int) -> Device:
        """The device of that index, with the cluster's memory if it has no limit."""
        device = self.devices[index] if self.devices else Device()
        return device if device.memory_bytes is not None else Device(device.speed, self.memory_bytes)

    def _memories(self) -> set[float | None]:
        return {self.device(i).memory_bytes for i in range(len(self.devices))}


def _check(value: Cluster) -> None:
    if not value.levels:
        raise PlanError("found no level of devices; expected at least one, such as 4 devices at 1e9 bytes/s")
    for number, level in enumerate(value.levels, 1):
        if level.count < 1:
            raise PlanError(f"level {number}: found {shown(level.count)} devices, expected at least 1")
        if not LEAST <= level.bytes_per_s < math.inf:
            raise PlanError(
                f"level {number}: found a bandwidth of {level.bytes_per_s:g} bytes/s, expected more than 0"
            )
        sums = 1.0 if level.sum_bytes_per_s is None else level.sum_bytes_per_s
        if not (LEAST <= sums < math.inf and 0 <= level.sum_latency_s < math.inf):
            raise PlanError(
                f"level {number}: found sums at {level.sum_bytes_per_s} bytes/s with a latency of "
                f"{level.sum_latency_s:g} s, expected more than 0 and 0 or more"
            )
    if value.count > MOST_DEVICES:
        raise PlanError(f"found {shown(value.count)} devices, expected {MOST_DEVICES:,} at most")
    if value.memory_bytes is not None and not value.memory_bytes > 0:
        raise PlanError(f"found a memory of {value.memory_bytes:g} bytes per device, expected more than 0")
    for name, seconds in (("a latency", value.latency_s), ("an overhead", value.overhead_s)):
        if not (seconds >= 0 and math.isfinite(seconds)):
            raise PlanError(f"found {name} of {seconds:g} s, expected 0 or more")
    _check_devices(value)


def _check_devices(value: Cluster) -> None:
    if value.devices and len(value.devices) != value.count:
        raise PlanError(
            f"found {len(value.devices)} devices described for {value.count} devices in "
            f"{'x'.join(str(level.count) for level in value.levels)}; expected one each"
        )
    for index, device in enumerate(value.devices):
        if not LEAST <= device.speed <= 1 / LEAST:
            raise PlanError(f"device {index}: found speed {device.speed:g}, expected more than 0")
        if device.memory_bytes is not None and not device.memory_bytes > 0:
            raise PlanError(
                f"device {index}: found {device.memory_bytes:g} bytes of memory, expected more than 0"
            )
