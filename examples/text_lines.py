"""The lines of a text, padded to one length, as arguments of a causal language model of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypeVar

import torch
from torch import Tensor

from plait.core.errors import DataError
from plait.workloads.data.files import decode_text, fingerprint, read_bytes
from plait.workloads.data.stored import Fingerprinted, Split
from plait.workloads.data.text import check_options, vocabulary_of
from plait.workloads.metrics import IGNORED

Line = TypeVar("Line")


def text_lines(
    split: Split,
    path: str,
    length: int = 64,
    level: Literal["word", "character", "byte"] = "word",
    test_fraction: float = 0.1,
    vocabulary: int | None = None,
) -> PaddedLines:
    """The first `length` tokens of each nonempty line; the last `test_fraction` of the lines is for testing.

    A sample is a dict of `input_ids`, `attention_mask` and `labels`, which ignore padding. The options are
    those of `text`.
    """
    check_options(length, test_fraction, vocabulary)
    file = Path(path).expanduser()
    data = read_bytes(file, "a text file", "set data.path to one")
    if level == "byte":
        lines = [list(line) for line in data.splitlines() if line.strip()]
        return PaddedLines(_part(split, file, lines, test_fraction), length, 256)
    content = decode_text(file, data, "or set data.level to byte")
    texts = [line for line in content.splitlines() if line.strip()]
    words = [list(line) if level == "character" else line.split() for line in texts]
    cut = len(words) - round(len(words) * test_fraction)
    known = vocabulary_of([word for line in words[:cut] for word in line], vocabulary)
    numbers = [[known.get(word, 0) for word in line] for line in _part(split, file, words, test_fraction)]
    return PaddedLines(numbers, length, len(known), fingerprint(known))


def _part(split: Split, path: Path, lines: list[Line], test_fraction: float) -> list[Line]:
    cut = len(lines) - round(len(lines) * test_fraction)
    selected = lines[:cut] if split == "train" else lines[cut:]
    if not selected:
        raise DataError(
            f"{path}: the {split} part has no line of the file's {len(lines)} that are not empty; use a "
            f"longer text or another data.test_fraction (now {test_fraction})"
        )
    return selected


def synthetic_lines(
    split: Split, samples: int = 64, length: int = 32, vocabulary: int = 64, seed: int = 0
) -> PaddedLines:
    """Lines of different lengths whose tokens count upwards."""
    generator = torch.Generator().manual_seed(2 * seed + (split == "test"))
    begins = torch.randint(vocabulary, (samples,), generator=generator).tolist()
    sizes = torch.randint(length // 2, length + 1, (samples,), generator=generator).tolist()
    lines = [[(begin + i) % vocabulary for i in range(size)] for begin, size in zip(begins, sizes)]
    return PaddedLines(lines, length, vocabulary)


class PaddedLines(Fingerprinted):
    """Lines of tokens as dicts of arguments, padded to `length`."""

    def __init__(
        self, lines: list[list[int]], length: int, vocabulary: int, known: str | None = None
    ) -> None:
        self.vocabulary = vocabulary
        self._fingerprint = known
        self.input_shape = (length,)
        self._lines = lines

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        line = torch.tensor(self._lines[index][: self.input_shape[0]])
        tokens = torch.zeros(self.input_shape[0], dtype=torch.long)
        labels = torch.full_like(tokens, IGNORED)
        mask = torch.zeros_like(tokens)
        tokens[: len(line)], labels[: len(line)], mask[: len(line)] = line, line, 1
        return {"input_ids": tokens, "attention_mask": mask, "labels": labels}
