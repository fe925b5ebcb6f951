"""Questions between workers, as JSON over the job's store: from any worker to the one that answers."""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import traceback
import uuid
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist

from plait.comm.store import StoreTimeout
from plait.core.errors import InputError, PlaitError

Question = dict[str, Any]
Answer = dict[str, Any]
Answerer = Callable[[Question], Answer]

_CLOSE: Question = {"ask": "close"}
# Between two questions a worker may train for any time.
FOREVER = timedelta(days=365)
CHECK_EVERY = timedelta(seconds=0.1)


class Client(Protocol):
    """Whom a worker asks."""

    def ask(self, **question: Any) -> Answer: ...


class NoLongerAnsweredError(Exception):
    """Whoever answered these questions has ended; another worker may answer them."""


class LocalClient:
    """Questions in the process that answers them, one at a time."""

    def __init__(self, answer: Answerer) -> None:
        self._answer = answer
        self._lock = threading.Lock()
        self._is_closed = False

    def ask(self, **question: Any) -> Answer:
        with self._lock:
            if self._is_closed:
                raise NoLongerAnsweredError
            return self._answer(question)

    def close(self) -> None:
        """Answer no more; what was asked before has been answered."""
        with self._lock:
            self._is_closed = True


class RemoteClient:
    """Questions of another worker, over the job's store below `prefix`.

    `check` is called while an answer is waited for; it may raise where none will come.
    """

    def __init__(self, store: dist.Store, prefix: str, check: Callable[[], None] | None = None) -> None:
        self._store = store
        self._prefix = prefix
        self._check = check

    def ask(self, **question: Any) -> Answer:
        number = self._store.add(f"{self._prefix}/questions", 1)
        self._store.set(f"{self._prefix}/question/{number}", json.dumps(question))
        key = f"{self._prefix}/answer/{number}"
        if self._check is not None:
            wait_checked(self._store, key, self._check)
        answer: Answer = json.loads(self._store.get(key))
        self._store.delete_key(key)
        if "failed" in answer:
            error = InputError if answer["wrong_input"] else PlaitError
            raise error(answer["failed"])
        return answer


class AnswerThread:
    """Answers the questions of other workers in a thread, in the order they come."""

    def __init__(self, store: dist.Store, prefix: str, client: Client) -> None:
        self._store = store
        self._prefix = prefix
        self._client = client
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        number = 1
        while (question := self._next(f"{self._prefix}/question/{number}")) != _CLOSE:
            try:
                reply = self._reply(question)
            except NoLongerAnsweredError:
                return
            self._store.set(f"{self._prefix}/answer/{number}", json.dumps(reply))
            self._store.delete_key(f"{self._prefix}/question/{number}")
            number += 1

    def _next(self, key: str) -> Question:
        self._store.wait([key], FOREVER)
        question: Question = json.loads(self._store.get(key))
        return question

    def _reply(self, question: Mapping[str, Any]) -> Answer:
        try:
            return self._client.ask(**question)
        except NoLongerAnsweredError:
            raise
        except Exception as failure:  # the caller must not wait for ever
            words = str(failure) if isinstance(failure, PlaitError) else traceback.format_exc()
            return {"failed": words, "wrong_input": isinstance(failure, InputError)}

    def close(self) -> None:
        """End the thread; all other workers have asked their last question."""
        number = self._store.add(f"{self._prefix}/questions", 1)
        self._store.set(f"{self._prefix}/question/{number}", json.dumps(_CLOSE))
        self._thread.join(10.0)


class AnswerServer:
    """Answers clients that come and go: each has a thread and questions of its own, below `prefix`.

    A client that dies with its question half asked holds up nobody else.
    """

    def __init__(self, store: dist.Store, prefix: str, client: Client) -> None:
        self._store = store
        self._prefix = prefix
        self._client = client
        threading.Thread(target=self._accept, name="plait-answers", daemon=True).start()

    def _accept(self) -> None:
        for number in itertools.count(1):
            self._store.wait([_connection(self._prefix, number)], FOREVER)
            AnswerThread(self._store, f"{self._prefix}/{number}", self._client)


def connect_client(store: dist.Store, prefix: str, check: Callable[[], None]) -> RemoteClient:
    """A client of the `AnswerServer` at `prefix`; see `RemoteClient` for `check`."""
    own, number = uuid.uuid4().hex, 1
    # Claimed in one operation: a client that dies here leaves no gap for the server to wait at.
    while store.compare_set(_connection(prefix, number), "", own) != own.encode():
        number += 1
    return RemoteClient(store, f"{prefix}/{number}", check)


def _connection(prefix: str, number: int) -> str:
    return f"{prefix}/connection/{number}"


def wait_checked(store: dist.Store, key: str, check: Callable[[], None]) -> None:
    """Return once `key` has a value; `check` is called now and then, and may raise."""
    while True:
        with contextlib.suppress(StoreTimeout):
            store.wait([key], CHECK_EVERY)
            return
        check()
