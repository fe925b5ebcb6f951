"""Byte-pair encoding (Sennrich et al., 2016): codes from a file or learned, words to pieces and back.

Files and pieces are those of subword-nmt: one merge per line, `@@` after each piece but a word's last. The
tokenizers library learns and applies the merges.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

from tokenizers import Tokenizer, models, trainers

from plait.core.errors import DataError
from translation.lines import read_lines

Merge = tuple[str, str]
END_OF_WORD = "</w>"
CONTINUES = "@@"
_HEADER = "#version:"
# The end of a word in files where it is a separate symbol, as the library's symbols are characters.
_END_CHARACTER = "\x03"


class Codes:
    """Merges of neighbouring pieces, the most frequent first.

    In files of version 0.1 the end of a word is a separate symbol; since 0.2 it is part of the last letter.
    """

    def __init__(self, merges: Sequence[Merge], separate_end: bool = False) -> None:
        self.merges = tuple(merges)
        self._end = _END_CHARACTER if separate_end else ""
        rules = [(a, b) for a, b in dict.fromkeys(self.merges)]
        if separate_end:
            rules = [(a.replace(END_OF_WORD, self._end), b.replace(END_OF_WORD, self._end)) for a, b in rules]
        symbols = dict.fromkeys(("<unk>", *(symbol for a, b in rules for symbol in (a, b, a + b))))
        model = models.BPE(
            {symbol: number for number, symbol in enumerate(symbols)},
            rules,
            unk_token="<unk>",
            end_of_word_suffix="" if separate_end else END_OF_WORD,
        )
        self._tokenizer = Tokenizer(model)
        self._known: dict[str, list[str]] = {}

    def pieces(self, words: Iterable[str]) -> list[str]:
        """The pieces of all words, in order."""
        return [piece for word in words for piece in self._pieces_of(word)]

    def _pieces_of(self, word: str) -> list[str]:
        if word not in self._known:
            ends = [end for _, end in self._tokenizer.encode(word + self._end).offsets]
            cuts = [0, *(end for end in ends if end < len(word)), len(word)]
            *before, last = (word[begin:end] for begin, end in pairwise(cuts))
            self._known[word] = [*(piece + CONTINUES for piece in before), last]
        return self._known[word]


def join_pieces(pieces: Sequence[str]) -> list[str]:
    """The words of `pieces`; an incomplete last word is kept."""
    words, begun = [], ""
    for piece in pieces:
        if piece.endswith(CONTINUES):
            begun += piece.removesuffix(CONTINUES)
        else:
            words.append(begun + piece)
            begun = ""
    return [*words, begun] if begun else words


def learn_codes(words: Iterable[str], merges: int) -> Codes:
    """Learn at most `merges` merges: each joins the most frequent pair of pieces in `words`."""
    # Its threads would compete with training, and a forked loader would warn about them.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    words = [word for word in words if word]
    letters = {letter for word in words for letter in word}
    # Listed in order, so that ties between equally frequent pairs are broken the same way each time.
    ends = sorted({word[-1] + END_OF_WORD for word in words})
    trainer = trainers.BpeTrainer(
        vocab_size=len(letters) + len(ends) + merges,
        min_frequency=2,
        special_tokens=ends,
        end_of_word_suffix=END_OF_WORD,
        show_progress=False,
    )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.train_from_iterator(words, trainer)
    return Codes([(a, b) for a, b in json.loads(tokenizer.to_str())["model"]["merges"]])


def read_codes(path: Path) -> Codes:
    """Codes as `subword-nmt learn-bpe` and `learn-joint-bpe-and-vocab` write them."""
    lines = read_lines(path, "byte-pair codes, a merge a line", "write them with subword-nmt learn-bpe")
    version: tuple[int, ...] = (0, 1)
    begin = 0
    if lines[0].startswith(_HEADER):
        version, begin = _version(path, lines[0]), 1
    merges = [_merge(path, number, line) for number, line in enumerate(lines[begin:], begin + 1)]
    if all(second.isdecimal() for _, second in merges):
        problem = f"found {lines[begin][:60]!r}, a token and its count" if merges else "found no merges"
        raise DataError(
            f"{path}, line {begin + 1}: {problem}, expected two pieces to join; codes are what subword-nmt "
            f"learn-bpe writes, and a vocabulary belongs to data.vocabulary"
        )
    return Codes(merges, separate_end=version == (0, 1))


def _version(path: Path, line: str) -> tuple[int, ...]:
    version = line.removeprefix(_HEADER).strip()
    if version not in ("0.1", "0.2"):
        raise DataError(
            f"{path}, line 1: found version {version!r} of byte-pair codes, expected 0.1 or 0.2; "
            f"learn them again with subword-nmt learn-bpe"
        )
    return tuple(int(part) for part in version.split("."))


def _merge(path: Path, number: int, line: str) -> Merge:
    parts = line.strip("\r ").split(" ")
    if len(parts) != 2 or not all(parts):
        raise DataError(
            f"{path}, line {number}: found {line[:60]!r}, expected two pieces with a blank between them; "
            f"is it a vocabulary? Codes are what subword-nmt learn-bpe writes"
        )
    return parts[0], parts[1]
