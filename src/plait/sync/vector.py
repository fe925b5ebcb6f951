"""Tensors that workers average, as flat memory: one piece a type, on the CPU, in a fixed order."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Source = Callable[[], Sequence[Tensor]]


class Vector:
    """The tensors that `source` gives, gathered into flat memory and put back from it.

    `source` is asked each time, since an optimizer makes its state at its first step; the order and the
    shapes must be the same on all workers.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._layout: tuple[tuple[torch.dtype, torch.Size], ...] = ()
        self._views: list[Tensor] = []
        self.flats: list[Tensor] = []

    @property
    def byte_count(self) -> int:
        return sum(flat.numel() * flat.element_size() for flat in self.flats)

    def gather(self) -> list[Tensor]:
        """The flat memory, filled with what the tensors hold now."""
        tensors = [t.detach() for t in self._source()]
        layout = tuple((t.dtype, t.shape) for t in tensors)
        if layout != self._layout:
            self._lay_out(tensors)
            self._layout = layout
        if tensors:
            torch._foreach_copy_(self._views, tensors)
        return self.flats

    def scatter(self) -> None:
        """Have the tensors hold what the flat memory holds."""
        # A weight that changes under autograd's eyes would void graphs that are long used up.
        tensors = [t.data for t in self._source()]
        if tensors:
            torch._foreach_copy_(tensors, self._views)

    def _lay_out(self, tensors: Sequence[Tensor]) -> None:
        kinds = list(dict.fromkeys(t.dtype for t in tensors))
        sizes = {kind: sum(t.numel() for t in tensors if t.dtype == kind) for kind in kinds}
        by_kind = {kind: torch.zeros(sizes[kind], dtype=kind) for kind in kinds}
        places = dict.fromkeys(kinds, 0)
        self._views = []
        for tensor in tensors:
            begin = places[tensor.dtype]
            places[tensor.dtype] = begin + tensor.numel()
            self._views.append(by_kind[tensor.dtype][begin : begin + tensor.numel()].view(tensor.shape))
        self.flats = [by_kind[kind] for kind in kinds]


def distance(flats: Sequence[Tensor], before: Sequence[Tensor]) -> float:
    """The Euclidean distance between two states of the flat memory."""
    return math.sqrt(sum(float((a - b).double().square().sum()) for a, b in zip(flats, before)))
