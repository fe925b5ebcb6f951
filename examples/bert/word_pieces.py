"""Word pieces: text to numbers of a vocabulary's pieces, each with its offsets in the text.

The tokenizers library splits words at whitespace, punctuation and Chinese characters, in lower case and
without accents, as BERT's uncased models do; a word is split greedily into the longest pieces of the
vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from plait.core.errors import DataError
from plait.workloads.data.files import decode_text, fingerprint, read_bytes

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
REMEDY = "set data.vocabulary_file to BERT's vocab.txt, a piece a line, or make one: examples/make_shards.py"


class Piece(NamedTuple):
    """A piece's number, and its characters `begin` to `end` in the text."""

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
        encoding = self._tokenizer.encode(text)
        return [Piece(number, *offsets) for number, offsets in zip(encoding.ids, encoding.offsets)]


def uncased(model: models.WordPiece) -> Tokenizer:
    """A tokenizer that splits text like BERT's uncased models, and words by `model`."""
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def read_pieces(path: Path) -> WordPieces:
    """Read a vocabulary file with one piece per line."""
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
