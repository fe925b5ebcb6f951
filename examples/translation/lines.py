"""Text files with one sentence per line, and their errors."""

from __future__ import annotations

from pathlib import Path

from plait.core.errors import DataError
from plait.workloads.data.files import decode_text, read_bytes


def read_lines(path: Path, what: str, remedy: str) -> list[str]:
    """The lines of a UTF-8 file without line ends; raises for an empty file and other encodings.

    Only a line feed ends a line, as other line separators of Python may occur inside a sentence.
    """
    data = read_bytes(path, what, remedy)
    if not data.strip():
        raise DataError(f"{path}: found an empty file, expected {what}; {remedy}")
    text = decode_text(path, data, remedy)
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]
