"""The rounds of a step: in each, all trials process one microbatch together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from plait.data.loader import Batch, cut

# A trial's part of a round: a microbatch and how many samples it has.
Piece = tuple[Any, int]
# A microbatch for each trial, and each one's share of its trial's batch.
Round = tuple[list[Piece], list[float]]


def rounds_of(batches: Sequence[Batch], accumulate: int) -> list[Round]:
    """The rounds of a step on this worker; none if it has no samples.

    A trial that has nothing to do in a round, as it has fewer samples than others have microbatches, gets its
    own first piece again with a share of zero, or, where it has none, another's without what is not finite:
    zero times that would not be zero.
    """
    cuts = {id(batch): list(cut(batch.content, batch.count, accumulate)) for batch in batches}
    own = [cuts[id(batch)] for batch in batches]
    rounds = []
    for number in range(max(len(microbatches) for microbatches in own)):
        present = [microbatches[number] if number < len(microbatches) else None for microbatches in own]
        there = next(piece for piece in present if piece is not None)
        weights = [0.0 if piece is None else piece[1] / batch.total for piece, batch in zip(present, batches)]
        spares = [microbatches[0] if microbatches else _finite(there) for microbatches in own]
        rounds.append(([piece or spare for piece, spare in zip(present, spares)], weights))
    return rounds


def _finite(piece: Piece) -> Piece:
    content, count = piece
    return pytree.tree_map_only(Tensor, lambda x: x.nan_to_num(0.0, 0.0, 0.0), content), count


def most_rounds(batches: Sequence[Batch], accumulate: int, workers: int) -> list[int]:
    """How many rounds each trial has on the worker with the largest share of its batch."""
    return [min(accumulate, -(-batch.total // workers)) for batch in batches]
