"""Why the workers of a pipeline were idle, from the operations of all of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from plait.report.arrays import Floats, Ints, OpArrays
from plait.schema.plans.plan import Layout

# Why a worker was idle before an operation, as codes.
CAUSES = (
    "between steps: loading data, preparing, not running",
    "waiting for the forward of the stage before",
    "waiting for the backward of the stage behind",
    "receiving",
    "before an update or the second half of a backward",
    "waiting for other workers, and averaging or summing",
)
BETWEEN, FORWARD, BACKWARD, RECEIVING, OTHER, PEERS = range(len(CAUSES))


def idle_gaps(ops: OpArrays) -> Floats:
    """Idle seconds of the worker before each operation; 0 before its first."""
    gaps = np.zeros(len(ops))
    for worker in np.unique(ops.workers):
        (index,) = np.nonzero(ops.workers == worker)
        ends = np.maximum.accumulate(ops.ends[index])
        gaps[index[1:]] = np.maximum(0.0, ops.starts[index[1:]] - ends[:-1])
    return gaps


def explain(ops: OpArrays, layouts: Sequence[Layout]) -> tuple[Ints, Floats]:
    """Why the worker was idle before each operation, and how long before it its input had left the sender.

    The sender of a forward's input is the forward of the same microbatch in the stage before, that of a
    backward's gradient its backward in the stage behind, in the same pipeline (one of
    `layouts`): the latest that had begun. A sender may be busy for a while after its message has left.
    """
    last = int(ops.stages.max(initial=0))
    forward, backward = ops.letters == ord("F"), np.isin(ops.letters, (ord("B"), ord("I")))
    causes = np.full(len(ops), OTHER)
    causes[forward & (ops.stages == 0)] = BETWEEN
    causes[np.isin(ops.letters, [ord(letter) for letter in "ECASP"])] = BETWEEN
    causes[_after_a_share(ops)] = PEERS
    receiving = (forward & (ops.stages > 0)) | (backward & (ops.stages < last))
    causes[forward & (ops.stages > 0)] = FORWARD
    causes[backward & (ops.stages < last)] = BACKWARD
    pipelines = np.zeros(len(ops), np.int64)
    for number, layout in enumerate(layouts):
        pipelines[np.isin(ops.workers, layout.workers)] = number
    sends = forward | backward
    stage = np.where(receiving & forward, ops.stages - 1, ops.stages) + (receiving & backward)
    microbatch = pipelines * (ops.microbatches.max(initial=0) + 1) + ops.microbatches
    key = 2 * (last + 1) * microbatch + forward
    sent, asked = key + 2 * ops.stages, key + 2 * stage
    starts = ops.starts[receiving]
    sender = _latest(sent[sends], ops.starts[sends], asked[receiving], starts)
    left = np.append(ops.ends[sends], np.inf)[sender]
    received = np.zeros(len(ops))
    received[receiving] = starts - np.minimum(left, starts)
    return causes, received


def _after_a_share(ops: OpArrays) -> npt.NDArray[np.bool_]:
    """Whether what the worker did last before was an interval of which it computed a share."""
    after: npt.NDArray[np.bool_] = np.zeros(len(ops), bool)
    for worker in np.unique(ops.workers):
        (index,) = np.nonzero(ops.workers == worker)
        ends = ops.ends[index]
        is_last = ends >= np.maximum.accumulate(ends)
        last = np.maximum.accumulate(np.where(is_last, np.arange(len(index)), 0))
        after[index[1:]] = ops.letters[index[last[:-1]]] == ord("P")
    return after


def _latest(keys: Ints, times: Floats, asked: Ints, until: Floats) -> Ints:
    """For each key asked for, the index of the latest of `times` with it, not after `until`; -1 for none."""
    none = np.full(len(asked), -1)
    if not len(keys) or not len(asked):
        return none
    numbers = np.concatenate([keys, asked])
    span = int(max(times.max(), until.max()) * 1e6) + 2
    if (int(numbers.max()) + 1) * span > 1 << 62:
        _, numbers = np.unique(numbers, return_inverse=True)
    if (int(numbers.max()) + 1) * span > 1 << 62:  # a run of years
        return none
    # Times may be off by a microsecond of rounding.
    known = numbers[: len(keys)] * span + np.maximum(0, (times * 1e6)).astype(np.int64)
    wanted = numbers[len(keys) :] * span + np.maximum(0, (until * 1e6)).astype(np.int64) + 1
    order = np.argsort(known)
    place = np.searchsorted(known[order], wanted, side="right") - 1
    match = order[np.maximum(place, 0)]
    same = (place >= 0) & (keys[match] == asked)
    return np.where(same, match, -1)


def idle_seconds(
    ops: OpArrays, workers: Sequence[int], gaps: Floats, causes: Ints, received: Floats
) -> Floats:
    """Idle seconds by worker and cause; empty if no operations of stages were recorded."""
    if not np.isin(ops.letters, (ord("F"), ord("B"))).any():
        return np.zeros((0, len(CAUSES)))
    receiving = np.minimum(gaps, received)
    row = np.searchsorted(np.array(workers), ops.workers)
    idle = np.zeros((len(workers), len(CAUSES)))
    np.add.at(idle, (row, causes), gaps - receiving)
    np.add.at(idle, (row, np.full(len(ops), RECEIVING)), receiving)
    return idle
