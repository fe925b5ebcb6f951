"""Logging: library code logs through its module's logger; the edge decides what is shown."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator

# A run that has told as many different warnings says nothing new.
MOST_WARNINGS = 1000


class WarningHandler(logging.Handler):
    """Hands on the text of each warning that Plait's loggers are given, once."""

    def __init__(self, hand_on: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._hand_on = hand_on
        self._handed_on: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text not in self._handed_on and len(self._handed_on) < MOST_WARNINGS:
            self._handed_on.add(text)
            self._hand_on(text)


def forward_warnings(hand_on: Callable[[str], None]) -> None:
    """Call `hand_on` with each different warning from now on; called once by a program's edge."""
    logging.getLogger("plait").addHandler(WarningHandler(hand_on))


@contextlib.contextmanager
def kept_warnings() -> Iterator[list[str]]:
    """The different warnings that Plait's loggers are given within, in a list that fills as they come."""
    found: list[str] = []
    handler, logger = WarningHandler(found.append), logging.getLogger("plait")
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)


def show_logs() -> None:
    """Send Plait's log lines to standard error; called once by a program's edge, never by the library."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname).1s %(name)s: %(message)s"))
    logger = logging.getLogger("plait")
    logger.handlers = [handler, *(each for each in logger.handlers if isinstance(each, WarningHandler))]
    logger.setLevel(logging.INFO)
    logger.propagate = False
