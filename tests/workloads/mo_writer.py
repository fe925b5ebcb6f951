"""A writer of gettext's .mo files, for tests of the reader."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path

DESCRIPTION = "Content-Type: text/plain; charset={}\n"


def write_mo(
    path: Path, messages: Mapping[str, str], charset: str | None = "UTF-8", order: str = "<"
) -> bytes:
    """A catalogue of `messages` in that byte order; returns what was written."""
    all_messages = dict(messages) if charset is None else {"": DESCRIPTION.format(charset), **messages}
    originals = [message.encode(charset or "utf-8") for message in sorted(all_messages)]
    translations = [all_messages[message].encode(charset or "utf-8") for message in sorted(all_messages)]
    count, begin = len(originals), 28
    offset = begin + 16 * count
    tables, strings = b"", b""
    for text in originals + translations:
        tables += struct.pack(f"{order}2I", len(text), offset + len(strings))
        strings += text + b"\0"
    header = struct.pack(f"{order}7I", 0x950412DE, 0, count, begin, begin + 8 * count, 0, 0)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(header + tables + strings)
    return header + tables + strings
