"""Layers that move between workers: who holds what, who needs it, and what therefore travels."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from plait.comm.collectives import exchange_named
from plait.pipeline import named_state
from plait.pipeline.named_state import Tensors
from plait.training.components import Components

# A tensor by name, the rank that sends it, and the rank that it goes to.
Move = tuple[str, int, int]


@dataclass(frozen=True)
class HeldLayers:
    """The parameters and buffers that a worker holds, by name, and the optimizer's state for them."""

    model: Tensors = field(default_factory=dict)
    optimizer: Tensors = field(default_factory=dict)


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of a model, each by its first name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def held_layers(
    parts: Components, names: Collection[str] | None, optimizer: torch.optim.Optimizer
) -> HeldLayers:
    """What a worker holds: the tensors of these `names` (None: all), and what `optimizer` keeps for them."""
    model = {n: t.detach() for n, t in tensors_of(parts.model).items() if names is None or n in names}
    return HeldLayers(model, named_state.optimizer_state(optimizer, parts.names))


def put_back(parts: Components, held: HeldLayers) -> None:
    """Give fresh parts the values that this worker holds."""
    own = tensors_of(parts.model)
    with torch.no_grad():
        for name, tensor in held.model.items():
            own[name].copy_(tensor)
    if held.optimizer:
        named_state.load_optimizer_state(parts.optimizer, parts.names, held.optimizer)


def find_complete(
    marks: Sequence[Sequence[int]], held: Sequence[Collection[str]], names: Collection[str]
) -> int | None:
    """The rank whose progress all go on from: of the most advanced among which all of `names` are held.

    `held[rank]` is what a rank holds after the steps that `marks[rank]` tells of. None where no ranks that
    are equally far hold all.
    """
    order = sorted({tuple(mark) for mark in marks}, key=lambda mark: (-mark[0], mark[1]))
    for mark in order:
        ranks = [rank for rank, each in enumerate(marks) if tuple(each) == mark]
        if mark[0] >= 0 and set(names) <= {name for rank in ranks for name in held[rank]}:
            return ranks[0]
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


def carry_out(moves: Sequence[Move], held: HeldLayers, parts: Components, rank: int) -> int:
    """Move layers, all workers together, into `parts`, which has those of `held`; the bytes that came.

    What the optimizer keeps for a parameter goes along.
    """
    pairs = sorted({(source, target) for _, source, target in moves})
    going = {target: {name for name, *pair in moves if pair == [rank, target]} for _, target in pairs}
    model = exchange_named({t: _chosen(held.model, names) for t, names in going.items()}, pairs)
    optimizer = exchange_named(
        {t: _chosen(held.optimizer, names, of_state=True) for t, names in going.items()}, pairs
    )
    own = tensors_of(parts.model)
    with torch.no_grad():
        for name, value in model.items():
            own[name].copy_(value)
    if optimizer:
        state = named_state.optimizer_state(parts.optimizer, parts.names) | optimizer
        named_state.load_optimizer_state(parts.optimizer, parts.names, state)
    return sum(value.numel() * value.element_size() for value in (*model.values(), *optimizer.values()))


def _chosen(tensors: Tensors, names: Collection[str], of_state: bool = False) -> Tensors:
    return {
        path: t for path, t in tensors.items() if (path.rpartition("/")[0] if of_state else path) in names
    }
