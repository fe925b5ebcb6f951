"""YAML as people write it: the values of YAML 1.2 that JSON has too, and nothing that surprises.

`1e-3` is a number; `1:30`, `yes` and `2020-01-01` are text, and `010` is ten. Refused are keys given twice,
tags for other types, and files that stay small only by naming the same values again and again.
"""

from __future__ import annotations

import math
import re
from typing import Any

import yaml

from plait.core.shown import shortened, shown

# How deep values may lie, and how many there may be once every alias is written out.
MOST_LEVELS = 50
MOST_VALUES = 50_000
_MOST_DIGITS = 100

_TAG = "tag:yaml.org,2002:"
_NULL = re.compile(r"(?:~|null|Null|NULL|)\Z")
_BOOL = re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z")
_INT = re.compile(r"(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)\Z")
_FLOAT = re.compile(
    r"(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z"
)
_MERGE = re.compile(r"<<\Z")
_SURROGATE = re.compile("[\ud800-\udfff]")


class YamlError(ValueError):
    """Text that is no YAML, or none that is read here; `line` is where, counted from 1, if that is known."""

    def __init__(self, problem: str, line: int | None = None) -> None:
        super().__init__(shortened(problem, 300))
        self.line = line


def load_yaml(text: str) -> Any:
    """The value that `text` spells."""
    try:
        return _load(text)
    except yaml.reader.ReaderError as failure:
        raise YamlError(f"not YAML: the character {chr(failure.character)!r} is not allowed") from None
    except yaml.MarkedYAMLError as failure:
        line = failure.problem_mark.line + 1 if failure.problem_mark else None
        raise YamlError(f"{failure.problem}", line) from None


def _load(text: str) -> Any:
    loader = _Loader(text)
    try:
        return loader.get_single_data()
    except (yaml.scanner.ScannerError, yaml.parser.ParserError, yaml.composer.ComposerError) as failure:
        line = failure.problem_mark.line + 1 if failure.problem_mark else None
        raise YamlError(f"not YAML: {failure.problem}", line) from None
    finally:
        loader.dispose()


def dump_yaml(value: Any) -> str:
    """`value`, of plain values, as text that `load_yaml` reads as the same."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False)


class _Refused(yaml.MarkedYAMLError):
    """Good YAML that is not read here."""


class _Loader(yaml.SafeLoader):
    """Counts values while it reads them, as if aliases were written out, and stops where they are many."""

    yaml_implicit_resolvers = {}  # noqa: RUF012
    yaml_constructors = {}  # noqa: RUF012

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._levels = 0
        self._values = 0
        self._values_of: dict[str, int] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent):
            return self._compose_alias(event, parent, index)
        before = self._values
        self._levels += 1
        self._count(1, event)
        node = super().compose_node(parent, index)
        self._levels -= 1
        if event.anchor is not None:
            self._values_of[event.anchor] = self._values - before
        return node

    def _compose_alias(self, event: Any, parent: Any, index: Any) -> Any:
        if event.anchor in self.anchors and event.anchor not in self._values_of:
            raise _refused(f"*{event.anchor} is part of itself; expected values that end", event)
        self._count(self._values_of.get(event.anchor, 0), event)
        return super().compose_node(parent, index)

    def _count(self, values: int, event: Any) -> None:
        self._values += values
        if self._levels > MOST_LEVELS:
            raise _refused(f"nested too deeply; expected {MOST_LEVELS} levels at most", event)
        if self._values > MOST_VALUES:
            raise _refused(
                f"too many values, with all aliases written out; expected {MOST_VALUES:,} at most", event
            )

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in seen:
                    raise _Refused(None, None, f"{key.value}: given twice; give it once", key.start_mark)
                seen.add((key.tag, key.value))
        return node


class _Dumper(yaml.SafeDumper):
    """Quotes text that `_Loader` would take for something else."""

    yaml_implicit_resolvers = {}  # noqa: RUF012

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _refused(problem: str, event: Any) -> _Refused:
    return _Refused(None, None, problem, event.start_mark)


def _scalar(loader: _Loader, node: Any, form: re.Pattern[str], expected: str) -> str:
    """The text of a value, which a tag may have called something that it is not."""
    text: str = loader.construct_scalar(node)
    if not form.match(text):
        raise _Refused(None, None, f"found {shown(text)}, expected {expected}", node.start_mark)
    return text


def _null(loader: _Loader, node: Any) -> None:
    _scalar(loader, node, _NULL, "null")


def _bool(loader: _Loader, node: Any) -> bool:
    return _scalar(loader, node, _BOOL, "true or false").lower() == "true"


def _int(loader: _Loader, node: Any) -> int:
    text = _scalar(loader, node, _INT, "a whole number")
    if len(text) > _MOST_DIGITS:
        raise _Refused(None, None, f"found a whole number of {len(text):,} digits", node.start_mark)
    return int(text, 0) if text.startswith(("0x", "0o")) else int(text)


def _float(loader: _Loader, node: Any) -> float:
    text = _scalar(loader, node, _FLOAT, "a number").lower()
    if text.endswith(("inf", "nan")):
        return float(text.replace(".", "", 1))
    if not math.isfinite(float(text)):
        raise _Refused(
            None, None, f"found {shown(text)}, which is too large; .inf is meant?", node.start_mark
        )
    return float(text)


def _text(loader: _Loader, node: Any) -> str:
    text: str = loader.construct_scalar(node)
    if _SURROGATE.search(text):
        try:
            # JSON spells a character beyond 16 bits as two halves.
            return text.encode("utf-16", "surrogatepass").decode("utf-16")
        except UnicodeDecodeError:
            raise _Refused(None, None, f"found {shown(text)}, half a character", node.start_mark) from None
    return text


def _list(loader: _Loader, node: Any) -> list[Any]:
    return loader.construct_sequence(node, deep=True)


def _mapping(loader: _Loader, node: Any) -> dict[Any, Any]:
    if not isinstance(node, yaml.MappingNode):
        raise _Refused(None, None, "found a value, expected keys and values", node.start_mark)
    return loader.construct_mapping(node, deep=True)


def _unknown(loader: _Loader, node: Any) -> None:
    tag = shortened(node.tag.replace(_TAG, "!!"))
    expected = "text, numbers, true, false, null, lists and mappings"
    raise _Refused(None, None, f"found the tag {tag}, expected {expected}", node.start_mark)


for _name, _construct in {
    "null": _null,
    "bool": _bool,
    "int": _int,
    "float": _float,
    "str": _text,
    "seq": _list,
    "map": _mapping,
}.items():
    _Loader.add_constructor(_TAG + _name, _construct)
_Loader.add_constructor(None, _unknown)
# The first that fits counts, and so whole numbers come before others.
for _name, _form, _first in (
    ("null", _NULL, ["~", "n", "N", ""]),
    ("bool", _BOOL, list("tTfF")),
    ("int", _INT, list("-+0123456789")),
    ("float", _FLOAT, list("-+.0123456789")),
    ("merge", _MERGE, ["<"]),
):
    _Loader.add_implicit_resolver(_TAG + _name, _form, _first)
    _Dumper.add_implicit_resolver(_TAG + _name, _form, _first)
