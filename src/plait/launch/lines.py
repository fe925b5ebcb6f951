"""Lines out of bytes that come in pieces."""

from __future__ import annotations


class LineBuffer:
    """Keeps the pieces of a line that have come, until its end does.

    A line of more than `longest` bytes, where that is given, comes in parts.
    """

    def __init__(self, longest: int | None = None) -> None:
        self._longest = longest
        self._pieces: list[bytes] = []
        self._bytes = 0

    def take(self, data: bytes) -> list[bytes]:
        """The lines that `data` completes, without their ends."""
        *ends, last = data.split(b"\n")
        lines = []
        for end in ends:
            self._keep(end)
            lines.append(self._join())
        self._keep(last)
        if self._longest is not None and self._bytes > self._longest:
            lines.append(self._join())
        return lines

    def rest(self) -> list[bytes]:
        """What came after the last whole line, if anything did."""
        return [self._join()] if self._bytes else []

    def _keep(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self._bytes += len(piece)

    def _join(self) -> bytes:
        line = b"".join(self._pieces)
        self._pieces, self._bytes = [], 0
        return line


def as_shown(line: bytes) -> str:
    """The line as a terminal shows it: what comes after a carriage return is written over the rest."""
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")
