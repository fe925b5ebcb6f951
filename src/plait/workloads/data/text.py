"""A text file as windows of tokens: words, characters or bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from plait.core.errors import DataError
from plait.workloads.data.files import decode_text, fingerprint, read_bytes
from plait.workloads.data.stored import Split, Windows

UNKNOWN = "<unk>"
END_OF_LINE = "<eos>"


def text(
    split: Split,
    path: Path,
    length: int = 35,
    level: Literal["word", "character", "byte"] = "word",
    test_fraction: float = 0.1,
    vocabulary: int | None = None,
) -> Windows:
    """Windows of `length` tokens of the file; its last `test_fraction` is for testing.

    Words are separated by whitespace, and each line ends with `<eos>`. The vocabulary of words or characters
    is that of the training part, most frequent first, after `<unk>` for all others; at most `vocabulary`
    tokens, if given. Bytes are their own numbers, 256 of them.
    """
    check_options(length, test_fraction, vocabulary)
    tokens = read_tokens(path, level, test_fraction, vocabulary)
    part = tokens.part(split, test_fraction)
    if len(part) <= length:
        raise DataError(
            f"{path}: the {split} part has {len(part):,} of the file's {len(tokens.numbers):,} tokens, "
            f"expected at least {length + 1:,} for one window; "
            f"shorten data.length (now {length}) or use a longer text"
        )
    return Windows(part, length, tokens.vocabulary, tokens.fingerprint)


@dataclass(frozen=True)
class TextTokens:
    """A file's tokens as numbers, the size of the vocabulary, and its fingerprint."""

    numbers: Tensor
    vocabulary: int
    fingerprint: str | None

    def part(self, split: Split, test_fraction: float) -> Tensor:
        """The tokens of a split: the file's last `test_fraction` is for testing."""
        cut = _training_tokens(len(self.numbers), test_fraction)
        return self.numbers[:cut] if split == "train" else self.numbers[cut:]


def read_tokens(
    path: Path, level: Literal["word", "character", "byte"], test_fraction: float, vocabulary: int | None
) -> TextTokens:
    """The tokens of the whole file; see `text`."""
    data = read_bytes(path, "a text file", "set data.path to one")
    if level == "byte":
        return TextTokens(torch.from_numpy(np.frombuffer(data, dtype=np.uint8).astype(np.int32)), 256, None)
    tokens = _tokens(path, data, level)
    known = vocabulary_of(tokens[: _training_tokens(len(tokens), test_fraction)], vocabulary)
    numbers = torch.tensor([known.get(token, 0) for token in tokens], dtype=torch.int32)
    return TextTokens(numbers, len(known), fingerprint(known))


def check_options(length: int, test_fraction: float, vocabulary: int | None) -> None:
    if length < 1:
        raise DataError(f"data.length: found {length}, expected at least 1 token")
    if not 0 < test_fraction < 1:
        raise DataError(f"data.test_fraction: found {test_fraction}, expected more than 0 and less than 1")
    if vocabulary is not None and vocabulary < 2:
        raise DataError(f"data.vocabulary: found {vocabulary}, expected at least 2 tokens")


def _tokens(path: Path, data: bytes, level: Literal["word", "character"]) -> Sequence[str]:
    content = decode_text(path, data, "or set data.level to byte")
    if level == "character":
        return content
    return [token for line in content.splitlines() for token in (*line.split(), END_OF_LINE)]


def vocabulary_of(tokens: Sequence[str], at_most: int | None) -> dict[str, int]:
    """A number for each token; 0 is `<unk>`, whether or not it occurs in the text."""
    counts = Counter(tokens)
    del counts[UNKNOWN]
    by_frequency = sorted(counts, key=lambda token: (-counts[token], token))
    kept = by_frequency if at_most is None else by_frequency[: at_most - 1]
    return {token: number for number, token in enumerate([UNKNOWN, *kept])}


def _training_tokens(count: int, test_fraction: float) -> int:
    return count - round(count * test_fraction)
