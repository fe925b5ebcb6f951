"""Workers of which some may be lost: the rest goes on, and its results are the host's.

Torch's own watch ends all workers when one has ended; this one looks at the same processes.
"""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from plait.cluster.agent import Talk

LINGER_S = 10.0


def describe_code(code: int) -> str:
    """How a process ended, by its exit code."""
    return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"


class Tolerance:
    """Watches the workers of one host and tells the supervisor of each that is lost."""

    def __init__(self, talk: Talk, host: str, folder: str) -> None:
        self._talk = talk
        self._host = host
        self._folder = folder
        self._values: dict[int, Any] = {}
        self._lost: dict[int, int] = {}
        self._first_done: float | None = None

    def look(self, context: Any, ranks: dict[int, int]) -> RunResult:
        """How the workers stand, `context` being torch's over them and `ranks` theirs by local rank."""
        processes = context._pc.processes
        for local, rank in ranks.items():
            if rank not in self._values and not context._ret_vals[local].empty():
                self._values[rank] = context._ret_vals[local].get()
                self._first_done = self._first_done or time.monotonic()
            code = processes[local].exitcode
            if code is not None and rank not in self._values and rank not in self._lost:
                self._lose(rank, code)
        if len(self._values) + len(self._lost) < len(ranks):
            self._end_stopped(processes, ranks)
            return RunResult(state=WorkerState.HEALTHY)
        for process in processes:
            # Those that are done wait for all to be done, which a lost one never is.
            process.kill()
            process.join()
        if not self._values:
            failures = {rank: ProcessFailure(0, 0, code, "") for rank, code in self._lost.items()}
            return RunResult(state=WorkerState.FAILED, failures=failures)
        # Torch asks for a value of each; those of the lost are taken out again (`kept`).
        nothing = dict.fromkeys(self._lost)
        return RunResult(state=WorkerState.SUCCEEDED, return_values={**nothing, **self._values})

    def kept(self, values: dict[int, Any]) -> dict[int, Any]:
        """The values of those that were not lost."""
        return {rank: value for rank, value in values.items() if rank not in self._lost}

    def _lose(self, rank: int, code: int) -> None:
        self._lost[rank] = code
        report = Path(self._folder, f"failure-{rank}.json")
        words = json.loads(report.read_text())["summary"] if report.exists() else describe_code(code)
        self._talk.say(gone={"rank": rank, "host": self._host, "summary": words})

    def _end_stopped(self, processes: Any, ranks: dict[int, int]) -> None:
        """End workers that are stopped once the others have long finished without them."""
        if self._first_done is not None and time.monotonic() - self._first_done > LINGER_S:
            for local, rank in ranks.items():
                if rank not in self._values:
                    processes[local].kill()
