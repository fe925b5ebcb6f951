"""Docstrings, comments and messages use common words: some private ones must not return."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

import plait

SOURCE = Path(plait.__file__).parent
# The packages whose prose was rewritten; add one here after doing the same for it.
PACKAGES = (
    "adapt", "api", "callbacks", "cli", "comm", "core", "data", "fusion", "graph", "jobs", "launcher",
    "measure", "pipeline", "planner", "profiler", "report", "schema", "sweeping", "sync", "training",
    "verification", "workloads",
)  # fmt: skip
NOT_YET = {
    "pipeline/executor.py",
    "training/audit/replica_audit.py",
    "training/engines/decentralized.py",
}
# Say again, next to, N, separate, depends on, the caller, in flight, released, ... instead.
FORBIDDEN = (
    "anew", "anybody", "beside", "come to", "comes to", "everybody", "given back", "go by", "goes by",
    "hands over", "in trust", "in vain", "lay", "let go", "lies", "lone", "nobody", "of its own",
    "of our own", "of their own", "on its way", "on their way", "own pace", "quicken", "signs of life",
    "so many", "somebody", "someone", "taken down", "under way", "what there is", "whoever", "whom",
)  # fmt: skip
# Packages whose variables and attributes say what they hold, and names that do not.
NAMED_PACKAGES = ("cli", "core", "launcher", "schema", "sync")
FORBIDDEN_NAMES = {"found", "own", "place", "said", "words"}
PATTERN = re.compile(rf"\b({'|'.join(FORBIDDEN)})\b", re.IGNORECASE)


def prose(text: str) -> Iterator[tuple[int, str]]:
    """The comments and strings of a file, docstrings among them, with their lines."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            yield token.start[0], " ".join(token.string.split())


@pytest.mark.parametrize("package", PACKAGES)
def test_prose_is_free_of_words_that_a_newcomer_would_have_to_learn(package: str) -> None:
    files = sorted((SOURCE / package).rglob("*.py"))
    assert files
    found = [
        f"{file.relative_to(SOURCE)}:{line}: {match[0]!r} in {text[max(0, match.start() - 40) :][:90]!r}"
        for file in files
        if str(file.relative_to(SOURCE)) not in NOT_YET
        for line, text in prose(file.read_text())
        for match in PATTERN.finditer(text)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("package", NAMED_PACKAGES)
def test_names_say_what_they_hold(package: str) -> None:
    vague = [
        f"{file.relative_to(SOURCE)}:{token.start[0]}: {token.string}"
        for file in sorted((SOURCE / package).rglob("*.py"))
        for token in tokenize.generate_tokens(io.StringIO(file.read_text()).readline)
        if token.type == tokenize.NAME and token.string in FORBIDDEN_NAMES
    ]
    assert not vague, "\n".join(vague)


def test_the_pattern_sees_docstrings_comments_and_messages() -> None:
    text = '"""It is made\n    anew."""\n\nx = 1  # beside y\nprint(f"whoever {x}")\n'
    assert [line for line, each in prose(text) if PATTERN.search(each)] == [1, 4, 5]
