"""The rounds of a step: in each, all trials process one microbatch together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from plait.data.loader import Batch, cut

# A trial's part of a round: a microbatch and how many samples it has.
TrialMicrobatch = tuple[Any, int]
# A microbatch for each trial, and each one's share of its trial's batch.
Round = tuple[list[TrialMicrobatch], list[float]]


def rounds_of(batches: Sequence[Batch], microbatches: Sequence[int]) -> list[Round]:
    """The rounds of a step on this worker, each batch in as many `microbatches`; none without samples.

    A trial with fewer microbatches than others gets its first microbatch again in the remaining rounds, with
    a weight of zero. If it has none, it gets that of another trial with NaN and infinities replaced by zero,
    since zero times NaN is NaN.
    """
    cuts = {
        id(batch): list(cut(batch.content, batch.count, count)) for batch, count in zip(batches, microbatches)
    }
    cut_batches = [cuts[id(batch)] for batch in batches]
    rounds = []
    for number in range(max(map(len, cut_batches))):
        present = [parts[number] if number < len(parts) else None for parts in cut_batches]
        there = next(microbatch for microbatch in present if microbatch is not None)
        weights = [
            0.0 if microbatch is None else microbatch[1] / batch.total
            for microbatch, batch in zip(present, batches)
        ]
        spares = [parts[0] if parts else _finite(there) for parts in cut_batches]
        rounds.append(([microbatch or spare for microbatch, spare in zip(present, spares)], weights))
    return rounds


def _finite(microbatch: TrialMicrobatch) -> TrialMicrobatch:
    content, count = microbatch
    return pytree.tree_map_only(Tensor, lambda x: x.nan_to_num(0.0, 0.0, 0.0), content), count


def most_rounds(batches: Sequence[Batch], accumulate: int, workers: int) -> list[int]:
    """How many rounds each trial has on the worker with the largest share of its batch."""
    return [min(accumulate, -(-batch.total // workers)) for batch in batches]
