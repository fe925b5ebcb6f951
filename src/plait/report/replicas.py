"""How workers that average weights kept up and agreed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from plait.core import run_events
from plait.core.events import Recorded
from plait.report.curves import Points


@dataclass(frozen=True)
class ReplicaRow:
    """How one worker that averages weights kept up with the others."""

    worker: int
    updates: int
    samples_per_s: float
    wait_share: float
    group_size: float | None
    bytes_sent: int
    distance: float | None


def replicas_of(events: Sequence[Recorded]) -> tuple[ReplicaRow, ...]:
    paces: dict[int, list[run_events.Pace]] = {}
    distance: dict[int, float] = {}
    for each in events:
        if isinstance(each.event, run_events.Pace):
            paces.setdefault(each.rank, []).append(each.event)
        elif isinstance(each.event, run_events.Settled):
            distance[each.rank] = each.event.distance
    rows = []
    for worker, of_worker in sorted(paces.items()):
        seconds, groups = sum(p.seconds for p in of_worker), sum(p.groups for p in of_worker)
        members = sum(p.groups * (p.group_size or 0.0) for p in of_worker)
        rows.append(
            ReplicaRow(
                worker,
                sum(p.updates for p in of_worker),
                sum(p.samples for p in of_worker) / seconds if seconds else 0.0,
                sum(p.wait_share * p.seconds for p in of_worker) / seconds if seconds else 0.0,
                members / groups if groups else None,
                sum(p.bytes_sent for p in of_worker),
                distance.get(worker),
            )
        )
    return tuple(rows)


def distances_of(events: Sequence[Recorded]) -> dict[str, Points]:
    """By worker, how far its weights were from the mean when all took the mean."""
    curves: dict[str, Points] = {}
    for each in events:
        if isinstance(each.event, run_events.Settled) and np.isfinite(each.event.distance):
            curves.setdefault(f"worker {each.rank}", []).append((each.event.step, each.event.distance))
    return dict(sorted(curves.items(), key=lambda curve: int(curve[0].split()[-1])))
