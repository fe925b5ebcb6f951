"""The AWD-LSTM language model (Merity et al., 2017): LSTMs regularised by many kinds of dropout."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.core.errors import InputError
from plait.workloads.language.carried_state import CarriedState


def awd_lstm(
    vocabulary: int = 10_000,
    streams: int = 20,
    embedding: int = 400,
    width: int = 1150,
    layers: int = 3,
    output_dropout: float = 0.4,
    hidden_dropout: float = 0.25,
    input_dropout: float = 0.4,
    embedding_dropout: float = 0.1,
    weight_dropout: float = 0.5,
    tied: bool = True,
) -> AwdLstm:
    """Tokens (batch, time) of streams of text in, logits (batch, time, vocabulary) out.

    The defaults are the paper's model for the Penn Treebank: 24,221,600 parameters. `streams` is the batch
    size: each sample continues with the state of its stream after the previous batch. With `tied` the decoder
    uses the embedding's weight, and the last LSTM is as wide as the embedding.
    """
    if layers < 1 or streams < 1:
        raise InputError(
            f"awd_lstm: found {layers} layers and {streams} streams, expected 1 of each at least"
        )
    dropouts = _Dropouts(output_dropout, hidden_dropout, input_dropout, embedding_dropout, weight_dropout)
    return AwdLstm(vocabulary, streams, embedding, width, layers, dropouts, tied)


def awd_lstm_tiny(
    vocabulary: int = 256, streams: int = 4, dropout: float = 0.0, tied: bool = True
) -> AwdLstm:
    """Two layers of widths 24 and 16, all kinds of dropout with the same probability."""
    chances = dict.fromkeys(
        ("output_dropout", "hidden_dropout", "input_dropout", "embedding_dropout", "weight_dropout"), dropout
    )
    return awd_lstm(vocabulary, streams, embedding=16, width=24, layers=2, tied=tied, **chances)


class _Dropouts(NamedTuple):
    """The probabilities of the five kinds of dropout."""

    output: float
    hidden: float
    inputs: float
    embedding: float
    weight: float


class AwdLstm(nn.Module):
    """An embedding, LSTMs with carried state, and a decoder; see `awd_lstm`."""

    def __init__(
        self,
        vocabulary: int,
        streams: int,
        embedding: int,
        width: int,
        layers: int,
        dropouts: _Dropouts,
        tied: bool,
    ) -> None:
        super().__init__()
        last = embedding if tied else width
        widths = [embedding, *[width] * (layers - 1), last]
        self.embedding = DroppedEmbedding(vocabulary, embedding, dropouts.embedding)
        self.input_dropout = LockedDropout(dropouts.inputs)
        self.layers = nn.ModuleList(
            CarriedLSTM(before, after, streams, dropouts.weight) for before, after in pairwise(widths)
        )
        self.dropouts = nn.ModuleList(
            LockedDropout(dropouts.output if number == layers - 1 else dropouts.hidden)
            for number in range(layers)
        )
        self.decoder = nn.Linear(last, vocabulary)
        if tied:
            self.decoder.weight = self.embedding.weight
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)

    def forward(self, tokens_bt: Tensor, stream_b: Tensor, is_first_b: Tensor) -> Tensor:
        """`stream_b` is the stream of each sample; `is_first_b` marks the beginning of a stream."""
        x_btc = self.input_dropout(self.embedding(tokens_bt))
        for layer, dropout in zip(self.layers, self.dropouts):
            x_btc = dropout(layer(x_btc, stream_b, is_first_b))
        logits_btv: Tensor = self.decoder(x_btc)
        return logits_btv


class CarriedLSTM(nn.Module):
    """One LSTM layer whose state is carried from batch to batch, with dropout of its recurrent weights."""

    def __init__(self, width_in: int, width_out: int, streams: int, weight_dropout: float) -> None:
        super().__init__()
        self.weight_dropout = weight_dropout
        self.weight_ih = nn.Parameter(torch.empty(4 * width_out, width_in))
        self.weight_hh = nn.Parameter(torch.empty(4 * width_out, width_out))
        self.bias_ih = nn.Parameter(torch.empty(4 * width_out))
        self.bias_hh = nn.Parameter(torch.empty(4 * width_out))
        self.state = CarriedState(streams, width_out)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -(width_out**-0.5), width_out**-0.5)

    def forward(self, x_btc: Tensor, stream_b: Tensor, is_first_b: Tensor) -> Tensor:
        hidden_bc, cell_bc = self.state.read(stream_b, is_first_b)
        first = hidden_bc.unsqueeze(0), cell_bc.unsqueeze(0)
        # One mask for all time steps: connections are dropped, not activations.
        recurrent = F.dropout(self.weight_hh, self.weight_dropout, self.training)
        weights = [self.weight_ih, recurrent, self.bias_ih, self.bias_hh]
        outputs_btc, hidden_1bc, cell_1bc = torch.lstm(
            x_btc, first, weights, True, 1, 0.0, self.training, False, True
        )
        self.state.write(stream_b, hidden_1bc[0], cell_1bc[0])
        return outputs_btc


class LockedDropout(nn.Module):
    """Variational dropout: the same mask at all time steps of a sample."""

    def __init__(self, chance: float) -> None:
        super().__init__()
        self.chance = chance

    def forward(self, x_btc: Tensor) -> Tensor:
        if not self.training or self.chance == 0.0:
            return x_btc
        mask_b1c = F.dropout(torch.ones_like(x_btc[:, :1]), self.chance, True)
        return x_btc * mask_b1c


class DroppedEmbedding(nn.Module):
    """An embedding with dropout of whole words, at all their positions in a batch."""

    def __init__(self, vocabulary: int, width: int, chance: float) -> None:
        super().__init__()
        self.chance = chance
        self.weight = nn.Parameter(torch.empty(vocabulary, width))

    def forward(self, tokens_bt: Tensor) -> Tensor:
        weight: Tensor = self.weight
        if self.training and self.chance > 0.0:
            weight = weight * F.dropout(torch.ones_like(weight[:, :1]), self.chance, True)
        return F.embedding(tokens_bt, weight)
