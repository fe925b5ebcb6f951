"""YAML with the scalars of YAML 1.2: PyYAML's SafeLoader with another table of scalars, and limits.

`1e-3` is a number; `1:30`, `yes` and `2020-01-01` are text, and `010` is ten. Duplicate keys, tags of other
types, and too many values (with aliases expanded) are errors.
"""

from __future__ import annotations

import math
import re
from typing import Any

import yaml

from plait.core.shown import shortened, shown

# Limits of nesting levels, of values with all aliases expanded, and of digits of a whole number.
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
# The type, pattern and first characters of scalars. The first match counts.
_SCALARS = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", list("-+.0123456789")),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", list("-+.")),
    ("merge", r"<<", ["<"]),
)


class YamlError(ValueError):
    """Text that is not YAML or not supported here; `line` counts from 1, None if unknown."""

    def __init__(self, problem: str, line: int | None = None) -> None:
        super().__init__(shortened(problem, 300))
        self.line = line


def load_yaml(text: str) -> Any:
    """Parse `text`; YamlError if it is wrong."""
    try:
        return yaml.load(text, _Loader)
    except yaml.reader.ReaderError as failure:
        raise YamlError(f"not YAML: the character {chr(failure.character)!r} is not allowed") from None
    except yaml.MarkedYAMLError as failure:
        line = failure.problem_mark.line + 1 if failure.problem_mark else None
        prefix = "" if isinstance(failure, yaml.constructor.ConstructorError) else "not YAML: "
        raise YamlError(f"{prefix}{failure.problem}", line) from None


def dump_yaml(value: Any) -> str:
    """Plain values as text that `load_yaml` parses to the same values."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False)


class _Loader(yaml.SafeLoader):
    """SafeLoader with fewer types, which rejects duplicate keys and too many values."""

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
            # JSON writes a character beyond 16 bits as a surrogate pair.
            return value.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
        return value


class _Dumper(yaml.SafeDumper):
    """Quotes text that `_Loader` would read as another type."""

    yaml_implicit_resolvers = {}  # noqa: RUF012

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _int(loader: _Loader, node: Any) -> int:
    """An integer; unlike in SafeLoader, a leading 0 does not mean octal."""
    text: str = loader.construct_scalar(node)
    if len(text) > MOST_DIGITS:
        raise _refused(f"found a whole number of {len(text):,} digits", node)
    return int(text, 0 if text.startswith(("0x", "0o")) else 10)


_Loader.add_constructor(_TAG + "int", _int)
for _name, _form, _first in _SCALARS:
    for _resolver in (_Loader, _Dumper):
        _resolver.add_implicit_resolver(_TAG + _name, re.compile(rf"(?:{_form})\Z"), _first)


def _count(node: Any, counts: dict[Any, float]) -> float:
    """Count the values of `node` with all aliases expanded; raises for too many, and for duplicate keys."""
    if node not in counts:
        counts[node] = math.inf  # for an alias of itself
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
