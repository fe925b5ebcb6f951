"""The state of recurrent layers that is carried between batches, in buffers with a row per stream."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class CarriedState(nn.Module):
    """The final state of a recurrent layer for each of `streams` streams of text; separate in evaluation.

    A microbatch has the stream numbers of its samples, so that rows are independent of how batches are split
    and of how many are in flight. As buffers, the state is in checkpoints and belongs to one stage. `written`
    counts the writes of each row: if workers share the streams, the one with the most writes of a row has the
    current state. Evaluation starts every stream from zero, so its state is not in checkpoints.
    """

    written: Tensor
    hidden_sc: Tensor
    cell_sc: Tensor
    evaluation_hidden_sc: Tensor
    evaluation_cell_sc: Tensor

    def __init__(self, streams: int, width: int) -> None:
        super().__init__()
        self.streams = streams
        self.register_buffer("written", torch.zeros(streams, dtype=torch.int64))
        self.register_buffer("hidden_sc", torch.zeros(streams, width))
        self.register_buffer("cell_sc", torch.zeros(streams, width))
        self.register_buffer("evaluation_hidden_sc", torch.zeros(streams, width), persistent=False)
        self.register_buffer("evaluation_cell_sc", torch.zeros(streams, width), persistent=False)

    def read(self, stream_b: Tensor, is_first_b: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden and cell state (batch, width) of these streams; zeros at the beginning of a stream."""
        hidden_sc, cell_sc = self._own()
        going_on_b1 = (~is_first_b).unsqueeze(1)
        return hidden_sc[stream_b] * going_on_b1, cell_sc[stream_b] * going_on_b1

    def write(self, stream_b: Tensor, hidden_bc: Tensor, cell_bc: Tensor) -> None:
        """Store the final state of a microbatch's streams, detached."""
        hidden_sc, cell_sc = self._own()
        hidden_sc.index_copy_(0, stream_b, hidden_bc.detach().to(hidden_sc.dtype))
        cell_sc.index_copy_(0, stream_b, cell_bc.detach().to(cell_sc.dtype))
        if self.training:
            self.written.index_copy_(0, stream_b, self.written[stream_b] + 1)

    def rows(self) -> tuple[Tensor, ...]:
        """The tensors whose current rows are on the worker with the largest `written`."""
        return self.hidden_sc, self.cell_sc

    def _own(self) -> tuple[Tensor, Tensor]:
        if self.training:
            return self.hidden_sc, self.cell_sc
        return self.evaluation_hidden_sc, self.evaluation_cell_sc
