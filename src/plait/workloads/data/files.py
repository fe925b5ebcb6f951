"""Reading a data set's files, with errors that name the file."""

from __future__ import annotations

from pathlib import Path

from plait.core.errors import DataError


def read_bytes(path: Path, expected: str, remedy: str) -> bytes:
    """All of `path`; a file that cannot be read is refused with what was `expected` and the `remedy`."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; expected {expected}; {remedy}") from None
    except OSError as failure:
        raise DataError(
            f"{path}: cannot be read ({failure.strerror}); expected {expected}; {remedy}"
        ) from None
