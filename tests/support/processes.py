"""Which tests start worker processes or commands, derived from the names in their code, without marks."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest

TESTS = str(Path(__file__).parent.parent)
# A test that uses one of these starts processes, or makes hosts for them.
STARTERS = frozenset(
    (
        "run_ranks",
        "subprocess",
        "multiprocessing",
        "CliRunner",
        "Supervisor",
        "in_world",
        "launch",
        "Chaos",
        "Forked",
    )
)
# So do these of `plait` and its command line.
CALLS = frozenset(("train", "sweep", "run_job"))


def starts_processes(item: pytest.Function) -> bool:
    """Whether the test, one of its fixtures or a helper of theirs in the tests' files starts a process."""
    fixtures = item._fixtureinfo.name2fixturedefs
    functions = [item.function, *(fixture.func for own in fixtures.values() for fixture in own)]
    return "hosts" in fixtures or any(_starts(function, set()) for function in functions)


def _starts(function: Callable[..., Any], seen: set[int]) -> bool:
    function = inspect.unwrap(function)
    if not isinstance(function, FunctionType) or id(function) in seen:
        return False
    seen.add(id(function))
    at_once, others = _look(function)
    return at_once or any(_starts(own, seen) for own in others)


@functools.cache
def _look(function: FunctionType) -> tuple[bool, list[FunctionType]]:
    """Whether the function itself starts a process, and the tests' own functions that it refers to."""
    names = set(_names(function.__code__))
    found = [function.__globals__.get(name) for name in names]
    at_once = bool(names & STARTERS or ("plait" in names and names & CALLS))
    return at_once, [own for value in found for own in _functions(value)]


def _names(code: CodeType) -> Iterator[str]:
    """What the code, and code within it, refers to by name."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _functions(value: Any) -> list[FunctionType]:
    """The functions of the tests' own files that `value` is or, being a class, has."""
    found = vars(value).values() if inspect.isclass(value) else [value]
    unwrapped = [inspect.unwrap(own) for own in found if callable(own)]
    return [
        own
        for own in unwrapped
        if isinstance(own, FunctionType) and own.__code__.co_filename.startswith(TESTS)
    ]
