"""Word pieces: text to the numbers of a vocabulary's pieces, each with its place in the text.

Words are split at blanks, punctuation and Chinese characters, in lower case and without accents, as BERT's
uncased models do; a word becomes the longest pieces that the vocabulary has, from its beginning on.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from plait.core.errors import DataError
from plait.workloads.data.files import decode_text, fingerprint, read_bytes

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
LONGEST_WORD = 100
REMEDY = "set data.vocabulary_file to BERT's vocab.txt, one piece a line, or make one: plait shards"


@dataclass(frozen=True)
class Piece:
    """A piece's number, and the characters `begin` to `end` of the text that it stands for."""

    number: int
    begin: int
    end: int


class WordPieces:
    """A vocabulary of word pieces; those that continue a word begin with ##."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self.pieces = list(pieces)
        self.numbers = {piece: number for number, piece in enumerate(self.pieces)}
        self.pad, self.unknown, self.first, self.separator, self.mask = (self.numbers[s] for s in SPECIAL)
        self.id = fingerprint(self.pieces)

    def __len__(self) -> int:
        return len(self.pieces)

    def encode(self, text: str) -> list[Piece]:
        """The pieces of `text` in order."""
        return [piece for word, places in split_words(text) for piece in self._split(word, places)]

    def _split(self, word: str, places: Sequence[int]) -> Iterator[Piece]:
        found: list[Piece] = []
        begin = 0
        while begin < len(word) <= LONGEST_WORD:
            end, number = self._longest(word, begin)
            if number is None:
                break
            found.append(Piece(number, places[begin], places[end - 1] + 1))
            begin = end
        if begin < len(word):
            return iter((Piece(self.unknown, places[0], places[-1] + 1),))
        return iter(found)

    def _longest(self, word: str, begin: int) -> tuple[int, int | None]:
        prefix = "##" if begin else ""
        for end in range(len(word), begin, -1):
            number = self.numbers.get(prefix + word[begin:end])
            if number is not None:
                return end, number
        return begin, None


def split_words(text: str) -> Iterator[tuple[str, list[int]]]:
    """Each word, normalised, with the place in `text` of each of its characters."""
    word: list[str] = []
    places: list[int] = []
    for place, character in enumerate(text):
        alone = _stands_alone(character)
        if word and (alone or character.isspace()):
            yield "".join(word), places
            word, places = [], []
        if alone:
            yield character, [place]
        elif not character.isspace():
            kept = _normalised(character)
            word += kept
            places += [place] * len(kept)
    if word:
        yield "".join(word), places


def _normalised(character: str) -> str:
    """In lower case, without accents and control characters."""
    if character.isascii():
        return character.lower() if character.isprintable() else ""
    apart = unicodedata.normalize("NFD", character.lower())
    return "".join(c for c in apart if unicodedata.category(c) not in ("Mn", "Cc", "Cf"))


def _stands_alone(character: str) -> bool:
    """Whether it is a word by itself: punctuation, a symbol, or a Chinese character."""
    if character.isascii():
        return character.isprintable() and not character.isalnum() and character != " "
    return unicodedata.category(character).startswith("P") or 0x4E00 <= ord(character) <= 0x9FFF


def read_pieces(path: Path) -> WordPieces:
    """The vocabulary in a file of one piece a line."""
    text = decode_text(path, read_bytes(path, "a vocabulary of word pieces", REMEDY), REMEDY)
    pieces = text.removesuffix("\n").split("\n")
    first_line: dict[str, int] = {}
    for line, piece in enumerate(pieces, 1):
        if not piece or piece.split() != [piece]:
            raise DataError(f"{path}, line {line}: found {piece!r}, expected one piece; {REMEDY}")
        if first_line.setdefault(piece, line) != line:
            raise DataError(
                f"{path}, line {line}: found {piece!r} again, which line {first_line[piece]} has; {REMEDY}"
            )
    missing = [piece for piece in SPECIAL if piece not in first_line]
    if missing:
        raise DataError(f"{path}: it has no {missing[0]}, which BERT needs; {REMEDY}")
    return WordPieces(pieces)


def words_of(texts: Iterable[str]) -> Iterator[str]:
    """Every word of every text, normalised."""
    for text in texts:
        for word, _ in split_words(text):
            yield word
