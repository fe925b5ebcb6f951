"""Word pieces: text to the numbers of a vocabulary's pieces, each with its place in the text.

The tokenizers library splits words at blanks, punctuation and Chinese characters, in lower case and without
accents, as BERT's uncased models do; a word becomes the longest pieces that the vocabulary has, from its
beginning on.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from plait.core.errors import DataError
from plait.workloads.data.files import decode_text, fingerprint, read_bytes

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
REMEDY = (
    "set data.vocabulary_file to BERT's vocab.txt, a piece a line, or make one: examples/text/make_shards.py"
)


class Piece(NamedTuple):
    """A piece's number, and the characters `begin` to `end` of the text that it stands for."""

    number: int
    begin: int
    end: int


class WordPieces:
    """A vocabulary of word pieces; those that continue a word begin with ##."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self.pieces = list(pieces)
        numbers = {piece: number for number, piece in enumerate(self.pieces)}
        self.pad, self.unknown, self.first, self.separator, self.mask = (numbers[s] for s in SPECIAL)
        self.id = fingerprint(self.pieces)
        self._tokenizer = uncased(models.WordPiece(numbers, unk_token="[UNK]", max_input_chars_per_word=100))

    def __len__(self) -> int:
        return len(self.pieces)

    def encode(self, text: str) -> list[Piece]:
        """The pieces of `text` in order."""
        found = self._tokenizer.encode(text)
        return [Piece(number, *place) for number, place in zip(found.ids, found.offsets)]


def uncased(model: models.WordPiece) -> Tokenizer:
    """What splits text as BERT's uncased models do, and its words as `model` says."""
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


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
