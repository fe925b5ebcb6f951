"""The timeline of a run: what each worker did when, why it was idle, and what the plan predicted.

A long run has more operations than a page can hold. All of them are counted in an overview, the share of each
kind of work in equal buckets of time; single operations are kept for windows spread over the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite

import numpy as np
import numpy.typing as npt

from plait.core.codec import encode
from plait.core.run_events import (
    Audited,
    CheckpointSaved,
    Evaluated,
    Pace,
    RunStarted,
    Signals,
    Step,
    WorkersChanged,
)
from plait.pipeline.op_timings import OpTiming, operations_event
from plait.planner import predict
from plait.report.arrays import EventColumns, Floats, Ints, MessageArrays, OpArrays
from plait.report.idle import BETWEEN, explain, idle_gaps, idle_seconds
from plait.report.record import RunRecorded
from plait.schema.plans.plan import Plan

# Operations that the page holds one by one, in how many windows, and buckets of the overview of all workers.
MOST_OPERATIONS = 60_000
WINDOWS = 12
MOST_BUCKETS = 1 << 18
FEWEST_BUCKETS, MOST_BUCKETS_OF_WORKER = 1 << 10, 1 << 13
MOST_ANCHORS = 20_000
# Work that has no microbatch: E evaluation, C checkpoint, A audit, S steps recorded as a whole only,
# and P an interval in which a worker computed for a share of the time; w is waiting for others.
_LETTERS = {Evaluated: "E", CheckpointSaved: "C", Audited: "A"}
OVERVIEW = ("F", "BIW", "U", "ECA", "SP", "w")
LABELS = {
    "F": "forward",
    "B": "backward",
    "I": "backward, input",
    "W": "backward, weights",
    "U": "update",
    "E": "evaluation",
    "C": "checkpoint",
    "A": "audit",
    "S": "steps",
    "P": "computing (share of an interval)",
}


@dataclass(frozen=True)
class Timeline:
    """What a page draws; seconds count from `origin`.

    `ops` and `messages` are those kept one by one, within `windows`; `causes` says why the worker was idle
    before each operation, and `received_s` how long before its start the input had left its sender (0 if not
    known). `overview` has for each worker and bucket the share of time in each group of `OVERVIEW`. `idle_s`
    is summed over all operations, by worker and cause, `other_s` over evaluations, checkpoints and audits.
    `anchors` are when a pipeline began to fill;
    `predicted` has times from there.
    """

    origin: float
    end_s: float
    workers: tuple[int, ...]
    ops: OpArrays
    causes: Ints
    received_s: Floats
    messages: MessageArrays
    windows: tuple[tuple[float, float], ...]
    overview: Floats
    idle_s: Floats
    busy_s: Floats
    other_s: Floats
    total: int
    anchors: Floats
    predicted: OpArrays

    @property
    def idle_share(self) -> float | None:
        """The share of the workers' time within steps that they were idle; None without operations."""
        idle = float(self.idle_s[:, BETWEEN + 1 :].sum())
        busy = float(self.busy_s.sum())
        return idle / (idle + busy) if self.idle_s.size and idle + busy > 0 else None


def make_timeline(recorded: RunRecorded, plan: Plan | None) -> Timeline | None:
    """The timeline of a run; None if nothing in its record has a time."""
    ops = OpArrays.joined([recorded.ops, _intervals(recorded, with_steps=not len(recorded.ops))])
    if not len(ops):
        return None
    origin, end_s = float(ops.starts.min()), float(ops.ends.max() - ops.starts.min())
    ops, messages = ops.shifted(-origin), recorded.messages.shifted(-origin)
    workers = tuple(int(each) for each in np.unique(ops.workers))
    layouts = [plan.layout(number) for number in range(plan.pipelines)] if plan is not None else []
    causes, received = explain(ops, layouts)
    gaps = idle_gaps(ops)
    chosen, windows = _chosen(ops.starts)
    is_first = (ops.letters == ord("F")) & (ops.stages == 0) & (ops.microbatches == 0)
    if layouts:  # the prediction is of the first pipeline
        is_first &= np.isin(ops.workers, layouts[0].workers)
    return Timeline(
        origin,
        end_s,
        workers,
        ops.take(chosen),
        causes[chosen],
        received[chosen],
        messages.take(_within(messages, windows)),
        windows,
        _overview(OpArrays.joined([ops, _waits(ops, gaps, causes)]), workers, end_s),
        idle_seconds(ops, workers, gaps, causes, received),
        np.array([_seconds(ops, worker, "FBIWU") for worker in workers]),
        np.array([_seconds(ops, worker, "ECA") for worker in workers]),
        len(ops),
        ops.starts[is_first][:MOST_ANCHORS],
        _predicted(plan),
    )


def _waits(ops: OpArrays, gaps: Floats, causes: Ints) -> OpArrays:
    """The idle time before operations that other workers are the reason of."""
    waits = (gaps > 0) & (causes != BETWEEN)
    chosen, seconds = ops.take(waits), gaps[waits]
    letters = np.full(len(chosen), ord("w"))
    return replace(chosen, letters=letters, starts=chosen.starts - seconds, ends=chosen.starts)


