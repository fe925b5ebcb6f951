"""YAML with the scalars of YAML 1.2: SafeLoader with its own table of scalars, and bounds.

`1e-3` is a number; `1:30`, `yes` and `2020-01-01` are text, and `010` is ten. Refused are keys given twice,
tags for other types, and files whose values, aliases written out, are very many.
"""

from __future__ import annotations

import math
import re
from typing import Any

import yaml

from plait.core.shown import shortened, shown

# Levels, values with every alias written out, and letters of a whole number.
MOST_LEVELS = 50
MOST_VALUES = 50_000
MOST_DIGITS = 100

_TAG = "tag:yaml.org,2002:"
_TYPES = {
    "null": "null",
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "seq": "a list",
    "map": "keys and values",
}
# Which text is of which type, and how it may begin. The first that fits counts.
_SCALARS = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", list("-+.0123456789")),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", list("-+.")),
    ("merge", r"<<", ["<"]),
)


class YamlError(ValueError):
    """Text that is no YAML, or none that is read here; `line` is where, counted from 1, if that is known."""

    def __init__(self, problem: str, line: int | None = None) -> None:
        super().__init__(shortened(problem, 300))
        self.line = line


def load_yaml(text: str) -> Any:
    """The value that `text` spells."""
    try:
        return yaml.load(text, _Loader)
    except yaml.reader.ReaderError as failure:
        raise YamlError(f"not YAML: the character {chr(failure.character)!r} is not allowed") from None
    except yaml.MarkedYAMLError as failure:
        line = failure.problem_mark.line + 1 if failure.problem_mark else None
        prefix = "" if isinstance(failure, yaml.constructor.ConstructorError) else "not YAML: "
        raise YamlError(f"{prefix}{failure.problem}", line) from None


def dump_yaml(value: Any) -> str:
    """`value`, of plain values, as text that `load_yaml` reads as the same."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False)


class _Loader(yaml.SafeLoader):
    """SafeLoader with fewer types, which refuses keys given twice and more values than a file needs."""

    yaml_implicit_resolvers = {}  # noqa: RUF012
    _levels = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self._levels += 1
        if self._levels > MOST_LEVELS:
            event = self.peek_event()  # type: ignore[no-untyped-call]
            raise _refused(f"nested too deeply; expected {MOST_LEVELS} levels at most", event)
        node = super().compose_node(parent, index)
        self._levels -= 1
        return node

    def construct_document(self, node: Any) -> Any:
        _count(node, {})
        return super().construct_document(node)

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        name = node.tag.removeprefix(_TAG)
        if name not in _TYPES:
            expected = "text, numbers, true, false, null, lists and mappings"
            raise _refused(
                f"found the tag {shortened(node.tag.replace(_TAG, '!!'))}, expected {expected}", node
            )
        try:
            value = super().construct_object(node, deep)
        except (ValueError, LookupError):
            raise _refused(f"found {shown(node.value)}, expected {_TYPES[name]}", node) from None
        if isinstance(value, float) and math.isinf(value) and "inf" not in node.value.lower():
            raise _refused(f"found {shown(node.value)}, which is too large; .inf is meant?", node)
        if isinstance(value, str):
            # JSON spells a character beyond 16 bits as two halves.
            return value.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
        return value


class _Dumper(yaml.SafeDumper):
    """Quotes text that `_Loader` would take for something else."""

    yaml_implicit_resolvers = {}  # noqa: RUF012

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _int(loader: _Loader, node: Any) -> int:
    """SafeLoader reads a leading 0 as octal."""
    text: str = loader.construct_scalar(node)
    if len(text) > MOST_DIGITS:
        raise _refused(f"found a whole number of {len(text):,} digits", node)
    return int(text, 0 if text.startswith(("0x", "0o")) else 10)


_Loader.add_constructor(_TAG + "int", _int)
for _name, _form, _first in _SCALARS:
    for _resolver in (_Loader, _Dumper):
        _resolver.add_implicit_resolver(_TAG + _name, re.compile(rf"(?:{_form})\Z"), _first)


def _count(node: Any, counts: dict[Any, float]) -> float:
    """Count the values of `node`, with all aliases written out, and refuse keys that are given twice."""
    if node not in counts:
        counts[node] = math.inf  # for an alias within
        children = [] if isinstance(node, yaml.ScalarNode) else node.value
        if isinstance(node, yaml.MappingNode):
            _check_keys([key for key, _ in children])
            children = [each for pair in children for each in pair]
        counts[node] = 1 + sum(_count(child, counts) for child in children)
    if counts[node] > MOST_VALUES:
        problem = "too many values, with all aliases written out (one that is part of itself has no end)"
        raise _refused(f"{problem}; expected {MOST_VALUES:,} at most", node)
    return counts[node]


def _check_keys(keys: list[Any]) -> None:
    seen = set()
    for key in keys:
        if isinstance(key, yaml.ScalarNode):
            if (key.tag, key.value) in seen:
                raise _refused(f"{key.value}: given twice; give it once", key)
            seen.add((key.tag, key.value))


def _refused(problem: str, node: Any) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
