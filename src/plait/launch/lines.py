"""Lines out of bytes that come in pieces."""

from __future__ import annotations


class LineBuffer:
    """Keeps the piece of a line that has come, until its end does."""

    def __init__(self) -> None:
        self._rest = b""

    def take(self, data: bytes) -> list[bytes]:
        """The lines that `data` completes, without their ends."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return lines

    def rest(self) -> list[bytes]:
        """What came after the last whole line, if anything did."""
        rest, self._rest = self._rest, b""
        return [rest] if rest else []
