"""Logging: library code logs through its module's logger; the edge decides what is shown."""

from __future__ import annotations

import logging


def show_logs(level: int = logging.INFO) -> None:
    """Send Plait's log lines to standard error; called once by a program's edge, never by the library."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname).1s %(name)s: %(message)s"))
    logger = logging.getLogger("plait")
    logger.handlers = [handler]
    logger.setLevel(level)
    logger.propagate = False
