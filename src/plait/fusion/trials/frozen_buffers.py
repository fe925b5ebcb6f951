"""Buffers of frozen trials, which forwards of the others do not change."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


class FrozenBuffers:
    """The values that the buffers, by name, have for the trials `numbers`."""

    def __init__(
        self, numbers: Sequence[int], buffers: Iterable[tuple[str, Tensor]], device: torch.device
    ) -> None:
        self.numbers = numbers
        self._index = torch.tensor(numbers, dtype=torch.int64, device=device)
        self._kept: dict[str, Tensor] = {}
        for name, buffer in buffers:
            self.keep(name, buffer)

    def keep(self, name: str, buffer: Tensor) -> None:
        """Keep the current values of another buffer."""
        self._kept[name] = buffer[self._index].clone()

    def restore(self, buffers: Iterable[tuple[str, Tensor]]) -> None:
        """Write the values back, after a forward that has written to all trials."""
        for name, buffer in buffers:
            # Hidden from autograd, which may have saved the buffer; gradients of these trials are not used.
            if name in self._kept:
                buffer.data.index_copy_(0, self._index, self._kept[name])
