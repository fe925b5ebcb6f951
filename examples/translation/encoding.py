"""Encodes text as token numbers (words, byte-pair pieces, vocabulary), and decodes it."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from translation.bpe import Codes, join_pieces, learn_codes
from translation.vocabulary import Vocabulary, count_vocabulary
from translation.words import join_words, split_words


@dataclass(frozen=True)
class Encoding:
    """One encoding for both languages. Without `codes` a text's words are its tokens.

    With `is_tokenised` words are separated by whitespace; otherwise punctuation is separated too.
    """

    vocabulary: Vocabulary
    codes: Codes | None = None
    is_tokenised: bool = True

    def tokens(self, text: str) -> list[str]:
        words = text.split() if self.is_tokenised else split_words(text)
        return words if self.codes is None else self.codes.pieces(words)

    def numbers(self, text: str) -> list[int]:
        return self.vocabulary.numbers(self.tokens(text))

    def text(self, numbers: Iterable[int]) -> str:
        """Decode `numbers` to an ordinary sentence."""
        return join_words(join_pieces(self.vocabulary.tokens(numbers)))

    @property
    def checksum(self) -> int:
        """A checksum of the codes and the vocabulary."""
        merges = () if self.codes is None else self.codes.merges
        return zlib.crc32("\n".join(" ".join(merge) for merge in merges).encode(), self.vocabulary.checksum)


def learn_encoding(
    texts: Sequence[str], merges: int, vocabulary_size: int | None, is_tokenised: bool = True
) -> Encoding:
    """Codes and vocabulary learned from `texts` of both languages."""
    words = [text.split() if is_tokenised else split_words(text) for text in texts]
    codes = learn_codes((word for sentence in words for word in sentence), merges)
    vocabulary = count_vocabulary((codes.pieces(sentence) for sentence in words), vocabulary_size)
    return Encoding(vocabulary, codes, is_tokenised)
