"""Versioned artefacts: a frozen value as one JSON file with its kind and version."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from plait.core.codec import decode, encode
from plait.core.errors import ArtefactError
from plait.core.files import read_text, write_output
from plait.core.shown import shown

T = TypeVar("T")

# A profile of a thousand layers takes one megabyte; JSON takes up to twenty times as much in memory.
MOST_BYTES = 64_000_000


def save(value: Any, path: Path, kind: str, version: int) -> None:
    """Write `value`, a frozen dataclass, to `path` under its `kind` ("profile", "plan") and version."""
    write_output(path, text_of(encode(value), kind, version))


def text_of(content: Mapping[str, Any], kind: str, version: int) -> str:
    """The text of the file that holds an encoded value."""
    return json.dumps({"plait": kind, "version": version, **content}, indent=1) + "\n"


def load(cls: type[T], path: Path, kind: str, version: int) -> T:
    """The value saved at `path`; ArtefactError if it is of another kind or version."""
    data = read_json(path, kind)
    found_kind = data.pop("plait", None)
    if found_kind != kind:
        raise ArtefactError(f"{path}: this is {describe(found_kind)}, expected a {kind} file")
    found_version = data.pop("version", None)
    if found_version != version:
        raise ArtefactError(
            f"{path}: {kind} file of version {shown(found_version)}, but this Plait reads version {version}; "
            f"make it again with this Plait"
        )
    return decode(cls, data, str(path))


def describe(kind: object) -> str:
    return f"a {kind:.40} file" if isinstance(kind, str) else "no file of Plait's"


def read_json(path: Path, kind: str) -> dict[str, Any]:
    """The JSON object in `path`, or an error that names the file, the line and what was expected."""
    text = read_text(path, f"a {kind} file", MOST_BYTES, ArtefactError)
    try:
        data = json.loads(text)
    except json.JSONDecodeError as failure:
        raise ArtefactError(
            f"{path}:{failure.lineno}: not JSON ({failure.msg}); expected a {kind} file"
        ) from None
    except RecursionError:
        raise ArtefactError(f"{path}: nested too deeply; expected a {kind} file") from None
    except ValueError:  # what int() refuses
        raise ArtefactError(f"{path}: a number of too many digits; expected a {kind} file") from None
    if not isinstance(data, dict):
        raise ArtefactError(f"{path}: found a JSON {type(data).__name__}, expected a {kind} object")
    return data
