"""What a report says of a run, from its events: pure functions, and values that pages and tables show."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from plait.core import run_events
from plait.core.codec import decode
from plait.core.events import Recorded
from plait.core.shown import listed
from plait.core.units import count_of, show_bytes, show_rate, show_seconds
from plait.launcher.run_dir import GOING_ON
from plait.report.arrays import MessageArrays, OpArrays
from plait.report.curves import Points, curves_of, idle_share_of, work_of
from plait.report.occurrences import Occurrence, changes_of, faults_of
from plait.report.record import RunRecorded
from plait.report.replicas import ReplicaRow, distances_of, replicas_of
from plait.report.timeline import Timeline, make_timeline
from plait.report.trials import TrialRow, trials_of
from plait.schema.plans.plan import Plan


@dataclass(frozen=True)
class StageRow:
    """A stage as planned and as measured, for one microbatch; None if not planned or not measured.

    `sent_bytes` is what was measured of `output_bytes`.
    """

    stage: int
    layers: int | None
    workers: tuple[int, ...]
    planned_s: tuple[float | None, float | None, float | None]
    measured_s: tuple[float | None, float | None, float | None]
    output_bytes: float | None
    sent_bytes: float | None
    memory_bytes: float | None
    measured_memory_bytes: int | None


@dataclass(frozen=True)
class RunData:
    """All that a report of one run shows.

    `facts` are lines of the summary, `curves` points by step and name, `work` seconds by worker and step.
    `state` and `cause` are those of the run's status; times count from `origin`, seconds since the epoch.
    """

    name: str
    state: str
    cause: str | None
    facts: tuple[tuple[str, str], ...]
    curves: Mapping[str, Points]
    work: Mapping[str, Points]
    timeline: Timeline | None
    plan: Plan | None
    stages: tuple[StageRow, ...]
    replicas: tuple[ReplicaRow, ...]
    distances: Mapping[str, Points]
    changes: tuple[Occurrence, ...]
    faults: tuple[Occurrence, ...]
    trials: tuple[TrialRow, ...]
    metric: str
    origin: float


def make_data(
    name: str,
    recorded: RunRecorded,
    plan: Plan | None,
    state: str,
    cause: str | None = None,
    progress: Mapping[str, Any] | None = None,
) -> RunData:
    """The report of a run; `plan` is the plan it was started with, `progress` the one in its status."""
    events = recorded.events
    plan = _last_plan(events, plan)
    timeline = make_timeline(recorded, plan)
    curves = curves_of(events)
    stages = _stages(recorded, plan)
    replicas, trials = replicas_of(events), trials_of(events)
    metrics = [each.event.metric for each in events if isinstance(each.event, run_events.SweepStarted)]
    return RunData(
        name,
        state,
        cause,
        (
            *_facts(events, timeline, plan, curves, replicas, trials, state, progress or {}),
            *_left_out(recorded),
        ),
        curves,
        work_of(events),
        timeline,
        plan,
        stages,
        replicas,
        distances_of(events),
        tuple(changes_of(recorded)),
        tuple(faults_of(events, state, cause)),
        trials,
        metrics[-1] if metrics else "loss",
        events[0].t if events else 0.0,
    )


def _last_plan(events: Sequence[Recorded], plan: Plan | None) -> Plan | None:
    """The plan that the run used last."""
    for each in events:
        event = each.event
        if isinstance(event, run_events.Changed) and event.kind_of_change == "PlanChange":
            plan = decode(Plan, event.change["plan"], "changed: plan")
    return plan


def _of_kind(events: Iterable[Recorded], kind: type[Any]) -> list[Any]:
    return [each.event for each in events if isinstance(each.event, kind)]


def _facts(
    events: Sequence[Recorded],
    timeline: Timeline | None,
    plan: Plan | None,
    curves: Mapping[str, Points],
    replicas: Sequence[ReplicaRow],
    trials: Sequence[TrialRow],
    state: str,
    progress: Mapping[str, Any],
) -> Iterable[tuple[str, str]]:
    """The lines of the summary."""
    for start in _of_kind(events, run_events.RunStarted)[-1:]:
        yield "steps", show_steps(start, curves, progress)
        yield "model", f"{start.model}, {start.parameters:,} parameters, {start.precision}"
        workers = last_workers(events, start.workers)
        before = f" ({start.workers} at first)" if start.workers != workers else ""
        yield "workers", f"{workers} x {start.device}{before}, batch {start.batch_size} over all"
    for start in _of_kind(events, run_events.SweepStarted)[-1:]:
        ended = sum(trial.state != "running" for trial in trials)
        yield "trials", f"{ended} ended of {start.trials} ({start.search} over {listed(start.over, 200)})"
        yield "workers", str(start.workers)
    steps, ends = _of_kind(events, run_events.Step), _of_kind(events, run_events.RunEnded)
    seconds = sum(step.seconds for step in steps)
    if seconds > 0:
        rate = sum(step.samples for step in steps) / seconds
        yield "throughput", f"{show_rate(rate)} samples/s over {show_seconds(seconds)} of training"
    for sweep_end in _of_kind(events, run_events.SweepEnded)[-1:]:
        yield "throughput", f"{show_rate(sweep_end.trial_steps_per_s)} trial steps/s"
        yield "total time", show_seconds(sweep_end.seconds)
    if ends:
        yield "total time", show_seconds(sum(end.seconds for end in ends))
    elif state in GOING_ON and isinstance(progress.get("left_s"), (int, float)):
        yield "time left", show_seconds(progress["left_s"])
    if timeline is not None and timeline.idle_share is not None:
        planned = f" (predicted {plan.idle_share:.0%})" if plan is not None else ""
        yield "idle", f"{timeline.idle_share:.0%} of the workers' time within steps{planned}"
    if replicas:
        waited = statistics.mean(row.wait_share for row in replicas)
        yield "idle", f"{waited:.0%} of the workers' time, waiting for others and averaging"
    elif (share := idle_share_of(events)) is not None:
        yield "idle", f"{share:.0%} of the workers' time within steps, waiting for others and summing"
    if timeline is not None and plan is not None and len(timeline.anchors) > 1 and plan.schedule.synchronous:
        step_s = statistics.median(np.diff(timeline.anchors).tolist())
        yield "a step", f"{show_seconds(step_s)} (median), {show_seconds(plan.step_s)} predicted"
    if ends and ends[-1].memory_bytes:
        yield "memory", f"{show_bytes(ends[-1].memory_bytes)} at most on the worker that kept the record"
    for check in _of_kind(events, run_events.Audited)[-1:]:
        yield "audited", f"largest difference to plain PyTorch {check.largest:.1g} (step {check.step})"


def show_steps(
    start: run_events.RunStarted, curves: Mapping[str, Points], progress: Mapping[str, Any]
) -> str:
    """How many steps a run has taken, of how many; a batch size that changes also changes their number."""
    done = max((int(points[-1][0]) for points in curves.values()), default=start.step)
    total = progress.get("steps", start.steps)
    return f"{done:,} of {total:,}" if isinstance(total, int) else f"{done:,}"


def _left_out(recorded: RunRecorded) -> Iterable[tuple[str, str]]:
    """That some events are not shown, and why."""
    if recorded.unknown:
        left = count_of(len(recorded.unknown), "event")
        yield "not shown", f"{left}, perhaps of another version of Plait; the first: {recorded.unknown[0]}"


def last_workers(events: Iterable[Recorded], count: int) -> int:
    """The last number of workers of a run that began with `count`."""
    for each in events:
        if isinstance(each.event, run_events.RunStarted):
            count = each.event.workers
        elif isinstance(each.event, run_events.WorkersChanged):
            count = len(each.event.members)
    return count


def _stages(recorded: RunRecorded, plan: Plan | None) -> tuple[StageRow, ...]:
    """The stages of a pipeline; of one that never ran by its plan only what was measured."""
    ops = recorded.ops
    count = max(len(plan.stages) if plan is not None else 0, int(ops.stages.max(initial=-1)) + 1)
    memory = {
        each.rank: each.event.memory_bytes
        for each in recorded.events
        if isinstance(each.event, run_events.RunEnded)
    }
    rows = []
    for number in range(count if len(ops) else 0):
        stage = plan.stages[number] if plan is not None and number < len(plan.stages) else None
        of_stage = ops.take(ops.stages == number)
        sent = recorded.messages.take(recorded.messages.stages == number)
        workers = tuple(int(each) for each in np.unique(of_stage.workers))
        halves = [_median_s(of_stage, letter) for letter in "IW"]
        split = sum(each for each in halves if each is not None) if any(halves) else None
        rows.append(
            StageRow(
                number,
                len(stage.layers) if stage is not None else None,
                workers,
                (stage.forward_s, stage.backward_s, stage.update_s) if stage is not None else (None,) * 3,
                (
                    _median_s(of_stage, "F"),
                    split if split is not None else _median_s(of_stage, "B"),
                    _median_s(of_stage, "U"),
                ),
                stage.output_bytes if stage is not None else None,
                _sent_bytes(sent),
                stage.memory_bytes if stage is not None else None,
                max((memory[each] for each in workers if memory.get(each)), default=None),
            )
        )
    return tuple(rows)


def _sent_bytes(messages: MessageArrays) -> float | None:
    """The bytes that a microbatch's forward sends to other workers; None if it sends none."""
    sent = messages.take((messages.ways == ord("s")) & (messages.letters == ord("F")))
    targets = len(np.unique(sent.peer_stages))
    return float(np.median(sent.bytes)) * targets if len(sent) else None


def _median_s(ops: OpArrays, letter: str) -> float | None:
    chosen = ops.letters == ord(letter)
    return float(np.median((ops.ends - ops.starts)[chosen])) if chosen.any() else None
