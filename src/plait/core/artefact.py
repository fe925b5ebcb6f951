"""Versioned artefacts: a frozen value as one JSON file that says what it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

from plait.core.codec import decode, encode
from plait.core.errors import ArtefactError
from plait.core.files import write_atomic

T = TypeVar("T")


def save(value: Any, path: Path, kind: str, version: int) -> None:
    """Write `value`, a frozen dataclass, to `path` under its `kind` ("profile", "plan") and version."""
    text = json.dumps({"plait": kind, "version": version, **encode(value)}, indent=1)
    write_atomic(path, text + "\n")


def load(cls: type[T], path: Path, kind: str, version: int) -> T:
    """The value saved at `path`; a file of another kind or a newer version is refused by name."""
    data = read_json(path, kind)
    found = data.pop("plait", None)
    if found != kind:
        raise ArtefactError(f"{path}: this is {describe(found)}, expected a {kind} file")
    found_version = data.pop("version", None)
    if found_version != version:
        raise ArtefactError(
            f"{path}: {kind} file of version {found_version!r}, but this Plait reads version {version}; "
            f"make it again with this Plait"
        )
    return decode(cls, data, str(path))


def describe(kind: object) -> str:
    return f"a {kind} file" if isinstance(kind, str) else "no file of Plait's"


def read_json(path: Path, kind: str) -> dict[str, Any]:
    """The JSON object in `path`, or an error that names the file, the line and what was expected."""
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        raise ArtefactError(f"{path}: no such file; expected a {kind} file") from None
    except (IsADirectoryError, PermissionError) as failure:
        raise ArtefactError(f"{path}: cannot be read: {failure.strerror}") from None
    except UnicodeDecodeError:
        raise ArtefactError(f"{path}: not a text file; expected a {kind} file (JSON)") from None
    except json.JSONDecodeError as failure:
        raise ArtefactError(
            f"{path}:{failure.lineno}: not JSON ({failure.msg}); expected a {kind} file"
        ) from None
    if not isinstance(data, dict):
        raise ArtefactError(f"{path}: found a JSON {type(data).__name__}, expected a {kind} object")
    return data
