"""GNMT: translation by stacked residual LSTMs with attention (Wu et al., 2016), in NVIDIA's second version.

The attention is computed from the decoder's first layer and is an input of all later ones at the same time
step, so that training needs no loop over time steps.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from plait.workloads.translation.attention import NormalisedAttention

# The token that fills the end of a sentence in a batch.
PAD = 0

# The hidden and the cell state of a layer, each (1, batch, channels).
LayerState = tuple[Tensor, Tensor]


def gnmt8(vocabulary: int = 32_320, dropout: float = 0.2, shared_embedding: bool = True) -> Gnmt:
    """Four layers of width 1,024 per side: 160,671,297 parameters with WMT16's English-German vocabulary.

    That is the count of NVIDIA's entry to MLPerf. PipeDream's has an embedding for each language.
    """
    return Gnmt(vocabulary, 1024, 4, dropout, shared_embedding)


def gnmt16(vocabulary: int = 32_320, dropout: float = 0.2, shared_embedding: bool = True) -> Gnmt:
    """Eight layers of width 1,024 per side: 244,622,913 parameters; PipeDream's larger model."""
    return Gnmt(vocabulary, 1024, 8, dropout, shared_embedding)


def gnmt_tiny(
    vocabulary: int = 160,
    width: int = 64,
    layers: int = 2,
    dropout: float = 0.0,
    shared_embedding: bool = True,
) -> Gnmt:
    """Two layers of width 64 per side: learns number words in a minute on a CPU."""
    return Gnmt(vocabulary, width, layers, dropout, shared_embedding)


class EncodedSource(NamedTuple):
    """What the decoder attends to, a row per sentence: context, its keys, and the padding mask."""

    context_bsc: Tensor
    keys_bsc: Tensor
    is_padding_bs: Tensor

    def rows(self, rows_b: Tensor) -> EncodedSource:
        """These rows, in this order."""
        return EncodedSource(*(part.index_select(0, rows_b) for part in self))


class Gnmt(nn.Module):
    """Source tokens and the previous target tokens in, logits of the target tokens out.

    Tokens are (batch, time), or (groups, batch, time) if a sample is a group of sentences. Padding is at the
    end of a sentence and does not change results.
    """

    def __init__(
        self, vocabulary: int, width: int, layers: int, dropout: float, shared_embedding: bool
    ) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.encoder = GnmtEncoder(vocabulary, width, layers, dropout)
        self.decoder = GnmtDecoder(vocabulary, width, layers, dropout)
        # The published 0.1 at the published width; narrower layers need larger weights.
        bound = 0.1 * math.sqrt(1024 / width)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)
        self.decoder.attention.reset_parameters()
        if shared_embedding:
            self.decoder.embedding.weight = self.encoder.embedding.weight

    def forward(self, source: Tensor, previous: Tensor) -> Tensor:
        context_bsc, is_padding_bs = self.encoder(source.flatten(0, -2))
        logits_btv: Tensor = self.decoder(previous.flatten(0, -2), context_bsc, is_padding_bs)
        return logits_btv.reshape(*previous.shape, logits_btv.shape[-1])

    def encode(self, source_bs: Tensor) -> EncodedSource:
        """Encode the source sentences for `step`."""
        context_bsc, is_padding_bs = self.encoder(source_bs)
        return EncodedSource(context_bsc, self.decoder.attention.key(context_bsc), is_padding_bs)

    def step(
        self, previous_b: Tensor, encoded: EncodedSource, states: list[LayerState] | None
    ) -> tuple[Tensor, Tensor, list[LayerState]]:
        """Logits of the next token (batch, vocabulary), attention (batch, source) and the states after it.

        `states` are None before the first token.
        """
        logits_btv, weights_bts, after = self.decoder.run(previous_b.unsqueeze(1), encoded, states)
        return logits_btv.squeeze(1), weights_bts.squeeze(1), after


class GnmtEncoder(nn.Module):
    """Source tokens to their contexts: a layer in both directions, then layers with residual connections.

    The two directions are two LSTMs: the backward one reads each sentence reversed within its length, so that
    padding is never before a token.
    """

    def __init__(self, vocabulary: int, width: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.forwards = nn.LSTM(width, width, batch_first=True)
        self.backwards = nn.LSTM(width, width, batch_first=True)
        self.layers = nn.ModuleList(
            nn.LSTM(2 * width if i == 0 else width, width, batch_first=True) for i in range(layers - 1)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, source_bs: Tensor) -> tuple[Tensor, Tensor]:
        """The context of each token (batch, time, channels), and which tokens are padding."""
        is_padding_bs = source_bs == PAD
        x_bsc = self.dropout(self.embedding(source_bs))
        turned_bs1 = reversed_positions(is_padding_bs).unsqueeze(-1)
        there = turned_bs1.expand(x_bsc.shape)
        ahead, _ = self.forwards(x_bsc)
        back, _ = self.backwards(x_bsc.gather(1, there))
        x_bsc = torch.cat([ahead, back.gather(1, there)], -1)
        for number, layer in enumerate(self.layers):
            y_bsc, _ = layer(self.dropout(x_bsc))
            x_bsc = y_bsc if number == 0 else x_bsc + y_bsc
        return x_bsc, is_padding_bs


def reversed_positions(is_padding_bs: Tensor) -> Tensor:
    """For each position, the source position after reversing the sentence within its length."""
    length_b1 = (~is_padding_bs).sum(1, keepdim=True)
    places_s = torch.arange(is_padding_bs.shape[1], device=is_padding_bs.device)
    return torch.where(places_s < length_b1, length_b1 - 1 - places_s, places_s)


class GnmtDecoder(nn.Module):
    """Previous target tokens to logits of the next; attention after the first layer, for all others."""

    def __init__(self, vocabulary: int, width: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.first = nn.LSTM(width, width, batch_first=True)
        self.attention = NormalisedAttention(width)
        self.layers = nn.ModuleList(nn.LSTM(2 * width, width, batch_first=True) for _ in range(layers - 1))
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(width, vocabulary)

    def forward(self, previous_bt: Tensor, context_bsc: Tensor, is_padding_bs: Tensor) -> Tensor:
        encoded = EncodedSource(context_bsc, self.attention.key(context_bsc), is_padding_bs)
        return self.run(previous_bt, encoded, None)[0]

    def run(
        self, previous_bt: Tensor, encoded: EncodedSource, states: list[LayerState] | None
    ) -> tuple[Tensor, Tensor, list[LayerState]]:
        """Logits, attention weights and the layers' states after the last token of `previous_bt`."""
        x_btc, after = self.first(
            self.dropout(self.embedding(previous_bt)), None if states is None else states[0]
        )
        found_btc, weights_bts = self.attention(x_btc, *encoded)
        ends = [after]
        for number, layer in enumerate(self.layers):
            joined = self.dropout(torch.cat([x_btc, found_btc], -1))
            y_btc, after = layer(joined, None if states is None else states[number + 1])
            x_btc = y_btc if number == 0 else x_btc + y_btc
            ends.append(after)
        return self.classifier(x_btc), weights_bts, ends
