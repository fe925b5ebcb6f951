"""The control endpoint of an elastic job that has no processes."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator
from pathlib import Path

from plait.launch.control import serving
from plait.launch.elastic import ControlRequest, ElasticWorkers
from plait.launch.messages import JobMessage, JoinReport
from plait.launch.roster import Roster, Start
from plait.launch.run_dir import RunDir
from plait.schema.hosts import Host
from plait.schema.placement import ElasticRules


class NoProcesses:
    """In the place of a supervisor: records the calls."""

    def __init__(self) -> None:
        self.started: list[Start] = []

    def start_worker(self, start: Start) -> None:
        self.started.append(start)

    def end_workers(self, workers: tuple[int, ...]) -> None:
        pass

    def broadcast(self, message: JobMessage) -> None:
        pass

    def warn(self, words: str) -> None:
        pass

    def pid_of(self, worker: int) -> int | None:
        return 1000 + worker


@contextlib.contextmanager
def endpoint(path: Path) -> Iterator[RunDir]:
    """The folder of a job with two workers, of at most four, whose endpoint is up; nobody joins it."""
    folder = RunDir(path)
    workers = ElasticWorkers(
        Roster((Host("w0", 2), Host("w1", 0)), [2, 2], ElasticRules(1, 4)), NoProcesses(), lambda _: None
    )
    for member in (0, 1):
        workers.take(JoinReport(member, 1))
    requests: queue.SimpleQueue[ControlRequest | None] = queue.SimpleQueue()

    def answer() -> None:
        while (request := requests.get()) is not None:
            workers.serve(request)

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    with folder.lock(), serving(folder, "127.0.0.1:0", requests.put):
        yield folder
    requests.put(None)
    thread.join(10)
    assert not folder.control.exists()
