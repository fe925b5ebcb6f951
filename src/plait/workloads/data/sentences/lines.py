"""Text files of one sentence a line, and what is wrong with them."""

from __future__ import annotations

from pathlib import Path

from plait.core.errors import DataError
from plait.workloads.data.files import read_bytes


def read_lines(path: Path, what: str, remedy: str) -> list[str]:
    """The lines of a file in UTF-8 without their ends; an empty file and other encodings are refused.

    Only a line feed ends a line: what else Python takes for one may stand inside a sentence.
    """
    data = read_bytes(path, what, remedy)
    if not data.strip():
        raise DataError(f"{path}: found an empty file, expected {what}; {remedy}")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as failure:
        line = data.count(b"\n", 0, failure.start) + 1
        byte = data[failure.start]
        raise DataError(
            f"{path}, line {line}: byte {failure.start:,} (0x{byte:02x}) is not UTF-8, expected text in "
            f"UTF-8; convert the file: iconv -f ISO-8859-1 -t UTF-8 {path.name}"
        ) from None
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]
