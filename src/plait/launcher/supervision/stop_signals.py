"""Signals that ask a process to end, handled within a block."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def handling_stop_signals(
    handle: Callable[[int], object], more: tuple[signal.Signals, ...] = ()
) -> Iterator[None]:
    """Call `handle` with each SIGINT, SIGTERM or SIGHUP, or of `more`, within the block, rather than end.

    Does nothing outside the main thread. An ignored signal stays ignored, as under nohup.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    wanted = [
        number
        for number in {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *more}
        if signal.getsignal(number) is not signal.SIG_IGN
    ]
    before = {number: signal.signal(number, lambda number, _: handle(number)) for number in wanted}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
