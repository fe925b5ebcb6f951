"""Vocabularies: tokens to numbers and back, from a file or from a corpus."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from plait.core.errors import DataError
from translation.lines import read_lines

SPECIAL = ("<pad>", "<unk>", "<s>", "</s>")
PAD, UNKNOWN, BEGIN, END = range(len(SPECIAL))


class Vocabulary:
    """Token numbers; the first four are padding, unknown, begin and end."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self._tokens = (*SPECIAL, *tokens)
        self._numbers = {token: number for number, token in enumerate(self._tokens)}

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def checksum(self) -> int:
        """Identifies the vocabulary."""
        return zlib.crc32("\n".join(self._tokens).encode())

    def numbers(self, tokens: Iterable[str]) -> list[int]:
        return [self._numbers.get(token, UNKNOWN) for token in tokens]

    def tokens(self, numbers: Iterable[int]) -> list[str]:
        """The tokens up to the end of the sentence; numbers outside of the vocabulary are unknown."""
        tokens = []
        for number in numbers:
            if number == END:
                break
            if number not in (PAD, BEGIN):
                tokens.append(self._tokens[number] if number < len(self) else SPECIAL[UNKNOWN])
        return tokens


def count_vocabulary(sentences: Iterable[Sequence[str]], at_most: int | None = None) -> Vocabulary:
    """The tokens of `sentences`, most frequent first, `at_most` including the special ones."""
    if at_most is not None and at_most <= len(SPECIAL):
        raise DataError(
            f"data.vocabulary_size: found {at_most}, expected at least {len(SPECIAL) + 1}: "
            f"{', '.join(SPECIAL)} are among them"
        )
    counts = Counter(token for sentence in sentences for token in sentence)
    by_frequency = sorted(counts.keys() - set(SPECIAL), key=lambda token: (-counts[token], token))
    return Vocabulary(by_frequency if at_most is None else by_frequency[: at_most - len(SPECIAL)])


def read_vocabulary(path: Path) -> Vocabulary:
    """Read a vocabulary: a token per line, or a token and its count, as from subword-nmt or fairseq.

    The special tokens may be in the file; they keep their numbers.
    """
    lines = read_lines(path, "a vocabulary, one token a line", "set data.vocabulary to one")
    seen: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        token, _, count = line.strip().partition(" ")
        if not token or (count and not count.isdecimal()):
            raise DataError(
                f"{path}, line {number}: found {line[:60]!r}, expected a token, or a token and its count; "
                f"write it with subword-nmt get-vocab, or give data.merges to learn one"
            )
        if token in seen:
            raise DataError(
                f"{path}, line {number}: the token {token!r} is already in line {seen[token]}; "
                f"a token has one number: remove one of the two lines"
            )
        seen[token] = number
    return Vocabulary([token for token in seen if token not in SPECIAL])
