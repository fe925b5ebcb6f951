"""The state of recurrent layers that goes on from one batch to the next, kept as buffers, a row a stream."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class CarriedState(nn.Module):
    """What a recurrent layer ended with, for each of `streams` streams of text; evaluations have their own.

    A microbatch names the streams of its samples, so that its rows are found whichever part of a batch it is
    and however many are in flight. As buffers the state is in checkpoints and belongs to one stage.
    `written` counts how often each row was: of workers that share the streams out, the one that wrote a row
    last has the right one. Evaluation starts every stream anew, so its state is in no checkpoint.
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
        """Hidden and cell state (batch, width) of these streams; zeros where a stream begins."""
        hidden_sc, cell_sc = self._own()
        going_on_b1 = (~is_first_b).unsqueeze(1)
        return hidden_sc[stream_b] * going_on_b1, cell_sc[stream_b] * going_on_b1

    def write(self, stream_b: Tensor, hidden_bc: Tensor, cell_bc: Tensor) -> None:
        """Keep what the streams of a microbatch ended with, without its gradient."""
        hidden_sc, cell_sc = self._own()
        hidden_sc.index_copy_(0, stream_b, hidden_bc.detach().to(hidden_sc.dtype))
        cell_sc.index_copy_(0, stream_b, cell_bc.detach().to(cell_sc.dtype))
        if self.training:
            self.written.index_copy_(0, stream_b, self.written[stream_b] + 1)

    def rows(self) -> tuple[Tensor, ...]:
        """The tensors whose rows belong to the worker that has the largest `written`."""
        return self.hidden_sc, self.cell_sc

    def _own(self) -> tuple[Tensor, Tensor]:
        if self.training:
            return self.hidden_sc, self.cell_sc
        return self.evaluation_hidden_sc, self.evaluation_cell_sc
