"""The coordinator of a sweep in tests without a launcher: in a thread, asked over a store."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from plait.core.errors import InputError, PlaitError
from plait.launcher.membership import Membership
from plait.launcher.run_dir import RunDir
from plait.sweeping.coordinator import Coordinator
from plait.sweeping.settings import SweepSettings

DEADLINE = timedelta(seconds=300)


def make_coordinator(
    settings: SweepSettings, folder: Path, first: tuple[int, ...], resume: bool = False, elastic: bool = False
) -> Coordinator:
    membership = Membership(1, first, ("here",) * len(first))
    return Coordinator(settings, RunDir(folder), resume, membership, elastic, lambda progress: None)


def ask_over(store: dist.Store, question: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the thread that answers over this store answers."""
    number = store.add("test/questions", 1)
    store.set(f"test/question/{number}", json.dumps(question))
    store.wait([f"test/answer/{number}"], DEADLINE)
    answer = json.loads(store.get(f"test/answer/{number}"))
    if "failed" in answer:
        raise (InputError if answer["wrong_input"] else PlaitError)(answer["failed"])
    return answer


class AnsweringThread:
    """Answers what is asked over `store`, one after the other."""

    def __init__(self, store: dist.Store, coordinator: Coordinator) -> None:
        self._store = store
        self._coordinator = coordinator
        # Held while a question is answered.
        self.lock = threading.Lock()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        number = 1
        while (question := self._next(number)) is not None:
            with self.lock:
                answer = self._answered(question)
            self._store.set(f"test/answer/{number}", json.dumps(answer))
            number += 1

    def _next(self, number: int) -> dict[str, Any] | None:
        self._store.wait([f"test/question/{number}"], timedelta(days=1))
        return json.loads(self._store.get(f"test/question/{number}"))

    def _answered(self, question: dict[str, Any]) -> dict[str, Any]:
        try:
            return self._coordinator.answer(question)
        except PlaitError as failure:
            return {"failed": str(failure), "wrong_input": isinstance(failure, InputError)}

    def close(self) -> dict[str, Any]:
        """The sweep's result, once all workers have asked their last question."""
        number = self._store.add("test/questions", 1)
        self._store.set(f"test/question/{number}", "null")
        self._thread.join(10.0)
        return self._coordinator.close().to_dict()
