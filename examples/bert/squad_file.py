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
    """All questions of a file, in order; an error names the location of malformed content."""
    text = decode_text(path, read_bytes(path, "a SQuAD v2.0 JSON file", REMEDY), REMEDY)
    try:
        content = json.loads(text)
    except json.JSONDecodeError as failure:
        raise DataError(
            f"{path}, line {failure.lineno}: not JSON ({failure.msg}, column {failure.colno}); {REMEDY}"
        ) from None
    questions = list(_Reader(path).questions(content))
    if not questions:
        raise DataError(f"{path}: found no questions; {REMEDY}")
    return questions


class _Reader:
    """Parses a file's content; errors name the location."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def questions(self, content: Any) -> Iterator[Question]:
        for i, article in enumerate(self._value(content, "data", list, "")):
            at = f"data[{i}]"
            for j, paragraph in enumerate(self._value(article, "paragraphs", list, at)):
                where = f"{at}.paragraphs[{j}]"
                context = self._value(paragraph, "context", str, where)
                for k, question in enumerate(self._value(paragraph, "qas", list, where)):
                    yield self._question(question, context, f"{where}.qas[{k}]")

    def _question(self, question: Any, context: str, where: str) -> Question:
        id_, text = (self._value(question, key, str, where) for key in ("id", "question"))
        if question.get("is_impossible", False):
            return Question(id_, text, context, ())
        answers = self._value(question, "answers", list, where)
        if not answers:
            raise self._error(f"{where}.answers", "none", "at least one, or is_impossible: true")
        each = (self._answer(one, context, f"{where}.answers[{n}]") for n, one in enumerate(answers))
        return Question(id_, text, context, tuple(each))

    def _answer(self, answer: Any, context: str, where: str) -> Answer:
        text, begin = self._value(answer, "text", str, where), self._value(answer, "answer_start", int, where)
        there = context[begin : begin + len(text)] if begin >= 0 else ""
        if not text or there != text:
            raise self._error(f"{where}.text", repr(text), f"what the context has at {begin}, {there!r}")
        return Answer(text, begin)

    def _value(self, holder: Any, key: str, kind: type, where: str) -> Any:
        if not isinstance(holder, dict):
            raise self._error(where or "the file", f"a {type(holder).__name__}", f"an object with {key!r}")
        if key not in holder:
            keys = ", ".join(sorted(holder)) or "nothing"
            raise self._error(where or "the file", f"an object with {keys}", f"one with {key!r}")
        if not isinstance(holder[key], kind) or isinstance(holder[key], bool):
            found = f"a {type(holder[key]).__name__}"
            raise self._error(f"{where}.{key}".lstrip("."), found, _EXPECTED[kind])
        return holder[key]

    def _error(self, where: str, found: str, expected: str) -> DataError:
        return DataError(f"{self._path}: {where}: found {found}, expected {expected}; {REMEDY}")
