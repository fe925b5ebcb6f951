"""Numbers in English and German words, in small sums: exact, unlimited, learned in a minute."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from functools import lru_cache

from plait.core.errors import DataError
from plait.workloads.data.stored import Split
from translation.encoding import Encoding, learn_encoding
from translation.pairs import SentenceGroups, SentencePairs, arrange, is_test

MILLION = 1_000_000
MOST = 1000 * MILLION
_TEST_FRACTION = 0.1
# The number of sentences from which the pieces are learned; more contain nothing new.
_TO_LEARN_FROM = 1000

_ENGLISH = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    *("eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
_ENGLISH_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_GERMAN = (
    *("null", "eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun", "zehn"),
    *("elf", "zwölf", "dreizehn", "vierzehn", "fünfzehn", "sechzehn", "siebzehn", "achtzehn", "neunzehn"),
)
_GERMAN_TENS = (
    "zwanzig",
    "dreißig",
    "vierzig",
    "fünfzig",
    "sechzig",
    "siebzig",
    "achtzig",
    "neunzig",
)
_SIGNS = (("plus", "plus"), ("minus", "minus"), ("times", "mal"))


def number_words(
    split: Split,
    limit: int = 1000,
    samples: int = 4096,
    test_samples: int = 200,
    merges: int = 100,
    vocabulary_size: int | None = None,
    sentences: int | None = None,
    tokens: int | None = None,
    seed: int = 0,
) -> SentencePairs | SentenceGroups:
    """`samples` sentences to train with, `test_samples` others to test with, of numbers below `limit`.

    A sentence is a number, two of them with a sign between them, or a sum with its result. Byte-pair pieces
    are learned from them, with `merges` merges.
    """
    counts = {"samples": samples, "test_samples": test_samples, "merges": merges}
    for name, value in counts.items():
        if value < 1:
            raise DataError(f"data.{name}: found {value}, expected at least 1")
    if not 20 <= limit <= MILLION:
        raise DataError(f"data.limit: found {limit:,}, expected a number from 20 to 1,000,000")
    encoding = _learned(min(samples, _TO_LEARN_FROM), limit, seed, merges, vocabulary_size)
    count = samples if split == "train" else test_samples
    english, german = (_Sums(split, count, limit, seed, side) for side in (0, 1))
    return arrange(SentencePairs(english, german, encoding), sentences, tokens)


# A run reads both splits, one after the other.
@lru_cache(maxsize=1)
def _learned(samples: int, limit: int, seed: int, merges: int, vocabulary_size: int | None) -> Encoding:
    texts = [text for side in (0, 1) for text in _Sums("train", samples, limit, seed, side)]
    return learn_encoding(texts, merges, vocabulary_size)


class _Sums(Sequence[str]):
    """One language's sentences, generated when they are read."""

    def __init__(self, split: Split, count: int, limit: int, seed: int, side: int) -> None:
        self._split: Split = split
        self._count = count
        self._limit = limit
        self._seed = seed
        self._side = side

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._count))]
        if not 0 <= index < self._count:
            raise IndexError(f"index {index} in a set of {self._count} sentences")
        return draw_sentence(self._split, index, self._limit, self._seed)[self._side]


def draw_sentence(split: Split, index: int, limit: int, seed: int) -> tuple[str, str]:
    """Sentence `index` of the split, in English and German; no sentence is in both splits."""
    for attempt in itertools.count():
        draw = random.Random(f"{seed} {split} {index} {attempt}")
        english, german = _sentence(draw, limit)
        if is_test(english, _TEST_FRACTION) == (split == "test"):
            return english, german
    raise AssertionError("there is always another attempt")


def _sentence(draw: random.Random, limit: int) -> tuple[str, str]:
    first, second = _number(draw, limit), _number(draw, limit)
    terms, (english, german) = draw.randrange(3), draw.choice(_SIGNS)
    if terms == 0:
        return in_english(first), in_german(first)
    first, second = (max(first, second), min(first, second)) if english == "minus" else (first, second)
    words = f"{in_english(first)} {english} {in_english(second)}"
    worte = f"{in_german(first)} {german} {in_german(second)}"
    if terms == 1:
        return words, worte
    result = {"plus": first + second, "minus": first - second, "times": first * second}[english]
    return f"{words} is {in_english(result % MOST)}", f"{worte} ist {in_german(result % MOST)}"


def _number(draw: random.Random, limit: int) -> int:
    """A number below `limit`; short ones are as frequent as long ones."""
    return draw.randrange(min(limit, 10 ** draw.randint(1, len(str(limit - 1)))))


def in_english(number: int) -> str:
    """`number`, below a thousand million, in words: `two hundred twenty-one`."""
    if number >= MILLION:
        return _joined(f"{in_english(number // MILLION)} million", number % MILLION)
    if number >= 1000:
        return _joined(f"{in_english(number // 1000)} thousand", number % 1000)
    if number >= 100:
        return _joined(f"{_ENGLISH[number // 100]} hundred", number % 100)
    if number < 20:
        return _ENGLISH[number]
    tens, ones = _ENGLISH_TENS[number // 10 - 2], number % 10
    return f"{tens}-{_ENGLISH[ones]}" if ones else tens


def _joined(words: str, rest: int) -> str:
    return f"{words} {in_english(rest)}" if rest else words


def in_german(number: int) -> str:
    """`number`, below a thousand million, in words: `zweihunderteinundzwanzig`."""
    if number < MILLION:
        return _below_million(number)
    count, rest = divmod(number, MILLION)
    millions = "eine Million" if count == 1 else f"{_below_million(count)} Millionen"
    return f"{millions} {_below_million(rest)}" if rest else millions


def _below_million(number: int) -> str:
    if number < 20:
        return _GERMAN[number]
    if number < 100:
        ones = f"{_before(number % 10)}und" if number % 10 else ""
        return ones + _GERMAN_TENS[number // 10 - 2]
    step, name = (100, "hundert") if number < 1000 else (1000, "tausend")
    rest = _below_million(number % step) if number % step else ""
    return f"{_before(number // step)}{name}{rest}"


def _before(number: int) -> str:
    """`number` before another word: `ein`, not `eins`."""
    return _below_million(number).removesuffix("s") if number % 100 == 1 else _below_million(number)
