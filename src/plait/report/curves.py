"""Curves of a run: points by step, reduced to what a picture can show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from plait.core import run_events
from plait.core.events import Recorded

Points = list[tuple[float, float]]


def curves_of(events: Sequence[Recorded]) -> dict[str, Points]:
    """Values by step; steps that a resumed run takes again replace those before."""
    curves: dict[str, dict[int, float | None]] = {}
    for each in events:
        event = each.event
        if isinstance(event, run_events.RunStarted):
            for curve in curves.values():
                for step in [step for step in curve if step > event.step]:
                    del curve[step]
        elif isinstance(event, run_events.Step):
            rate = event.samples / event.seconds if event.seconds > 0 else None
            values = {"training loss": event.loss, "learning rate": event.lr, "samples/s": rate}
            for name, value in values.items():
                curves.setdefault(name, {})[event.step] = value
        elif isinstance(event, run_events.Evaluated):
            for name, value in event.metrics.items():
                curves.setdefault(f"test {name}", {})[event.step] = value
        elif isinstance(event, run_events.Signals):
            values = {"batch size": event.batch_size, "noise scale (samples)": event.noise_scale}
            for name, value in values.items():
                curves.setdefault(name, {})[event.step] = value
    known = {name: points_of(curve) for name, curve in sorted(curves.items(), key=_place)}
    return {name: points for name, points in known.items() if points and not _is_constant(name, points)}


def _place(named: tuple[str, object]) -> int:
    """Losses and metrics before rates."""
    return ("training" in named[0]) * -2 - ("test" in named[0])


def _is_constant(name: str, points: Points) -> bool:
    return name in ("learning rate", "batch size") and len({value for _, value in points}) == 1


def points_of(curve: Mapping[int, float | None]) -> Points:
    return sorted((step, value) for step, value in curve.items() if value is not None and np.isfinite(value))


def decimated(points: Points, most: int = 1200) -> Points:
    """At most about `most` points: of each bucket of steps the smallest and the largest value."""
    if len(points) <= most:
        return points
    xs, ys = np.array(points).T
    bucket = np.minimum(((xs - xs[0]) / (xs[-1] - xs[0]) * (most // 2)).astype(int), most // 2 - 1)
    order = np.lexsort((ys, bucket))
    edges = np.flatnonzero(np.diff(bucket[order]))
    lowest, highest = np.r_[0, edges + 1], np.r_[edges, len(xs) - 1]
    chosen = np.unique(np.r_[0, order[lowest], order[highest], len(xs) - 1])
    return [points[index] for index in chosen]


def work_of(events: Sequence[Recorded]) -> dict[str, Points]:
    """By worker, the seconds of a step until its gradients were there, if monitors recorded them."""
    curves: dict[int, Points] = {}
    members: Sequence[int] = ()
    for each in events:
        event = each.event
        if isinstance(event, run_events.RunStarted):
            members = range(event.workers)
        elif isinstance(event, run_events.WorkersChanged):
            members = event.members
        elif isinstance(event, run_events.Signals) and len(event.work_s) == len(members):
            for worker, seconds in zip(members, event.work_s):
                curves.setdefault(worker, []).append((event.step, seconds))
    return {f"worker {worker}": points for worker, points in sorted(curves.items())}


def idle_share_of(events: Sequence[Recorded]) -> float | None:
    """The share of the workers' time within steps that they did not work, if monitors recorded it."""
    work_s = step_s = 0.0
    for each in events:
        event = each.event
        if isinstance(event, run_events.Signals) and event.step_s:
            work_s += sum(min(seconds, event.step_s) for seconds in event.work_s)
            step_s += len(event.work_s) * event.step_s
    return 1 - work_s / step_s if step_s else None
