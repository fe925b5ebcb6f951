"""Aliases: names of torch, Lightning and transformers that job files may use for keys and values.

A checked job has canonical names only; error messages name a key as it was written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plait.core.errors import JobError
from plait.core.names import did_you_mean
from plait.core.shown import shown

DROP_LAST = "data.drop_last"
# A word instead of the section.
VERIFY: Mapping[str, Mapping[str, str]] = {
    "off": {"start": "off", "audit": "off"},
    "first": {"start": "first"},
    "every_run": {"start": "every_run"},
}
# The canonical key of each alias, in the same section.
KEY_ALIASES: Mapping[str, str] = {
    "data.num_workers": "data.loaders",
    DROP_LAST: "data.last_batch",
    "max_grad_norm": "clip_norm",
    "gradient_accumulation_steps": "accumulate",
}
# The canonical value of each alias, by key.
VALUE_ALIASES: Mapping[str, Mapping[str, str]] = {
    "parallel.schedule": {"1f1b": "flush"},
    "device": {"gpu": "cuda"},
    "precision": {
        "fp32": "float32",
        "fp64": "float64",
        "double": "float64",
        "bfloat16": "bf16",
        "bf16-mixed": "bf16",
        "float16": "fp16",
        "half": "fp16",
        "16-mixed": "fp16",
    },
}
# Keys whose value is text, for which a number is accepted, too.
_TEXT = ("cluster.nodes",)
# Lists of sections in which text stands for a section with this key.
SHORT_ITEMS: Mapping[str, str] = {"callbacks": "call", "evaluate.metrics": "call"}
# A number in place of the section.
EMA = "optimizer.ema"
_PATHS = (*KEY_ALIASES, *VALUE_ALIASES, *_TEXT, *SHORT_ITEMS, EMA)
_SECTIONS = {path.rpartition(".")[0] for path in _PATHS} - {""}


def aliases_in(section: str) -> list[str]:
    """The aliases of keys in `section`; "" is the top level."""
    return [key for parent, _, key in (path.rpartition(".") for path in KEY_ALIASES) if parent == section]


def canonical_value(path: str, value: Any) -> Any:
    """The canonical form of `value` under the key or alias `path`."""
    if path == DROP_LAST:
        if not isinstance(value, bool):
            raise JobError(f"{path}: found {shown(value)}, expected true or false")
        return "drop" if value else "keep"
    if path == "verify" and isinstance(value, str):
        if value not in VERIFY:
            names = ", ".join(VERIFY)
            raise JobError(
                f"verify: found {shown(value)}, expected {names}, or the keys start, audit and on_difference"
                f"{did_you_mean(value, VERIFY)}"
            )
        return dict(VERIFY[value])
    if path in _TEXT and type(value) is int:
        return str(value)
    if path == EMA and isinstance(value, (int, float)) and not isinstance(value, bool):
        return {"decay": value}
    if path in SHORT_ITEMS and isinstance(value, list):
        return [{SHORT_ITEMS[path]: each} if isinstance(each, str) else each for each in value]
    return VALUE_ALIASES.get(path, {}).get(value.lower(), value) if isinstance(value, str) else value


class AliasResolver:
    """Replaces the aliases in one job; `written` maps each canonical key to the alias found for it."""

    def __init__(self) -> None:
        self.written: dict[str, str] = {}

    def resolve(self, path: str, value: Any) -> tuple[str, Any]:
        """The canonical key and value of `path` and `value`, which replace any earlier ones."""
        canonical = KEY_ALIASES.get(path, path)
        self.written.pop(canonical, None)
        if canonical != path:
            self.written[canonical] = path
        if path in _SECTIONS and isinstance(value, dict):
            return path, self.resolve_section(value, path)
        return canonical, canonical_value(path, value)

    def resolve_section(self, content: Mapping[Any, Any], section: str = "") -> dict[Any, Any]:
        """The canonical keys of a section, or of the job; a key and its alias must have equal values."""
        resolved: dict[Any, Any] = {}
        sources: dict[str, Any] = {}
        for key, value in content.items():
            path = f"{section}.{key}" if section else key
            if not isinstance(key, str) or "." in key:
                resolved[key] = value
                continue
            canonical, changed = self.resolve(path, value)
            last = canonical.rpartition(".")[2]
            if last in resolved and resolved[last] != changed:
                other, before = sources[last]
                raise JobError(
                    f"{path}: found {shown(value)} and {other}: {shown(before)}, which are two names of "
                    f"one key; expected one of them"
                )
            resolved[last], sources[last] = changed, (path, value)
        return resolved
