"""The number of microbatches in flight under a schedule, by stage."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from plait.graph.ideals import Floats
from plait.schema.plans.plan import Layout
from plait.schema.plans.schedules import Schedule

__all__ = ["Depth", "Schedule", "in_flight"]


def in_flight(
    schedule: Schedule,
    layout: Layout,
    stage: int,
    microbatches: int,
    depths: Mapping[int, int] | None = None,
) -> int:
    """The maximum number of microbatches in flight on a replica of `stage`."""
    per_replica = math.ceil(microbatches / layout.replicas(stage))
    if depths and stage in depths:
        return min(depths[stage], per_replica)
    if schedule is Schedule.NONE:
        return 1
    if schedule is Schedule.GPIPE:
        return per_replica
    first = 0 if schedule is Schedule.ZERO_BUBBLE else stage
    return min(math.ceil(layout.devices_from(first) / layout.replicas(stage)), per_replica)


@dataclass(frozen=True)
class Depth:
    """The same for the planner, which knows only the devices of a stage and how many follow.

    `pipeline_devices` is the depth of the whole pipeline, for schedules that depend on it.
    """

    schedule: Schedule
    pipeline_devices: int
    microbatches: int | None = None

    def in_flight(self, devices: int, replicas: int) -> int:
        """Microbatches in flight on one replica; `devices` counts those of its stage and all later ones."""
        per_replica = math.inf if self.microbatches is None else math.ceil(self.microbatches / replicas)
        if self.schedule is Schedule.NONE:
            return 1
        if self.schedule is Schedule.GPIPE:
            return int(per_replica)
        if self.schedule is Schedule.ZERO_BUBBLE:
            devices = self.pipeline_devices
        return int(min(math.ceil(devices / replicas), per_replica))

    def fewest_replicas(self, most_in_flight: Floats, after: Floats) -> Floats:
        """The fewest replicas with at most `most_in_flight`, if `after` devices follow."""
        with np.errstate(divide="ignore", invalid="ignore"):
            per_replica = np.inf if self.microbatches is None else self.microbatches / most_in_flight
            if self.schedule is Schedule.NONE:
                wanted = np.ones_like(after)
            elif self.schedule is Schedule.GPIPE:
                wanted = np.broadcast_to(per_replica, after.shape)
            elif self.schedule is Schedule.ZERO_BUBBLE:
                wanted = np.minimum(self.pipeline_devices / most_in_flight, per_replica)
            else:
                follow = np.where(most_in_flight >= 2, after / (most_in_flight - 1), np.inf)
                wanted = np.minimum(np.where(after > 0, follow, 1.0), per_replica)
        return np.where(most_in_flight >= 1, np.maximum(np.ceil(wanted - 1e-9), 1), np.inf)
