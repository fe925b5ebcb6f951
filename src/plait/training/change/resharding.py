"""Moving layers between workers: which rank holds which tensors, which needs them, and who sends what."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from plait.comm.collectives import exchange_named
from plait.pipeline import named_state
from plait.pipeline.named_state import Tensors, tensors_of
from plait.training.components import Components

# The name of a tensor, the rank that sends it, and the rank that receives it.
Move = tuple[str, int, int]


@dataclass(frozen=True)
class LayerState:
    """The state of the layers that a worker holds, by name.

    `model` has parameters and buffers, `optimizer` the optimizer's state, and `sync` that of the averaging,
    which is empty under all-reduce.
    """

    model: Tensors = field(default_factory=dict)
    optimizer: Tensors = field(default_factory=dict)
    sync: Tensors = field(default_factory=dict)

    def __or__(self, other: LayerState) -> LayerState:
        return LayerState(self.model | other.model, self.optimizer | other.optimizer, self.sync | other.sync)


def layer_state(
    components: Components, names: Collection[str] | None, optimizer: torch.optim.Optimizer
) -> LayerState:
    """The tensors of these `names` (None: all) on this worker, and the state of `optimizer` for them."""
    model = {n: t.detach() for n, t in tensors_of(components.model).items() if names is None or n in names}
    return LayerState(model, named_state.optimizer_state(optimizer, components.names))


def find_complete(
    marks: Sequence[Sequence[int]], held: Sequence[Collection[str]], names: Collection[str]
) -> int | None:
    """The rank whose progress all workers continue from: at the last step for which all of `names` are held.

    `held[rank]` are the names that a rank holds, after the step `marks[rank][0]`. Of ranks at the same step,
    the one that has done the least of what was due after it. None if at no step all names are held.
    """
    for step in sorted({mark[0] for mark in marks if mark[0] >= 0}, reverse=True):
        ranks = [rank for rank, mark in enumerate(marks) if mark[0] == step]
        if set(names) <= {name for rank in ranks for name in held[rank]}:
            return min(ranks, key=lambda rank: marks[rank][1])
    return None


def find_moves(held: Sequence[Collection[str]], needed: Mapping[str, Collection[int]]) -> list[Move]:
    """The moves after which each rank has what it needs.

    If several ranks hold a tensor, they take turns in sending it.
    """
    moves: list[Move] = []
    for name, ranks in needed.items():
        sources = [rank for rank, names in enumerate(held) if name in names]
        missing = [rank for rank in sorted(ranks) if rank not in sources]
        moves += [(name, sources[number % len(sources)], rank) for number, rank in enumerate(missing)]
    return moves


def receive_layers(moves: Sequence[Move], held: LayerState, rank: int) -> LayerState:
    """Execute the moves, sending from `held`; returns what this worker received. All workers call it.

    What is kept for a parameter moves with it.
    """
    pairs = sorted({(source, target) for _, source, target in moves})
    outgoing = {target: {name for name, *pair in moves if pair == [rank, target]} for _, target in pairs}

    def exchange(tensors: Tensors, of_state: bool) -> Tensors:
        chosen = {target: _chosen(tensors, names, of_state) for target, names in outgoing.items()}
        return exchange_named(chosen, pairs)

    return LayerState(exchange(held.model, False), exchange(held.optimizer, True), exchange(held.sync, True))


def merge_into(components: Components, layers: LayerState) -> None:
    """Load additional layers into `components`; layers that are already loaded keep their values."""
    tensors = tensors_of(components.model)
    with torch.no_grad():
        for name, value in layers.model.items():
            tensors[name].copy_(value)
    if layers.optimizer:
        state = named_state.optimizer_state(components.optimizer, components.names) | layers.optimizer
        named_state.load_optimizer_state(components.optimizer, components.names, state)


def _chosen(tensors: Tensors, names: Collection[str], of_state: bool) -> Tensors:
    return {
        path: t for path, t in tensors.items() if (path.rpartition("/")[0] if of_state else path) in names
    }
