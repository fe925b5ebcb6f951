"""How deep a schedule fills a pipeline: microbatches in flight, stage by stage."""

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
    """The most microbatches that a replica of `stage` has gone forward with and not yet backward."""
    own = math.ceil(microbatches / layout.replicas(stage))
    if depths and stage in depths:
        return min(depths[stage], own)
    if schedule is Schedule.NONE:
        return 1
    if schedule is Schedule.GPIPE:
        return own
    first = 0 if schedule is Schedule.ZERO_BUBBLE else stage
    return min(math.ceil(layout.devices_from(first) / layout.replicas(stage)), own)


@dataclass(frozen=True)
class Depth:
    """The same for the planner, which knows only how many devices a stage has and how many follow.

    `pipeline_devices` stands for the depth of the whole pipeline where a schedule depends on it.
    """

    schedule: Schedule
    pipeline_devices: int
    microbatches: int | None = None

    def in_flight(self, devices: int, replicas: int) -> int:
        """Microbatches in flight on one replica; `devices` counts its stage's own and all that follow."""
        own = math.inf if self.microbatches is None else math.ceil(self.microbatches / replicas)
        if self.schedule is Schedule.NONE:
            return 1
        if self.schedule is Schedule.GPIPE:
            return int(own)
        if self.schedule is Schedule.ZERO_BUBBLE:
            devices = self.pipeline_devices
        return int(min(math.ceil(devices / replicas), own))

    def fewest_replicas(self, most_in_flight: Floats, after: Floats) -> Floats:
        """The fewest replicas that keep at most `depth` in flight when `after` devices follow."""
        with np.errstate(divide="ignore", invalid="ignore"):
            own = np.inf if self.microbatches is None else self.microbatches / most_in_flight
            if self.schedule is Schedule.NONE:
                wanted = np.ones_like(after)
            elif self.schedule is Schedule.GPIPE:
                wanted = np.broadcast_to(own, after.shape)
            elif self.schedule is Schedule.ZERO_BUBBLE:
                wanted = np.minimum(self.pipeline_devices / most_in_flight, own)
            else:
                follow = np.where(most_in_flight >= 2, after / (most_in_flight - 1), np.inf)
                wanted = np.minimum(np.where(after > 0, follow, 1.0), own)
        return np.where(most_in_flight >= 1, np.maximum(np.ceil(wanted - 1e-9), 1), np.inf)
