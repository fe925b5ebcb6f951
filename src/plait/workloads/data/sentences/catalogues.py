"""Message catalogues as a corpus: English messages and their translations, cleaned and split by hash."""

from __future__ import annotations

import logging
import re
import struct
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from plait.core.errors import DataError
from plait.workloads.data.files import read_bytes
from plait.workloads.data.sentences.encoding import Encoding, learn_encoding
from plait.workloads.data.sentences.pairs import SentenceGroups, SentencePairs, arrange
from plait.workloads.data.sentences.splitting import is_test
from plait.workloads.data.sentences.words import split_words
from plait.workloads.data.stored import Split

log = logging.getLogger(__name__)

# The folder of German catalogues in Debian.
DEBIAN_FOLDER = Path("/usr/share/locale/de")
_REMEDY = "install packages with translations (Debian: git, gettext, coreutils), or set data.path"
_FILE_REMEDY = "reinstall its package, or remove the file from the folder"
_ORDERS = {b"\xde\x12\x04\x95": "<", b"\x95\x04\x12\xde": ">"}
_CHARSET = re.compile(rb"charset=(?!CHARSET)([\w.:-]+)")
_TAG = re.compile(r"</?\w[^<>]*>")
# The sign before the accelerator key of a menu entry: `_File`, `&File`.
_ACCELERATOR = re.compile(r"(?<![\w&])[_&](?=\w)")
_ONE_ACCELERATOR = re.compile(r"^[^_&]*[_&][^_&]*$")
_BLANKS = re.compile(r"\s+")
_LETTER = re.compile(r"[^\W\d_]")
_LEAST_WORDS, _LEAST_LETTERS, _MOST_RATIO = 2, 0.6, 2.5


def catalogues(
    split: Split,
    path: Path = DEBIAN_FOLDER,
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
    pairs, encoding = _learned(path, test_fraction, merges, vocabulary_size)
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
    pairs = clean_pairs(pair for file in files for pair in read_mo(file))
    if not pairs:
        raise DataError(
            f"{path}: its {len(files):,} catalogues hold no pair that looks like sentences; {_REMEDY}"
        )
    log.info("%s: %d pairs of sentences in %d catalogues", path, len(pairs), len(files))
    return pairs


def read_mo(path: Path) -> list[tuple[str, str]]:
    """The messages of a catalogue and their translations, in the file's order; the singular of plurals.

    The catalogue's description, under the empty message, is skipped, and so is the context of a message.
    Python's gettext does not list messages, and fails on descriptions in another encoding than UTF-8, as in
    some of Debian's files.
    """
    data = read_bytes(path, "a message catalogue (.mo)", _FILE_REMEDY)
    order = _ORDERS.get(data[:4])
    if order is None:
        raise DataError(
            f"{path}: found {data[:4].hex()} as its first bytes, not those of a .mo file; {_FILE_REMEDY}"
        )
    try:
        count, *offsets = struct.unpack_from(f"{order}3I", data, 8)
        tables = [
            [struct.unpack_from(f"{order}2I", data, offset + 8 * i) for i in range(count)]
            for offset in offsets
        ]
        if any(begin + length > len(data) for table in tables for length, begin in table):
            raise ValueError(f"a string ends beyond the file's {len(data):,} bytes")
        messages, texts = ([data[begin : begin + length] for length, begin in table] for table in tables)
        described = _CHARSET.search(b"".join(text for message, text in zip(messages, texts) if not message))
        charset = described[1].decode() if described else "utf-8"
        pairs = [(m.decode(charset), text.decode(charset)) for m, text in zip(messages, texts) if m]
    except (struct.error, LookupError, ValueError) as failure:
        raise DataError(
            f"{path}: it is damaged, or not in the encoding that it names ({failure}); {_FILE_REMEDY}"
        ) from None
    plain = [(message.rpartition("\x04")[2], text) for message, text in pairs]
    return [(message.partition("\0")[0], text.partition("\0")[0]) for message, text in plain]


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
