"""A text file as windows of tokens: words, characters or bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from plait.core.errors import DataError
from plait.workloads.data.files import read_bytes
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

    Words are what blanks separate, and each line ends with `<eos>`. The vocabulary of words or characters
    comes from the training part, the most frequent first, after `<unk>`, which stands for all others; at
    most `vocabulary` tokens where that is given. Bytes are their own numbers, 256 of them.
    """
    _check_options(length, test_fraction, vocabulary)
    data = read_bytes(path, "a text file", "set data.path to one")
    if level == "byte":
        numbers = torch.from_numpy(np.frombuffer(data, dtype=np.uint8).astype(np.int32))
        return _windows(split, path, numbers, 256, length, test_fraction)
    tokens = _tokens(path, data, level)
    known = _vocabulary(tokens[: _training_tokens(len(tokens), test_fraction)], vocabulary)
    numbers = torch.tensor([known.get(token, 0) for token in tokens], dtype=torch.int32)
    return _windows(split, path, numbers, len(known), length, test_fraction)


def _check_options(length: int, test_fraction: float, vocabulary: int | None) -> None:
    if length < 1:
        raise DataError(f"data.length: found {length}, expected at least 1 token")
    if not 0 < test_fraction < 1:
        raise DataError(f"data.test_fraction: found {test_fraction}, expected more than 0 and less than 1")
    if vocabulary is not None and vocabulary < 2:
        raise DataError(f"data.vocabulary: found {vocabulary}, expected at least 2 tokens")


def _tokens(path: Path, data: bytes, level: Literal["word", "character"]) -> Sequence[str]:
    try:
        content = data.decode()
    except UnicodeDecodeError as failure:
        raise DataError(
            f"{path}: byte {failure.start:,} is not UTF-8, expected text; "
            f"convert the file, or set data.level to byte"
        ) from None
    if level == "character":
        return content
    return [token for line in content.splitlines() for token in (*line.split(), END_OF_LINE)]


def _vocabulary(tokens: Sequence[str], at_most: int | None) -> dict[str, int]:
    """A number for each token; 0 is the unknown one, whether or not the text itself spells it."""
    counts = Counter(tokens)
    del counts[UNKNOWN]
    by_frequency = sorted(counts, key=lambda token: (-counts[token], token))
    kept = by_frequency if at_most is None else by_frequency[: at_most - 1]
    return {token: number for number, token in enumerate([UNKNOWN, *kept])}


def _training_tokens(count: int, test_fraction: float) -> int:
    return count - round(count * test_fraction)


def _windows(
    split: Split, path: Path, tokens: Tensor, vocabulary: int, length: int, test_fraction: float
) -> Windows:
    cut = _training_tokens(len(tokens), test_fraction)
    part = tokens[:cut] if split == "train" else tokens[cut:]
    if len(part) <= length:
        raise DataError(
            f"{path}: the {split} part has {len(part):,} of the file's {len(tokens):,} tokens, "
            f"expected at least {length + 1:,} for one window; "
            f"shorten data.length (now {length}) or use a longer text"
        )
    return Windows(part, length, vocabulary)
