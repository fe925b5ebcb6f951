"""Turns pydantic's validation errors into messages with path, found, expected and nearest valid name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from plait.core.names import did_you_mean, nearest
from plait.core.shown import one_message, shortened, shown
from plait.schema.aliases import VALUE_ALIASES, aliases_in

# What the patterns of keys accept.
PATTERNS = {
    "name": "letters, digits, '.', '_' and '-', as in a folder's name",
    "cluster.shell": "a command with {host} in it, such as 'ssh {host}'",
    "cluster.nodes": "a number of hosts, such as 2, or the fewest and the most, such as 1:4",
    "parallel.control": "host:port, such as 127.0.0.1:0 for any free port",
}
# Similarity from which an unknown key counts as a misspelt required one; higher in sections with extra keys,
# where the key may be an option of the kind.
_SIMILARITY, _SIMILARITY_WITH_EXTRA = 0.5, 0.7
# Options that most optimizers have.
_OPTIMIZER_OPTIONS = ("lr", "momentum", "weight_decay", "betas", "eps")
# Keys of one section that are compared with the required ones.
_MAX_KEYS = 100

Location = tuple[Any, ...]


def explain(job: type[BaseModel], failure: ValidationError, written: Mapping[str, str]) -> str:
    """All errors of a job, one per line, up to the length of a message.

    `written` maps keys to the aliases that the job file has for them.
    """
    errors = failure.errors(include_url=False)
    misspelt = _misspelt(job, errors)
    reported = set(misspelt.values())
    errors = [error for error in errors if error["loc"] not in reported]
    return one_message((_explain(job, error, misspelt, written) for error in errors), len(errors))


def _misspelt(job: type[BaseModel], errors: Sequence[Any]) -> dict[Location, Location]:
    """Missing required keys, each with the misspelt key that was found instead."""
    misspelt: dict[Location, Location] = {}
    missing: dict[Location, tuple[list[str], Mapping[Any, Any]]] = {}
    for error in errors:
        if error["type"] == "missing" and isinstance(error["input"], Mapping):
            names, _ = missing.setdefault(error["loc"][:-1], ([], error["input"]))
            names.append(error["loc"][-1])
    for parent, (names, content) in missing.items():
        section = _section_at(job, parent)
        known = set(section.model_fields) if section else set()
        is_open = section is not None and section.model_config.get("extra") == "allow"
        for key in list(content)[:_MAX_KEYS]:
            close = nearest(key, [*known, *names], _SIMILARITY_WITH_EXTRA if is_open else _SIMILARITY)
            if key not in known and close in names and (*parent, close) not in misspelt:
                misspelt[(*parent, close)] = (*parent, key)
    return misspelt


def _explain(
    job: type[BaseModel], error: Any, misspelt: Mapping[Location, Location], written: Mapping[str, str]
) -> str:
    location = error["loc"]
    canonical, kind, value = _path(location), error["type"], error["input"]
    path = written.get(canonical, canonical)
    if kind == "missing" and location in misspelt:
        return f"{_path(misspelt[location])}: unknown key; did you mean {location[-1]!r}?"
    if kind == "extra_forbidden":
        return f"{path}: unknown key{_hint(job, location)}"
    if kind == "missing":
        return f"{path}: missing; expected {_expected_at(job, location)}"
    if kind == "invalid_key":
        return f"{path}: found a key that is not a string"
    if kind == "literal_error":
        valid = re.findall(r"'([^']*)'", str(error.get("ctx", {}).get("expected", "")))
        hint = did_you_mean(value, [*valid, *VALUE_ALIASES.get(canonical, ())])
        return f"{path}: found {shown(value)}, expected {' or '.join(valid)}{hint if 'mean' in hint else ''}"
    if kind == "string_pattern_mismatch":
        return f"{path}: found {shown(value)}, expected {PATTERNS[canonical]}"
    expected = error["msg"].removeprefix("Input should be ").removeprefix("String should have ")
    return f"{path}: found {shown(value)}, expected {expected}"


def _hint(job: type[BaseModel], location: Location) -> str:
    """Suggest a key of the same section or, at the top level, a key of any section."""
    section = _section_at(job, location[:-1])
    siblings = [*section.model_fields, *aliases_in(_path(location[:-1]))] if section else []
    if section is job and nearest(location[-1], siblings) is None:
        nested = {name: f"optimizer.{name}" for name in _OPTIMIZER_OPTIONS}
        for part in job.model_fields:
            child = _section_at(job, (part,))
            names = [*child.model_fields, *aliases_in(part)] if child else []
            nested = {**{name: f"{part}.{name}" for name in names}, **nested}
        close = nearest(location[-1], nested, cutoff=0.9)
        if close is not None:
            return f"; did you mean {nested[close]!r}?"
    return did_you_mean(location[-1], siblings)


def _path(location: Location) -> str:
    return ".".join(shortened(str(part)) for part in location)


def _section_at(job: type[BaseModel], location: Location) -> type[BaseModel] | None:
    section = job
    for part in location:
        field = section.model_fields.get(part)
        kinds = [k for k in _kinds(field.annotation) if issubclass(k, BaseModel)] if field else []
        if not kinds:
            return None
        section = kinds[0]
    return section


def _kinds(annotation: Any) -> list[type]:
    arguments = getattr(annotation, "__args__", None)
    kinds = list(arguments) if arguments else [annotation]
    return [kind for kind in kinds if isinstance(kind, type)]


def _expected_at(job: type[BaseModel], location: Location) -> str:
    section = _section_at(job, location[:-1])
    field = section.model_fields.get(location[-1]) if section else None
    kinds = _kinds(field.annotation) if field is not None else []
    if not kinds:
        return "a value"
    if issubclass(kinds[0], BaseModel):
        return f"a section with {', '.join(n for n, f in kinds[0].model_fields.items() if f.is_required())}"
    name = kinds[0].__name__
    return {"int": "a whole number", "str": "text", "float": "a number"}.get(name, name)
