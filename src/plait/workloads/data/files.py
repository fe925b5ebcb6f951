"""Reading a data set's files, with errors that name the file."""

from __future__ import annotations

import codecs
import zlib
from collections.abc import Iterable
from pathlib import Path

from plait.core.errors import DataError


def decode_text(path: Path, data: bytes, remedy: str) -> str:
    """`data`, the content of `path`, as text; an error names the line that is not UTF-8."""
    mark = codecs.BOM_UTF8 if data.startswith(codecs.BOM_UTF8) else b""
    try:
        return data[len(mark) :].decode()
    except UnicodeDecodeError as failure:
        position = failure.start + len(mark)
        line = data.count(b"\n", 0, position) + 1
        is_wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        likely = "UTF-16" if is_wide else "ISO-8859-1"
        raise DataError(
            f"{path}, line {line:,}: byte {position:,} is not UTF-8 (0x{data[position]:02x}), expected text "
            f"in UTF-8; convert it: iconv -f {likely} -t UTF-8 {path.name}; {remedy}"
        ) from None


def fingerprint(words: Iterable[str]) -> str:
    """Identifies a vocabulary and its order."""
    return f"{zlib.crc32(chr(10).join(words).encode(errors='surrogatepass')):08x}"


def read_bytes(path: Path, expected: str, remedy: str) -> bytes:
    """The content of `path`; the error for a file that cannot be read contains `expected` and `remedy`."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; expected {expected}; {remedy}") from None
    except OSError as failure:
        raise DataError(
            f"{path}: cannot be read ({failure.strerror}); expected {expected}; {remedy}"
        ) from None
