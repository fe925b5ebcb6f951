"""GNU gettext's .mo files: compiled message catalogues, read with every offset checked."""

from __future__ import annotations

import re
import struct
from pathlib import Path

from plait.core.errors import DataError
from plait.workloads.data.files import read_bytes

_MAGIC = 0x950412DE
_CONTEXT_END = "\x04"
_PLURAL = "\x00"
_CHARSET = re.compile(r"charset=([\w.:-]+)")
_REMEDY = "install the package that it is of anew, or take the file out of the folder"


def read_mo(path: Path) -> list[tuple[str, str]]:
    """The messages of a catalogue and their translations, in the file's order; of plurals the singular.

    The catalogue's own description, which stands under the empty message, is left out, and so is what comes
    before a message to say where it is used.
    """
    data = read_bytes(path, "a message catalogue (.mo)", _REMEDY)
    order, count, originals, translations = _header(path, data)
    pairs = [
        (_string(path, data, order, originals, i), _string(path, data, order, translations, i))
        for i in range(count)
    ]
    charset = next((_charset_of(found) for message, found in pairs if not message), None) or "utf-8"
    decoded = [
        (_decoded(path, message, charset), _decoded(path, found, charset))
        for message, found in pairs
        if message
    ]
    return [(_singular(message.rpartition(_CONTEXT_END)[2]), _singular(found)) for message, found in decoded]


def _header(path: Path, data: bytes) -> tuple[str, int, int, int]:
    """The byte order, the number of messages, and where the two tables of strings begin."""
    if len(data) < 28:
        raise DataError(
            f"{path}: found {len(data)} bytes, expected a message catalogue, whose header has 28; {_REMEDY}"
        )
    order = next((order for order in "<>" if struct.unpack_from(f"{order}I", data)[0] == _MAGIC), None)
    if order is None:
        raise DataError(
            f"{path}: found {data[:4].hex()} as its first bytes, not those of a .mo file; {_REMEDY}"
        )
    revision, count, originals, translations = struct.unpack_from(f"{order}4I", data, 4)
    if revision >> 16 > 1:
        raise DataError(f"{path}: found revision {revision >> 16}, expected 0 or 1; {_REMEDY}")
    for table in (originals, translations):
        if table + 8 * count > len(data):
            raise DataError(
                f"{path}: a table of {count:,} strings begins at byte {table:,} and ends beyond the file, "
                f"which has {len(data):,} bytes; it is damaged: {_REMEDY}"
            )
    return order, count, originals, translations


def _string(path: Path, data: bytes, order: str, table: int, number: int) -> bytes:
    length, begin = struct.unpack_from(f"{order}2I", data, table + 8 * number)
    if begin + length > len(data):
        raise DataError(
            f"{path}: string {number:,} lies at bytes {begin:,} to {begin + length:,}, beyond the file, "
            f"which has {len(data):,} bytes; it is damaged: {_REMEDY}"
        )
    return data[begin : begin + length]


def _charset_of(description: bytes) -> str | None:
    found = _CHARSET.search(description.decode("ascii", "replace"))
    return found[1] if found and found[1] != "CHARSET" else None


def _decoded(path: Path, text: bytes, charset: str) -> str:
    try:
        return text.decode(charset)
    except (UnicodeError, LookupError) as failure:
        raise DataError(
            f"{path}: a message is not in {charset}, as the catalogue says ({failure}); it is damaged: "
            f"{_REMEDY}"
        ) from None


def _singular(text: str) -> str:
    return text.partition(_PLURAL)[0]
