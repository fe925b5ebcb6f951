"""A vocabulary of word pieces from a text: characters, then the pairs that occur most often, joined."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Mapping
from itertools import pairwise

from plait.core.errors import DataError
from plait.workloads.bert.wordpiece import LONGEST_WORD, SPECIAL

Pair = tuple[str, str]


def build_vocabulary(words: Mapping[str, int], size: int) -> list[str]:
    """At most `size` pieces for words that occur so often; the same for the same words, in any order."""
    counts = {word: count for word, count in words.items() if 0 < len(word) <= LONGEST_WORD}
    characters: Counter[str] = Counter()
    for word, count in counts.items():
        for piece in _characters(word):
            characters[piece] += count
    if not characters:
        raise DataError("the text has no words to build a vocabulary of; give one with some")
    least = len(SPECIAL) + 1
    if size < least:
        raise DataError(f"vocabulary: found {size}, expected at least {least} pieces")
    # The rarest characters go where there is no room for all.
    kept = sorted(characters, key=lambda c: (-characters[c], c))[: size - len(SPECIAL)]
    pieces = [*SPECIAL, *sorted(kept)]
    taken = set(pieces)
    joined = _Joined(counts, set(kept))
    while len(pieces) < size and (new := joined.join_most_frequent()) is not None:
        if new not in taken:
            taken.add(new)
            pieces.append(new)
    return pieces


def _characters(word: str) -> list[str]:
    return [word[0], *(f"##{character}" for character in word[1:])]


def _together(pair: Pair) -> str:
    return pair[0] + pair[1].removeprefix("##")


class _Joined:
    """Words as sequences of pieces, and how often each pair of neighbours occurs in all of them."""

    def __init__(self, counts: Mapping[str, int], known: set[str]) -> None:
        self._known = known
        self._words = {word: _characters(word) for word in sorted(counts)}
        self._counts = counts
        self._pairs: Counter[Pair] = Counter()
        self._where: defaultdict[Pair, set[str]] = defaultdict(set)
        for word in self._words:
            self._note(word, 1)
        self._queue = [(-count, pair) for pair, count in self._pairs.items()]
        heapq.heapify(self._queue)

    def join_most_frequent(self) -> str | None:
        """Join the pair that occurs most often, everywhere; None where no two pieces are left."""
        while self._queue:
            count, pair = heapq.heappop(self._queue)
            if -count == self._pairs[pair] and count:
                self._join(pair)
                return _together(pair)
        return None

    def _join(self, pair: Pair) -> None:
        changed: set[Pair] = set()
        self._known.add(_together(pair))
        for word in sorted(self._where[pair]):
            changed |= self._note(word, -1)
            self._words[word] = _with_joined(self._words[word], pair)
            changed |= self._note(word, 1)
        for other in changed:
            if self._pairs[other] > 0:
                heapq.heappush(self._queue, (-self._pairs[other], other))

    def _note(self, word: str, sign: int) -> set[Pair]:
        """Count a word's pairs, or take them back; those with a rare character are never joined."""
        pieces = self._words[word]
        found = set()
        for pair in pairwise(pieces):
            if pair[0] not in self._known or pair[1] not in self._known:
                continue
            self._pairs[pair] += sign * self._counts[word]
            (self._where[pair].add if sign > 0 else self._where[pair].discard)(word)
            found.add(pair)
        return found


def _with_joined(pieces: list[str], pair: Pair) -> list[str]:
    found: list[str] = []
    for piece in pieces:
        if found and (found[-1], piece) == pair:
            found[-1] = _together(pair)
        else:
            found.append(piece)
    return found
