"""Layers that move between workers: who holds what, who needs it, and what therefore travels."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from plait.comm.collectives import exchange_named
from plait.pipeline import named_state
from plait.pipeline.named_state import Tensors, tensors_of
from plait.training.components import Components

# A tensor by name, the rank that sends it, and the rank that it goes to.
Move = tuple[str, int, int]


@dataclass(frozen=True)
class HeldLayers:
    """The parameters and buffers that a worker holds, by name, and the optimizer's state for them."""

    model: Tensors = field(default_factory=dict)
    optimizer: Tensors = field(default_factory=dict)


def held_layers(
    parts: Components, names: Collection[str] | None, optimizer: torch.optim.Optimizer
) -> HeldLayers:
    """What a worker holds: the tensors of these `names` (None: all), and what `optimizer` keeps for them."""
    model = {n: t.detach() for n, t in tensors_of(parts.model).items() if names is None or n in names}
    return HeldLayers(model, named_state.optimizer_state(optimizer, parts.names))


def find_complete(
    marks: Sequence[Sequence[int]], held: Sequence[Collection[str]], names: Collection[str]
) -> int | None:
    """The rank whose progress all go on from: of the last step after which all of `names` are held.

    `held[rank]` is what a rank holds after the step that `marks[rank]` tells of. Of ranks at the same step
    it is one that has not done all that was due then. None where the ranks of no step hold all.
    """
    for step in sorted({mark[0] for mark in marks if mark[0] >= 0}, reverse=True):
        ranks = [rank for rank, mark in enumerate(marks) if mark[0] == step]
        if set(names) <= {name for rank in ranks for name in held[rank]}:
            return min(ranks, key=lambda rank: marks[rank][1])
    return None


def find_moves(held: Sequence[Collection[str]], needed: Mapping[str, Collection[int]]) -> list[Move]:
    """What travels so that each rank has what it needs: nothing that it holds, from the first that does.

    Ranks send in turn: where several hold a tensor, those that need it take it from different ones.
    """
    moves: list[Move] = []
    for name, ranks in needed.items():
        sources = [rank for rank, names in enumerate(held) if name in names]
        missing = [rank for rank in sorted(ranks) if rank not in sources]
        moves += [(name, sources[number % len(sources)], rank) for number, rank in enumerate(missing)]
    return moves


def taken(moves: Sequence[Move], held: HeldLayers, rank: int) -> HeldLayers:
    """What comes to this worker by the moves, which all workers make together; `held` is what it can send.

    What the optimizer keeps for a parameter goes along.
    """
    pairs = sorted({(source, target) for _, source, target in moves})
    going = {target: {name for name, *pair in moves if pair == [rank, target]} for _, target in pairs}
    model = exchange_named({t: _chosen(held.model, names) for t, names in going.items()}, pairs)
    optimizer = exchange_named(
        {t: _chosen(held.optimizer, names, of_state=True) for t, names in going.items()}, pairs
    )
    return HeldLayers(model, optimizer)


def put_beside(parts: Components, layers: HeldLayers) -> None:
    """Give `parts` further layers, beside those that have their values already."""
    own = tensors_of(parts.model)
    with torch.no_grad():
        for name, value in layers.model.items():
            own[name].copy_(value)
    if layers.optimizer:
        state = named_state.optimizer_state(parts.optimizer, parts.names) | layers.optimizer
        named_state.load_optimizer_state(parts.optimizer, parts.names, state)


def _chosen(tensors: Tensors, names: Collection[str], of_state: bool = False) -> Tensors:
    return {
        path: t for path, t in tensors.items() if (path.rpartition("/")[0] if of_state else path) in names
    }
