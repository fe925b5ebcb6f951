"""The control endpoint of an elastic job that has no processes."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator
from pathlib import Path

from plait.core.errors import PlaitError
from plait.launcher.control import serving
from plait.launcher.membership_decisions import ControlRequest, Roster
from plait.launcher.run_dir import RunDir
from plait.schema.hosts import Host
from plait.schema.placement import ElasticRules


@contextlib.contextmanager
def endpoint(path: Path) -> Iterator[RunDir]:
    """The folder of a job with two workers, of at most four, whose endpoint is up; nobody joins it."""
    folder = RunDir(path)
    roster = Roster((Host("w0", 2), Host("w1", 0)), [2, 2], ElasticRules(1, 4))
    for member in (0, 1):
        roster.on_joined(member, 1)
    requests: queue.SimpleQueue[ControlRequest | None] = queue.SimpleQueue()

    def answer() -> None:
        while (request := requests.get()) is not None:
            try:
                roster.apply(request)
                pids = {member: 1000 + member for member in roster.membership.members}
                request.answer.put({**roster.state(), "pids": pids})
            except PlaitError as failure:
                request.answer.put(failure)
            roster.next_steps()

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    with folder.lock(), serving(folder, "127.0.0.1:0", requests.put):
        yield folder
    requests.put(None)
    thread.join(10)
    assert not folder.control.exists()
