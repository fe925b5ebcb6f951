"""Tensors that workers average, as flat memory: one piece a type, on the CPU, in a fixed order."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

Source = Callable[[], Sequence[Tensor]]


class FlatBuffer:
    """The tensors that the sources give, gathered into flat memory and put back from it.

    Each source has flat memory of its own, and each tensor its place in it, in `views`. The first source's
    tensors are the same on all workers; of the others some may be missing, as an optimizer's state before its
    first step.
    """

    def __init__(self, *sources: Source) -> None:
        self._sources = sources
        self._layout: list[tuple[tuple[torch.dtype, torch.Size], ...]] = []
        self.views: list[Tensor] = []
        self.flats: list[Tensor] = []
        self._first = 0

    @property
    def weights(self) -> list[Tensor]:
        """The flat memory of the first source."""
        return self.flats[: self._first]

    def gather(self) -> list[Tensor]:
        """The flat memory, filled with what the tensors hold now."""
        found = [[t.detach() for t in source()] for source in self._sources]
        layout = [tuple((t.dtype, t.shape) for t in tensors) for tensors in found]
        if layout != self._layout:
            self._layout, self.views, self.flats = layout, [], []
            for tensors in found:
                self._lay_out(tensors)
            self._first = len({t.dtype for t in found[0]})
        together = [t for tensors in found for t in tensors]
        if together:
            torch._foreach_copy_(self.views, together)
        return self.flats

    def scatter(self) -> None:
        """Have the tensors hold what the flat memory holds."""
        # As data: a weight that changes under autograd's eyes would void graphs that are long used up.
        tensors = [t.data for source in self._sources for t in source()]
        if tensors:
            torch._foreach_copy_(tensors, self.views)

    def _lay_out(self, tensors: Sequence[Tensor]) -> None:
        kinds = list(dict.fromkeys(t.dtype for t in tensors))
        sizes = {kind: sum(t.numel() for t in tensors if t.dtype == kind) for kind in kinds}
        by_kind = {kind: torch.zeros(sizes[kind], dtype=kind) for kind in kinds}
        places = dict.fromkeys(kinds, 0)
        for tensor in tensors:
            begin = places[tensor.dtype]
            places[tensor.dtype] = begin + tensor.numel()
            self.views.append(by_kind[tensor.dtype][begin : begin + tensor.numel()].view(tensor.shape))
        self.flats += [by_kind[kind] for kind in kinds]


def put_mean(own: Sequence[Tensor], brought: Mapping[int, Sequence[Tensor | None]]) -> list[int]:
    """Put the mean of what workers brought, by rank, into `own`; how many brought each tensor.

    One that some lack or have otherwise is averaged over the rest. Sums go in the order of ranks, whichever
    worker makes them, so all who might come to the same bits.
    """
    counts = []
    for i, flat in enumerate(own):
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
    """The Euclidean distance between two states of the flat memory."""
    return math.sqrt(sum(float((a - b).double().square().sum()) for a, b in zip(flats, before)))
