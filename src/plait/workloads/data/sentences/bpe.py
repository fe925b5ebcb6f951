"""Byte-pair encoding (Sennrich et al., 2016): codes from a file or learned, words to pieces and back.

Files and pieces are those of subword-nmt: a merge a line, `@@` after each piece but a word's last.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from plait.core.errors import DataError
from plait.workloads.data.sentences.lines import read_lines

Merge = tuple[str, str]
Symbols = tuple[str, ...]
END_OF_WORD = "</w>"
CONTINUES = "@@"
_HEADER = "#version:"


class Codes:
    """Merges of neighbouring pieces, the most frequent first.

    In files of version 0.1 the end of a word is a symbol of its own; since 0.2 it is part of the last letter.
    """

    def __init__(self, merges: Sequence[Merge], separate_end: bool = False) -> None:
        self.merges = tuple(merges)
        self._rank = {merge: rank for rank, merge in enumerate(self.merges)}
        self._separate_end = separate_end
        self._known: dict[str, list[str]] = {}

    def pieces(self, words: Iterable[str]) -> list[str]:
        """All words' pieces, one after the other."""
        return [piece for word in words for piece in self._pieces_of(word)]

    def _pieces_of(self, word: str) -> list[str]:
        found = self._known.get(word)
        if found is None:
            found = self._known[word] = self._cut(word)
        return found

    def _cut(self, word: str) -> list[str]:
        symbols = (*word, END_OF_WORD) if self._separate_end else _letters(word)
        while len(symbols) > 1:
            best = min(pairwise(symbols), key=lambda pair: self._rank.get(pair, len(self._rank)))
            if best not in self._rank:
                break
            symbols = _merged(symbols, best)
        if symbols[-1] == END_OF_WORD:
            symbols = symbols[:-1]
        pieces = [*symbols[:-1], symbols[-1].removesuffix(END_OF_WORD)]
        return [f"{piece}{CONTINUES}" for piece in pieces[:-1]] + pieces[-1:]


def join_pieces(pieces: Sequence[str]) -> list[str]:
    """The words that `pieces` are of; a word that the sentence breaks off is taken as it is."""
    words, begun = [], ""
    for piece in pieces:
        if piece.endswith(CONTINUES):
            begun += piece.removesuffix(CONTINUES)
        else:
            words.append(begun + piece)
            begun = ""
    return [*words, begun] if begun else words


def learn_codes(words: Iterable[str], merges: int) -> Codes:
    """At most `merges` merges: each joins the pair of pieces that is the most frequent in `words` by then."""
    pairs = _PairCounts(Counter(word for word in words if word))
    learned: list[Merge] = []
    while len(learned) < merges and (best := pairs.pop_best()) is not None:
        learned.append(best)
        pairs.merge(best)
    return Codes(learned)


class _PairCounts:
    """How often each pair of neighbouring pieces stands in a corpus, kept up to date as pairs are merged."""

    def __init__(self, words: Mapping[str, int]) -> None:
        self._words = words
        self._spelled = {word: _letters(word) for word in words}
        self._counts: Counter[Merge] = Counter()
        self._homes: defaultdict[Merge, set[str]] = defaultdict(set)
        for word, symbols in self._spelled.items():
            for pair in pairwise(symbols):
                self._counts[pair] += words[word]
                self._homes[pair].add(word)
        # Entries whose count is no longer true are passed over.
        self._heap = [(-count, pair) for pair, count in self._counts.items()]
        heapq.heapify(self._heap)

    def pop_best(self) -> Merge | None:
        """The most frequent pair, of equally frequent ones the first; None where no pair stands twice."""
        while self._heap:
            count, pair = heapq.heappop(self._heap)
            if -count == self._counts[pair]:
                return pair if -count > 1 else None
        return None

    def merge(self, best: Merge) -> None:
        """Join `best` wherever it stands."""
        changed: set[Merge] = set()
        for word in self._homes.pop(best):
            before, after = self._spelled[word], _merged(self._spelled[word], best)
            if len(after) == len(before):  # an earlier merge has taken the pair from it
                continue
            self._spelled[word] = after
            for pair in pairwise(before):
                self._counts[pair] -= self._words[word]
            for pair in pairwise(after):
                self._counts[pair] += self._words[word]
                self._homes[pair].add(word)
            changed.update(pairwise(before), pairwise(after))
        for pair in changed:
            heapq.heappush(self._heap, (-self._counts[pair], pair))


def _letters(word: str) -> Symbols:
    return (*word[:-1], word[-1] + END_OF_WORD)


def _merged(symbols: Symbols, pair: Merge) -> Symbols:
    """`symbols` with each occurrence of `pair` joined, from left to right."""
    found: list[str] = []
    for symbol in symbols:
        # What was joined is longer than either half, so it cannot take part again.
        if found and (found[-1], symbol) == pair:
            found[-1] += symbol
        else:
            found.append(symbol)
    return tuple(found)


def read_codes(path: Path) -> Codes:
    """Codes as `subword-nmt learn-bpe` and `learn-joint-bpe-and-vocab` write them."""
    lines = read_lines(path, "byte-pair codes, a merge a line", "write them with subword-nmt learn-bpe")
    version: tuple[int, ...] = (0, 1)
    begin = 0
    if lines[0].startswith(_HEADER):
        version, begin = _version(path, lines[0]), 1
    merges = [_merge(path, number, line) for number, line in enumerate(lines[begin:], begin + 1)]
    if all(second.isdecimal() for _, second in merges):
        found = f"found {lines[begin][:60]!r}, a token and its count" if merges else "found no merges"
        raise DataError(
            f"{path}, line {begin + 1}: {found}, expected two pieces to join; codes are what subword-nmt "
            f"learn-bpe writes, and a vocabulary belongs to data.vocabulary"
        )
    return Codes(merges, separate_end=version == (0, 1))


def _version(path: Path, line: str) -> tuple[int, ...]:
    found = line.removeprefix(_HEADER).strip()
    if found not in ("0.1", "0.2"):
        raise DataError(
            f"{path}, line 1: found version {found!r} of byte-pair codes, expected 0.1 or 0.2; "
            f"learn them anew with subword-nmt learn-bpe"
        )
    return tuple(int(part) for part in found.split("."))


def _merge(path: Path, number: int, line: str) -> Merge:
    parts = line.strip("\r ").split(" ")
    if len(parts) != 2 or not all(parts):
        raise DataError(
            f"{path}, line {number}: found {line[:60]!r}, expected two pieces with a blank between them; "
            f"is it a vocabulary? Codes are what subword-nmt learn-bpe writes"
        )
    return parts[0], parts[1]
