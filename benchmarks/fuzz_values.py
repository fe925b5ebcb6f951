"""Odd values and text, and trees and text changed at random, for benchmarks/fuzz_targets.py."""

from __future__ import annotations

import copy
import random
import string
from collections.abc import Iterator
from typing import Any


def words(text: str) -> list[str]:
    return text.split()


LONG = "a" * 3000
DEEP: Any = []
for _ in range(150):
    DEEP = [DEEP]
# Values that stand where something else was meant.
ODD: list[Any] = [
    *(None, True, False, 0, -1, 1, 3, 2**31, 2**53 + 1, 2**63, 2**200, -(2**70), 10**4000),
    *(0.5, -0.5, 1e-320, 1e18, 1e308, float("inf"), float("-inf"), float("nan")),
    *words("x 1 1e3 010 1:30 nan null yes -x .. ../../x / : os:system builtins:print a:b:c $(x)"),
    *("", " ", "a\0b", "x; touch y", "é\u2028😀", LONG, "9" * 5000),
    *([], {}, [[]], [None], [1, 2, 3], ["a"], {"a": 1}, {"": ""}, {1: 2}, {"kind": "sgd"}, DEEP),
    *([float("nan")], list(range(3000)), {f"k{i}": i for i in range(3000)}),
]
# Text that means something to one of the parsers.
TOKENS = [
    *words("nan inf -1 1e999 0x10 0o9 1_0 1:30 ٣ ² *a 2020-99-99 null true Infinity NaN 1e-320 é"),
    *words("[ ] { } \" ' , : = % @ ` | > # ... !!python/name:os.system"),
    *("\0", "\t", "\n", "\r", "\ufeff", "\ud800", "? ", "--- ", "&a [*a]", "<<: *a", LONG),
    *(f"!!{tag} q" for tag in words("int float bool null timestamp binary str seq map")),
    *("!!set {a}", "!!omap [b]", "[" * 2000, "{a: " * 500, "9" * 30, "9" * 5000),
]


def _paths(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, below in items:
        yield from _paths(below, (*path, key))


def changed_tree(source: random.Random, tree: Any) -> tuple[str, Any]:
    """`tree` with one or two of its values replaced, removed, added or wrapped; and in words what changed."""
    tree, words = copy.deepcopy(tree), []
    for _ in range(source.choice((1, 1, 1, 2))):
        paths = list(_paths(tree))
        if not paths:
            break
        *parents, last = source.choice(paths)
        parent = tree
        for key in parents:
            parent = parent[key]
        words.append(_change(source, parent, last, tree))
    return "; ".join(words), tree


def _change(source: random.Random, parent: Any, key: Any, tree: Any) -> str:
    action = source.choice(("odd", "odd", "odd", "remove", "add", "copy", "negate", "wrap"))
    if action == "remove":
        del parent[key]
    elif action == "add" and isinstance(parent, dict):
        key = source.choice(("zzz", "", "é", "name", 1, None, LONG, "learning_rate", "kinds"))
        parent[key] = copy.deepcopy(source.choice(ODD))
    elif action == "copy":
        parent[key] = copy.deepcopy(source.choice([parent[key], *_some(source, tree)]))
    elif action == "negate" and isinstance(parent[key], (int, float)):
        parent[key] = -parent[key]
    elif action == "wrap":
        parent[key] = source.choice(([parent[key]], {"x": parent[key]}, str(parent[key])))
    else:
        parent[key] = copy.deepcopy(source.choice(ODD))
    return f"{key!r:.40}: {action} {_short(parent.get(key) if isinstance(parent, dict) else None)}"


def _some(source: random.Random, tree: Any) -> list[Any]:
    """The value at some path of `tree`."""
    value = tree
    for key in source.choice(list(_paths(tree)) or [()]):
        value = value[key]
    return [value]


def _short(value: Any) -> str:
    try:
        return repr(value)[:60]
    except ValueError:  # an integer of too many digits
        return "a huge number"


def changed_text(source: random.Random, text: str) -> str:
    """`text` with a few letters replaced, removed, repeated or put in, or cut off."""
    for _ in range(source.choice((1, 1, 2, 5))):
        at = source.randrange(len(text) + 1)
        end = min(len(text), at + source.randrange(1, 30))
        action = source.choice(("put", "put", "replace", "remove", "repeat", "cut"))
        if action == "put":
            text = text[:at] + source.choice(TOKENS) + text[at:]
        elif action == "replace":
            text = text[:at] + source.choice(string.printable + "é\0\u2028") + text[at + 1 :]
        elif action == "remove":
            text = text[:at] + text[end:]
        elif action == "repeat":
            text = text[:end] + text[at:end] + text[end:]
        elif source.random() < 0.3:
            text = text[:at]
    return text
