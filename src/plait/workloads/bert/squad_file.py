"""SQuAD 2.0's JSON files: questions about paragraphs, some of which have no answer there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.core.errors import DataError
from plait.workloads.data.files import decode_text, read_bytes

REMEDY = "use the files as published (train-v2.0.json, dev-v2.0.json), or repair this one"

_EXPECTED: dict[type, str] = {list: "a list", str: "text", int: "the number of a character"}


@dataclass(frozen=True)
class Answer:
    """A part of the paragraph, and the character at which it begins."""

    text: str
    begin: int

    @property
    def end(self) -> int:
        return self.begin + len(self.text)


@dataclass(frozen=True)
class Question:
    """A question about `context`; without `answers` it has none there."""

    id: str
    text: str
    context: str
    answers: tuple[Answer, ...]


def read_squad(path: Path) -> list[Question]:
    """All questions of a file, in order; what is malformed is refused with its place."""
    text = decode_text(path, read_bytes(path, "a SQuAD v2.0 JSON file", REMEDY), REMEDY)
    try:
        content = json.loads(text)
    except json.JSONDecodeError as failure:
        raise DataError(
            f"{path}, line {failure.lineno}: not JSON ({failure.msg}, column {failure.colno}); {REMEDY}"
        ) from None
    found = list(_Reader(path).questions(content))
    if not found:
        raise DataError(f"{path}: found no questions; {REMEDY}")
    return found


class _Reader:
    """Takes a file's content apart and names the place of what does not fit."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def questions(self, content: Any) -> Iterator[Question]:
        for i, article in enumerate(self._value(content, "data", list, "")):
            at = f"data[{i}]"
            for j, paragraph in enumerate(self._value(article, "paragraphs", list, at)):
                place = f"{at}.paragraphs[{j}]"
                context = self._value(paragraph, "context", str, place)
                for k, question in enumerate(self._value(paragraph, "qas", list, place)):
                    yield self._question(question, context, f"{place}.qas[{k}]")

    def _question(self, question: Any, context: str, place: str) -> Question:
        id_, text = (self._value(question, key, str, place) for key in ("id", "question"))
        if question.get("is_impossible", False):
            return Question(id_, text, context, ())
        found = self._value(question, "answers", list, place)
        if not found:
            raise self._error(f"{place}.answers", "none", "at least one, or is_impossible: true")
        each = (self._answer(one, context, f"{place}.answers[{n}]") for n, one in enumerate(found))
        return Question(id_, text, context, tuple(each))

    def _answer(self, answer: Any, context: str, place: str) -> Answer:
        text, begin = self._value(answer, "text", str, place), self._value(answer, "answer_start", int, place)
        there = context[begin : begin + len(text)] if begin >= 0 else ""
        if not text or there != text:
            raise self._error(f"{place}.text", repr(text), f"what the context has at {begin}, {there!r}")
        return Answer(text, begin)

    def _value(self, holder: Any, key: str, kind: type, place: str) -> Any:
        if not isinstance(holder, dict):
            raise self._error(place or "the file", f"a {type(holder).__name__}", f"an object with {key!r}")
        if key not in holder:
            keys = ", ".join(sorted(holder)) or "nothing"
            raise self._error(place or "the file", f"an object with {keys}", f"one with {key!r}")
        if not isinstance(holder[key], kind) or isinstance(holder[key], bool):
            found = f"a {type(holder[key]).__name__}"
            raise self._error(f"{place}.{key}".lstrip("."), found, _EXPECTED[kind])
        return holder[key]

    def _error(self, place: str, found: str, expected: str) -> DataError:
        return DataError(f"{self._path}: {place}: found {found}, expected {expected}; {REMEDY}")
