"""Tensors that workers average, as flat buffers on the CPU: one per type, in a fixed order."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

Source = Callable[[], Sequence[Tensor]]


class FlatBuffer:
    """Copies the tensors of the sources to flat buffers and back.

    Each source has separate flat buffers; `views` has a view of them for each tensor. The first source has
    the same tensors on all workers; tensors of the others may be missing, such as an optimizer's state before
    its first step.
    """

    def __init__(self, *sources: Source) -> None:
        self._sources = sources
        self._layout: list[tuple[tuple[torch.dtype, torch.Size], ...]] = []
        self.views: list[Tensor] = []
        self.flats: list[Tensor] = []
        self._first = 0

    @property
    def weights(self) -> list[Tensor]:
        """The flat buffers of the first source."""
        return self.flats[: self._first]

    def gather(self) -> list[Tensor]:
        """Copy the tensors to the flat buffers and return these."""
        gathered = [[t.detach() for t in source()] for source in self._sources]
        layout = [tuple((t.dtype, t.shape) for t in tensors) for tensors in gathered]
        if layout != self._layout:
            self._layout, self.views, self.flats = layout, [], []
            for tensors in gathered:
                self._allocate(tensors)
            self._first = len({t.dtype for t in gathered[0]})
        together = [t for tensors in gathered for t in tensors]
        if together:
            torch._foreach_copy_(self.views, together)
        return self.flats

    def scatter(self) -> None:
        """Copy the flat buffers back to the tensors."""
        # By `data`: otherwise autograd would reject graphs that saved the weights.
        tensors = [t.data for source in self._sources for t in source()]
        if tensors:
            torch._foreach_copy_(tensors, self.views)

    def _allocate(self, tensors: Sequence[Tensor]) -> None:
        kinds = list(dict.fromkeys(t.dtype for t in tensors))
        sizes = {kind: sum(t.numel() for t in tensors if t.dtype == kind) for kind in kinds}
        by_kind = {kind: torch.zeros(sizes[kind], dtype=kind) for kind in kinds}
        offsets = dict.fromkeys(kinds, 0)
        for tensor in tensors:
            begin = offsets[tensor.dtype]
            offsets[tensor.dtype] = begin + tensor.numel()
            self.views.append(by_kind[tensor.dtype][begin : begin + tensor.numel()].view(tensor.shape))
        self.flats += [by_kind[kind] for kind in kinds]


def put_mean(flats: Sequence[Tensor], brought: Mapping[int, Sequence[Tensor | None]]) -> list[int]:
    """Set `flats` to the mean of the workers' tensors, by rank; returns the number of workers of each.

    A tensor that is missing or differs in shape on some workers is averaged over the rest. Sums are in the
    order of ranks, so the result is the same whichever worker computes it.
    """
    counts = []
    for i, flat in enumerate(flats):
        tensors = [brought[rank][i] for rank in sorted(brought) if i < len(brought[rank])]
        given = [tensor for tensor in tensors if tensor is not None and tensor.shape == flat.shape]
        if given:
            total = given[0].clone()
            for tensor in given[1:]:
                total.add_(tensor)
            flat.copy_(total.div_(len(given)))
        counts.append(len(given))
    return counts


def distance(flats: Sequence[Tensor], before: Sequence[Tensor]) -> float:
    """The Euclidean distance between two states of the flat buffers."""
    return math.sqrt(sum(float((a - b).double().square().sum()) for a, b in zip(flats, before)))
