"""Reading a data set's files, with errors that name the file."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from pathlib import Path

from plait.core.errors import DataError


def decode_text(path: Path, data: bytes, remedy: str) -> str:
    """`data`, all of `path`, as text; what is not UTF-8 is refused with its line."""
    try:
        return data.decode()
    except UnicodeDecodeError as failure:
        line = data.count(b"\n", 0, failure.start) + 1
        raise DataError(
            f"{path}, line {line:,}: byte {failure.start:,} is not UTF-8, expected text; {remedy}"
        ) from None


def fingerprint(words: Iterable[str]) -> str:
    """Identifies a vocabulary and its order."""
    return f"{zlib.crc32(chr(10).join(words).encode(errors='surrogatepass')):08x}"


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
