"""The desk of a sweep: workers ask, rank 0 answers from its book, over the job's store.

With one worker the question is a function call. Questions and answers are plain values.
"""

from __future__ import annotations

import json
import threading
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist

from plait.core.errors import InputError, PlaitError
from plait.launch.worker import Worker

Question = dict[str, Any]
Answer = dict[str, Any]
Answerer = Callable[[Question], Answer]

_CLOSE: Question = {"ask": "close"}
# Between two questions trials train.
PATIENCE = timedelta(days=365)


class Client(Protocol):
    """Whom a worker asks."""

    def ask(self, **question: Any) -> Answer: ...


class LocalClient:
    """The desk in the process that keeps the book; one question at a time."""

    def __init__(self, answer: Answerer) -> None:
        self._answer = answer
        self._lock = threading.Lock()

    def ask(self, **question: Any) -> Answer:
        with self._lock:
            return self._answer(question)


class RemoteClient:
    """The desk as other workers reach it."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def ask(self, **question: Any) -> Answer:
        number = self._store.add("plait/sweep/questions", 1)
        self._store.set(f"plait/sweep/question/{number}", json.dumps(question))
        answer: Answer = json.loads(self._store.get(f"plait/sweep/answer/{number}"))
        self._store.delete_key(f"plait/sweep/answer/{number}")
        if "failed" in answer:
            error = InputError if answer["wrong_input"] else PlaitError
            raise error(answer["failed"])
        return answer


class AnswerThread:
    """Answers the other workers' questions in a thread of rank 0, in the order they come."""

    def __init__(self, worker: Worker, desk: LocalClient) -> None:
        self._store = worker.store
        self._desk = desk
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        number = 1
        while (question := self._next(f"plait/sweep/question/{number}")) != _CLOSE:
            self._store.set(f"plait/sweep/answer/{number}", json.dumps(self._reply(question)))
            self._store.delete_key(f"plait/sweep/question/{number}")
            number += 1

    def _next(self, key: str) -> Question:
        self._store.wait([key], PATIENCE)
        question: Question = json.loads(self._store.get(key))
        return question

    def _reply(self, question: Mapping[str, Any]) -> Answer:
        try:
            return self._desk.ask(**question)
        except Exception as failure:  # whoever asked must not wait for ever
            words = str(failure) if isinstance(failure, PlaitError) else traceback.format_exc()
            return {"failed": words, "wrong_input": isinstance(failure, InputError)}

    def close(self) -> None:
        """End the thread; all other workers have asked their last question."""
        number = self._store.add("plait/sweep/questions", 1)
        self._store.set(f"plait/sweep/question/{number}", json.dumps(_CLOSE))
        self._thread.join(10.0)
