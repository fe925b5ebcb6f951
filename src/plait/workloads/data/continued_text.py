"""A text as parallel streams: each sample continues the corresponding sample of the previous batch."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from plait.core.errors import DataError
from plait.workloads.data.stored import Fingerprinted, Split
from plait.workloads.data.text import check_options, read_tokens

Inputs = tuple[Tensor, Tensor, Tensor]


def continued_text(
    split: Split,
    path: Path,
    streams: int,
    length: int = 35,
    level: Literal["word", "character", "byte"] = "word",
    test_fraction: float = 0.1,
    vocabulary: int | None = None,
) -> ContinuedText:
    """The file's tokens in `streams` consecutive parts, each split into windows of `length`.

    Sample i is the window number i // streams of stream i % streams, so that with `shuffle: false` and
    `batch_size` equal to `streams` each batch continues the previous one. The other options are those of
    `text`.
    """
    check_options(length, test_fraction, vocabulary)
    tokens = read_tokens(path, level, test_fraction, vocabulary)
    part = tokens.part(split, test_fraction)
    if (len(part) - 1) // _at_least_one(streams) < length:
        raise DataError(
            f"{path}: the {split} part has {len(part):,} of the file's {len(tokens.numbers):,} tokens, "
            f"expected at least {streams * length + 1:,} for one window of each stream; shorten "
            f"data.length (now {length}), use fewer data.streams (now {streams}) or a longer text"
        )
    return ContinuedText(part, streams, length, tokens.vocabulary, tokens.fingerprint)


def synthetic_text(
    split: Split, streams: int, length: int = 35, vocabulary: int = 256, windows: int = 8, seed: int = 0
) -> ContinuedText:
    """Tokens that increase by one to three, so that there is something to learn."""
    count = _at_least_one(streams) * windows * length + 1
    generator = torch.Generator().manual_seed(2 * seed + (split == "test"))
    steps = torch.randint(1, 4, (count,), generator=generator)
    tokens = (steps.cumsum(0) % vocabulary).to(torch.int32)
    return ContinuedText(tokens, streams, length, vocabulary)


class ContinuedText(Fingerprinted):
    """Samples ((tokens, stream, is_first), target); the target is the window one token later.

    A set with `streams` promises that sample i continues sample i - streams; a run either supports it or
    raises.
    """

    def __init__(
        self, tokens: Tensor, streams: int, length: int, vocabulary: int, fingerprint: str | None = None
    ) -> None:
        self.streams = streams
        self._fingerprint = fingerprint
        self.vocabulary = vocabulary
        self.input_shape = (length,)
        self._length = length
        # The target of a stream's last token is the first token of the next stream.
        self._each = (len(tokens) - 1) // streams // length * length
        self._inputs_st = tokens[: streams * self._each].view(streams, self._each)
        self._targets_st = tokens[1 : streams * self._each + 1].view(streams, self._each)

    def __len__(self) -> int:
        return self.streams * (self._each // self._length)

    def __getitem__(self, index: int) -> tuple[Inputs, Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} in a set of {len(self)} samples")
        (tokens, stream, is_first), target = self.collated_batch([index % len(self)])
        return (tokens[0], stream[0], is_first[0]), target[0]

    def collated_batch(self, indices: list[int]) -> tuple[Inputs, Tensor]:
        chosen = torch.tensor(indices, dtype=torch.long)
        stream_b, window_b = chosen % self.streams, chosen // self.streams
        places_bt = (window_b * self._length).unsqueeze(1) + torch.arange(self._length)
        rows_b1 = stream_b.unsqueeze(1)
        tokens_bt, targets_bt = self._inputs_st[rows_b1, places_bt], self._targets_st[rows_b1, places_bt]
        return (tokens_bt.long(), stream_b, window_b == 0), targets_bt.long()


def _at_least_one(streams: int) -> int:
    if streams < 1:
        raise DataError(f"data.streams: found {streams}, expected at least 1; set it to data.batch_size")
    return streams
