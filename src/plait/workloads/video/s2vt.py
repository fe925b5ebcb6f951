"""S2VT (Venugopalan et al., 2015): two LSTMs that first read a video's frames, then generate its caption."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from plait.core.errors import InputError


def s2vt(
    vocabulary: int = 12_594,
    features: int = 4096,
    width: int = 1000,
    embedding: int = 500,
    dropout: float = 0.5,
) -> S2VT:
    """Features (batch, frames, features) and words (batch, time) in, logits (batch, time, vocabulary) out.

    The defaults are the paper's sizes for VGG-16 features of frames.
    """
    if min(vocabulary, features, width, embedding) < 1:
        raise InputError("s2vt: vocabulary, features, width and embedding must be at least 1")
    return S2VT(vocabulary, features, width, embedding, dropout)


def s2vt_tiny(vocabulary: int = 32, features: int = 12, dropout: float = 0.0) -> S2VT:
    """LSTMs of width 24 and words of width 16."""
    return s2vt(vocabulary, features, width=24, embedding=16, dropout=dropout)


class S2VT(nn.Module):
    """The first LSTM reads frames, then zeros; the second its outputs with zeros, then with words."""

    def __init__(self, vocabulary: int, features: int, width: int, embedding: int, dropout: float) -> None:
        super().__init__()
        self.frames = nn.Sequential(nn.Linear(features, embedding), nn.Dropout(dropout))
        self.video = FrameLSTM(embedding, width)
        self.words = nn.Embedding(vocabulary, embedding)
        self.language = CaptionLSTM(width + embedding, width)
        self.dropout = nn.Dropout(dropout)
        self.decoder = nn.Linear(width, vocabulary)

    def forward(self, features_bfd: Tensor, words_bt: Tensor) -> Tensor:
        """`words_bt` begin with the begin-of-caption token; the logits are for the words one later."""
        seen_bsc = self.video(self.frames(features_bfd), words_bt)
        said_btc = self.language(seen_bsc, self.words(words_bt))
        logits_btv: Tensor = self.decoder(self.dropout(said_btc))
        return logits_btv

    @torch.no_grad()
    def caption(self, features_bfd: Tensor, begin: int, end: int, longest: int = 20) -> list[list[int]]:
        """The caption of each video by greedy decoding, in evaluation mode."""
        was_training = self.training
        self.eval()
        words_bt = torch.full((len(features_bfd), 1), begin, device=features_bfd.device)
        for _ in range(longest):
            next_b = self(features_bfd, words_bt)[:, -1].argmax(-1)
            words_bt = torch.cat([words_bt, next_b.unsqueeze(1)], 1)
        self.train(was_training)
        rows: list[list[int]] = words_bt[:, 1:].tolist()
        return [row[: row.index(end)] if end in row else row for row in rows]


class FrameLSTM(nn.Module):
    """Reads the frames, then zeros at the time steps of words; output (batch, frames + time, width)."""

    def __init__(self, width_in: int, width: int) -> None:
        super().__init__()
        self.cells = nn.LSTM(width_in, width, batch_first=True)

    def forward(self, frames_bfc: Tensor, words_bt: Tensor) -> Tensor:
        blank_btc = frames_bfc.new_zeros((*words_bt.shape, frames_bfc.shape[2]))
        outputs: Tensor = self.cells(torch.cat([frames_bfc, blank_btc], 1))[0]
        return outputs


class CaptionLSTM(nn.Module):
    """Reads the first LSTM's outputs with zeros, then with words; returns the outputs at words."""

    def __init__(self, width_in: int, width: int) -> None:
        super().__init__()
        self.cells = nn.LSTM(width_in, width, batch_first=True)

    def forward(self, seen_bsc: Tensor, words_bte: Tensor) -> Tensor:
        time = words_bte.shape[1]
        frames = seen_bsc.shape[1] - time
        blank_bfe = words_bte.new_zeros((words_bte.shape[0], frames, words_bte.shape[2]))
        heard_bse = torch.cat([blank_bfe, words_bte], 1)
        outputs: Tensor = self.cells(torch.cat([seen_bsc, heard_bse], 2))[0]
        return outputs[:, -time:]
