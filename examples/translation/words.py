"""Splits text into words and punctuation, and joins them again."""

from __future__ import annotations

import re
from collections.abc import Sequence

# Command options, format directives, numbers with points or commas, words with hyphens or apostrophes, or a
# single sign.
_TOKENS = re.compile(r"(?<![\w-])--?\w[\w-]*|%[\w$.]*\w|\d+(?:[.,]\d+)+|\w+(?:[-'’.]\w+)*|[^\w\s]")
_ENTITIES = {
    "&apos;": "'",
    "&quot;": '"',
    "&lt;": "<",
    "&gt;": ">",
    "&#124;": "|",
    "&#91;": "[",
    "&#93;": "]",
    "&amp;": "&",
}
_TO_THE_LEFT = frozenset(".,:;!?%)]}…")
_TO_THE_RIGHT = frozenset("([{¿¡")
# Each opens a quotation if none of its kind is open, and closes it otherwise: German closes with what English
# opens with, and points its guillemets inwards.
_QUOTES = {sign: kind for kind in ('"', "'", "«»", "„“”", "‚‘’") for sign in kind}


def split_words(text: str) -> list[str]:
    """The words and punctuation of a text."""
    return _TOKENS.findall(text)


def join_words(words: Sequence[str]) -> str:
    """Join words and punctuation to a text; undoes Moses' entities and `@-@`.

    Where spacing is ambiguous (around a dash or a slash), spaces are kept.
    """
    text = ""
    glued = True
    open_quotes: set[str] = set()
    for word in map(_plain, words):
        if word == "@-@":
            text, glued = f"{text}-", True
            continue
        left, right = word in _TO_THE_LEFT, word in _TO_THE_RIGHT
        if kind := _QUOTES.get(word):
            left, right = kind in open_quotes, kind not in open_quotes
            open_quotes ^= {kind}
        text += word if glued or left else f" {word}"
        glued = right
    return text


def _plain(word: str) -> str:
    for entity, sign in _ENTITIES.items():
        word = word.replace(entity, sign)
    return word
