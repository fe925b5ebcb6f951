"""Message catalogues as a corpus: English messages and their translations, cleaned and split by hash."""

from __future__ import annotations

import gettext
import logging
import re
import struct
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from plait.core.errors import DataError
from plait.workloads.data.stored import Split
from translation.encoding import Encoding, learn_encoding
from translation.pairs import SentenceGroups, SentencePairs, arrange, is_test
from translation.words import split_words

log = logging.getLogger(__name__)

# The folder of German catalogues in Debian.
DEBIAN_FOLDER = "/usr/share/locale/de"
_REMEDY = "install packages with translations (Debian: git, gettext, coreutils), or set data.path"
_TAG = re.compile(r"</?\w[^<>]*>")
# The sign before the accelerator key of a menu entry: `_File`, `&File`.
_ACCELERATOR = re.compile(r"(?<![\w&])[_&](?=\w)")
_ONE_ACCELERATOR = re.compile(r"^[^_&]*[_&][^_&]*$")
_BLANKS = re.compile(r"\s+")
_LETTER = re.compile(r"[^\W\d_]")
_LEAST_WORDS, _LEAST_LETTERS, _MOST_RATIO = 2, 0.6, 2.5


def catalogues(
    split: Split,
    path: str = DEBIAN_FOLDER,
    test_fraction: float = 0.05,
    merges: int = 2000,
    vocabulary_size: int | None = None,
    longest: int = 40,
    sentences: int | None = None,
    tokens: int | None = None,
) -> SentencePairs | SentenceGroups:
    """The messages of all .mo files below `path`, from English into that folder's language.

    Messages are cleaned of tags and accelerators, and used once each, if they look like sentences. A hash of
    the English text selects those for testing. Byte-pair pieces are learned from the others, with `merges`
    merges; pairs with more than `longest` tokens are dropped.
    """
    if not 0 < test_fraction < 1:
        raise DataError(f"data.test_fraction: found {test_fraction}, expected more than 0 and less than 1")
    if merges < 1:
        raise DataError(f"data.merges: found {merges}, expected at least 1")
    pairs, encoding = _learned(Path(path).expanduser(), test_fraction, merges, vocabulary_size)
    english, others = zip(*(pair for pair in pairs if is_test(pair[0], test_fraction) == (split == "test")))
    return arrange(SentencePairs(english, others, encoding, others), sentences, tokens, longest)


# A run reads both splits, one after the other.
@lru_cache(maxsize=1)
def _learned(
    path: Path, test_fraction: float, merges: int, vocabulary_size: int | None
) -> tuple[list[tuple[str, str]], Encoding]:
    """All pairs, and the encoding that was learned from the training pairs."""
    pairs = read_catalogues(path)
    to_train = [pair for pair in pairs if not is_test(pair[0], test_fraction)]
    if not to_train or len(to_train) == len(pairs):
        raise DataError(
            f"{path}: found {len(pairs):,} pairs of sentences, too few for data.test_fraction "
            f"({test_fraction}); {_REMEDY}"
        )
    texts = [text for pair in to_train for text in pair]
    return pairs, learn_encoding(texts, merges, vocabulary_size, is_tokenised=False)


def read_catalogues(path: Path) -> list[tuple[str, str]]:
    """Cleaned pairs of sentences from all catalogues below `path`, without duplicate English texts."""
    files = sorted(path.rglob("*.mo")) if path.is_dir() else []
    if not files:
        problem = "holds no .mo file" if path.is_dir() else "no such folder"
        raise DataError(f"{path}: {problem}, expected message catalogues; {_REMEDY}")
    pairs = clean_pairs(pair for file in files for pair in _read_or_skip(file))
    if not pairs:
        raise DataError(
            f"{path}: its {len(files):,} catalogues hold no pair that looks like sentences; {_REMEDY}"
        )
    log.info("%s: %d pairs of sentences in %d catalogues", path, len(pairs), len(files))
    return pairs


def _read_or_skip(path: Path) -> list[tuple[str, str]]:
    """The messages of a catalogue, or none: gettext cannot read one in a thousand of Debian's."""
    try:
        return read_mo(path)
    except DataError as failure:
        log.warning("%s", failure)
        return []


def read_mo(path: Path) -> list[tuple[str, str]]:
    """The messages of a catalogue and their translations, in the file's order; the singular of plurals."""
    try:
        with path.open("rb") as file:
            # Python's reader has no public list of its messages.
            messages = gettext.GNUTranslations(file)._catalog  # type: ignore[attr-defined]
    except (OSError, ValueError, LookupError, struct.error) as failure:
        raise DataError(f"{path}: not a message catalogue that gettext can read ({failure})") from None
    pairs = []
    for message, text in messages.items():
        name, form = message if isinstance(message, tuple) else (message, 0)
        if name and form == 0:
            # Before \x04 is the message's context.
            pairs.append((name.rpartition("\x04")[2], text))
    return pairs


def clean_pairs(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """The cleaned pairs that look like a sentence and its translation; the first of each English text."""
    translations: dict[str, str] = {}
    for english, other in pairs:
        pair = clean(english), clean(other)
        if pair[0] not in translations and _look_like_sentences(*pair):
            translations[pair[0]] = pair[1]
    return list(translations.items())


def clean(text: str) -> str:
    """`text` in one line, without tags and accelerator signs."""
    text = _BLANKS.sub(" ", _TAG.sub("", text)).strip()
    return _ACCELERATOR.sub("", text) if _ONE_ACCELERATOR.match(text) else text


def _look_like_sentences(english: str, other: str) -> bool:
    """Whether both sides are mostly letters, of similar length, and different."""
    lengths = len(split_words(english)), len(split_words(other))
    return (
        english != other
        # Lines of a command's help are not sentences.
        and not english.startswith("-")
        and min(lengths) >= _LEAST_WORDS
        and max(lengths) <= _MOST_RATIO * min(lengths) + 2
        and all(len(_LETTER.findall(text)) >= _LEAST_LETTERS * len(text) for text in (english, other))
    )
