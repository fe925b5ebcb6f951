"""Logging: library code logs through its module's logger; programs decide what is shown."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator

# Further different warnings are dropped.
MOST_WARNINGS = 1000


class WarningHandler(logging.Handler):
    """Calls `forward` with the text of each different warning of Plait's loggers, once."""

    def __init__(self, forward: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._forward = forward
        self._forwarded: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text not in self._forwarded and len(self._forwarded) < MOST_WARNINGS:
            self._forwarded.add(text)
            self._forward(text)


def forward_warnings(forward: Callable[[str], None]) -> None:
    """Call `forward` with each different warning from now on; called once by a program."""
    logging.getLogger("plait").addHandler(WarningHandler(forward))


@contextlib.contextmanager
def forwarding_warnings(forward: Callable[[str], None]) -> Iterator[None]:
    """Call `forward` with each different warning of Plait's loggers within the block."""
    handler, logger = WarningHandler(forward), logging.getLogger("plait")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


@contextlib.contextmanager
def kept_warnings() -> Iterator[list[str]]:
    """Collect the different warnings of Plait's loggers within the block in a list."""
    warnings: list[str] = []
    with forwarding_warnings(warnings.append):
        yield warnings


def show_logs() -> None:
    """Send Plait's log lines to standard error; called once by a program, never by the library."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname).1s %(name)s: %(message)s"))
    logger = logging.getLogger("plait")
    logger.handlers = [handler, *(each for each in logger.handlers if isinstance(each, WarningHandler))]
    logger.setLevel(logging.INFO)
    logger.propagate = False
