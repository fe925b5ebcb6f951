"""Text files of one sentence a line, and what is wrong with them."""

from __future__ import annotations

from pathlib import Path

from plait.core.errors import DataError
from plait.workloads.data.files import decode_text, read_bytes


def read_lines(path: Path, what: str, remedy: str) -> list[str]:
    """The lines of a file in UTF-8 without their ends; an empty file and other encodings are refused.

    Only a line feed ends a line: what else Python takes for one may stand inside a sentence.
    """
    data = read_bytes(path, what, remedy)
    if not data.strip():
        raise DataError(f"{path}: found an empty file, expected {what}; {remedy}")
    text = decode_text(path, data, remedy)
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]