def _intervals(recorded: RunRecorded, with_steps: bool) -> OpArrays:
    """Evaluations, checkpoints, audits and, if no operations were recorded, the intervals of steps.

    All workers take part in them; the first one records them. Each worker that averages records its
    intervals. Where the work of some steps of an interval was measured (`signals`), each worker has the
    share that it computed in them.
    """
    stages = [int(each) for each in np.unique(recorded.ops.workers)]
    rows: list[tuple[int, int, int, int, float, float]] = []
    has_pace = any(isinstance(each.event, Pace) for each in recorded.events)
    shares = _shares(recorded)
    members: Sequence[int] = stages
    before = 0
    for each in recorded.events:
        event, t = each.event, each.t
        if isinstance(event, Audited) and event.trial is not None:
            continue  # a trial of a sweep, which has no timeline
        if isinstance(event, RunStarted):
            members, before = stages or range(event.workers), event.step
        elif isinstance(event, WorkersChanged):
            members = stages or event.members
        elif isinstance(event, (Evaluated, CheckpointSaved, Audited)):
            letter = ord(_LETTERS[type(event)])
            rows += [
                (worker, letter, 0, event.step, t - event.seconds, t) for worker in members or [each.rank]
            ]
        elif isinstance(event, Step) and with_steps and not has_pace:
            measured = [shares[step] for step in range(before + 1, event.step + 1) if step in shares]
            measured = [of_step for of_step in measured if len(of_step) == len(members)]
            before = event.step
            if not measured:
                rows += [(worker, ord("S"), 0, event.step, t - event.seconds, t) for worker in members]
                continue
            for worker, share in zip(members, np.mean(measured, axis=0).tolist()):
                end = t - event.seconds * (1 - share)
                rows.append((worker, ord("P"), 0, event.step, t - event.seconds, end))
        elif isinstance(event, Pace) and with_steps:
            computing = event.seconds * (1 - event.wait_share)
            rows.append(
                (each.rank, ord("P"), 0, event.step, t - event.seconds, t - event.seconds + computing)
            )
    timed = [row for row in rows if isfinite(row[4]) and isfinite(row[5])]
    table = np.array(timed, np.float64).reshape(-1, 6)
    whole = table[:, :4].astype(np.int64)
    return OpArrays(whole[:, 0], whole[:, 1], whole[:, 2], whole[:, 3], table[:, 4], table[:, 5])


def _shares(recorded: RunRecorded) -> dict[int, list[float]]:
    """By step, the share of it that each worker computed, where monitors measured it."""
    return {
        each.event.step: [min(1.0, work / each.event.step_s) for work in each.event.work_s]
        for each in recorded.events
        if isinstance(each.event, Signals) and each.event.step_s
    }


def _seconds(ops: OpArrays, worker: int, letters: str) -> float:
    """The seconds that a worker spent in operations of these kinds."""
    chosen = (ops.workers == worker) & np.isin(ops.letters, [ord(letter) for letter in letters])
    return float((ops.ends - ops.starts)[chosen].sum())


def _chosen(starts: Floats) -> tuple[Ints, tuple[tuple[float, float], ...]]:
    """The operations to keep, and the windows of time in which there are all."""
    count = len(starts)
    if count <= MOST_OPERATIONS:
        return np.arange(count), ((float(starts[0]), float("inf")),)
    each = MOST_OPERATIONS // WINDOWS
    first = np.linspace(0, count - each, WINDOWS).astype(np.int64)
    indices = (first[:, None] + np.arange(each)).ravel()
    ends = starts[first + each - 1]
    return indices, tuple((float(a), float(b)) for a, b in zip(starts[first], ends))


def _within(messages: MessageArrays, windows: Sequence[tuple[float, float]]) -> npt.NDArray[np.bool_]:
    """Which messages overlap a window."""
    within: npt.NDArray[np.bool_] = np.zeros(len(messages), bool)
    for start, end in windows:
        within |= (messages.ends >= start) & (messages.starts <= end)
    return within


def _overview(ops: OpArrays, workers: Sequence[int], end_s: float) -> Floats:
    """The share of each bucket of time that each worker spent in each kind of work."""
    enough = max(FEWEST_BUCKETS, 2 * len(ops) // len(workers))
    buckets = max(1, min(enough, MOST_BUCKETS_OF_WORKER, MOST_BUCKETS // len(workers)))
    width = max(end_s, 1e-9) / buckets
    group_of = np.full(256, -1)
    for number, letters in enumerate(OVERVIEW):
        group_of[[ord(letter) for letter in letters]] = number
    known = group_of[ops.letters] >= 0
    kind = group_of[ops.letters[known]]
    row = np.searchsorted(np.array(workers), ops.workers[known])
    starts, ends = ops.starts[known] / width, ops.ends[known] / width
    shares = np.zeros((len(workers), len(OVERVIEW), buckets + 1))
    first = np.clip(starts.astype(np.int64), 0, buckets - 1)
    last = np.clip(ends.astype(np.int64), 0, buckets - 1)
    # Most operations are within one bucket. Of the others, the ends are added first, then what is between.
    inside = first == last
    np.add.at(shares, (row[inside], kind[inside], first[inside]), (ends - starts)[inside])
    long = ~inside
    np.add.at(shares, (row[long], kind[long], first[long]), (first + 1 - starts)[long])
    np.add.at(shares, (row[long], kind[long], last[long]), (ends - last)[long])
    between = np.zeros_like(shares)
    np.add.at(between, (row[long], kind[long], first[long] + 1), 1.0)
    np.add.at(between, (row[long], kind[long], last[long]), -1.0)
    shares += between.cumsum(axis=2)
    overview: Floats = np.clip(shares[:, :, :buckets], 0.0, 1.0)
    return overview


def _predicted(plan: Plan | None) -> OpArrays:
    """One step of the first pipeline as the planner predicts it; nothing without a plan."""
    timings: dict[int, list[OpTiming]] = {}
    for each in predict(plan).simulation.ops if plan is not None else ():
        timings.setdefault(each.worker, []).append(OpTiming(each.op, each.start_s, each.end_s))
    parts = []
    for worker, ops in timings.items():
        columns = EventColumns(OpArrays)
        columns.add(encode(operations_event(0, ops)))
        parts.append(columns.arrays(worker))
    return OpArrays.joined(parts)
