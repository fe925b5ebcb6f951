"""Names that torch, Lightning and transformers use for keys and values of a job, accepted beside Plait's own.

Inside, a job has Plait's own names only; messages name a key as it was written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plait.core.errors import JobError
from plait.core.shown import shown

DROP_LAST = "data.drop_last"
# Each key by its conventional name; both are in one section.
KEYS: Mapping[str, str] = {
    "data.num_workers": "data.loaders",
    DROP_LAST: "data.last_batch",
    "max_grad_norm": "clip_norm",
    "gradient_accumulation_steps": "accumulate",
}
# Each value by its conventional name, for the keys that have such values.
VALUES: Mapping[str, Mapping[str, str]] = {"parallel.schedule": {"1f1b": "flush"}}
_SECTIONS = {path.rpartition(".")[0] for path in (*KEYS, *VALUES)} - {""}


def names_in(section: str) -> list[str]:
    """The conventional names of keys in `section`; "" is the job itself."""
    return [key for parent, _, key in (path.rpartition(".") for path in KEYS) if parent == section]


def own_value(path: str, value: Any) -> Any:
    """`value` of the key `path`, whose name may be the conventional one, as Plait calls it."""
    if path == DROP_LAST:
        if not isinstance(value, bool):
            raise JobError(f"{path}: found {shown(value)}, expected true or false")
        return "drop" if value else "keep"
    return VALUES.get(path, {}).get(value.lower(), value) if isinstance(value, str) else value


class OwnSpelling:
    """Gives the keys of one job Plait's own names; `written` says how those were written that had others."""

    def __init__(self) -> None:
        self.written: dict[str, str] = {}

    def of(self, path: str, value: Any) -> tuple[str, Any]:
        """A key, with its value, that takes the place of what the job had there."""
        own = KEYS.get(path, path)
        self.written.pop(own, None)
        if own != path:
            self.written[own] = path
        if path in _SECTIONS and isinstance(value, dict):
            return path, self.of_section(value, path)
        return own, own_value(path, value)

    def of_section(self, content: Mapping[Any, Any], section: str = "") -> dict[Any, Any]:
        """The keys of a section, or of the whole job; a key in both spellings must have one value."""
        found: dict[Any, Any] = {}
        sources: dict[str, Any] = {}
        for key, value in content.items():
            path = f"{section}.{key}" if section else key
            if not isinstance(key, str) or "." in key:
                found[key] = value
                continue
            own, changed = self.of(path, value)
            last = own.rpartition(".")[2]
            if last in found and found[last] != changed:
                other, before = sources[last]
                raise JobError(
                    f"{path}: found {shown(value)} beside {other}: {shown(before)}, which is the same key in "
                    f"another spelling; expected one of them"
                )
            found[last], sources[last] = changed, (path, value)
        return found
