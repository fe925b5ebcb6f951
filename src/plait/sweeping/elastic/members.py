"""A worker of an elastic sweep among the others: the versions of its members, and who coordinates.

The member of the lowest rank coordinates. Where it leaves or is lost, the next one takes over: it makes a
coordinator from the sweep's record on disk, and the workers confirm the trials they hold to it. A question
that the former coordinator has not answered is asked again.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

from plait.comm.rpc import (
    Answer,
    AnswerServer,
    Client,
    LocalClient,
    NoLongerAnsweredError,
    connect_client,
    wait_checked,
)
from plait.launch.worker import ElasticWorker, Worker

if TYPE_CHECKING:
    from plait.sweeping.coordinator import Coordinator

# How long a joiner waits to be made a member: the supervisor ends one that it has no use for.
WAIT_S = 86400.0
POLL_S = 0.05
_PREFIX = "plait/sweep"
_HOLDERS = f"{_PREFIX}/holders"
_RESULT = f"{_PREFIX}/result"

# Makes a coordinator. It is given the workers that may hold trials which it has to learn of, or None at the
# start of the sweep, and a function to call whenever other workers hold trials, before any of them knows.
MakeCoordinator = Callable[[Sequence[int] | None, Callable[[Sequence[int]], None]], "Coordinator"]


class SweepClosedError(Exception):
    """The sweep has ended, and its coordinator answers no more."""


class SweepMembers:
    """This worker among the members of an elastic sweep, and its client to whoever coordinates them.

    `held` lists the trials that this worker has, for a coordinator that takes over.
    """

    def __init__(self, worker: Worker, make_coordinator: MakeCoordinator) -> None:
        assert worker.memberships is not None
        self._worker = cast("ElasticWorker", worker)
        self._memberships = worker.memberships
        self._store = worker.store
        self._make = make_coordinator
        self.held: Callable[[], list[int]] = list
        # Where this worker coordinates.
        self._coordinator: Coordinator | None = None
        self._local: LocalClient | None = None
        # Whom it asks: the client, the number of the worker there, and its term. Coordinators have one after
        # the other.
        self._client: Client | None = None
        self._asked, self._term = -1, 0

    def join(self) -> None:
        """Become a member; one that joins a running sweep waits until it is made one."""
        if self._worker.rank < 0:
            self._worker.report_ready()
            self._worker.enter(self._memberships.after(-1, WAIT_S))
        self._worker.report_joined()

    @property
    def is_changed(self) -> bool:
        """Whether there is a version of the members that this worker has not entered."""
        return self._memberships.is_asked

    @property
    def is_leaving(self) -> bool:
        """Whether the others go on without this worker."""
        return self._worker.id not in self._memberships.latest().members

    def enter(self) -> None:
        """Enter the latest version, which this worker is a member of; it keeps its trials.

        Whoever coordinates that version has taken over before it says that it has entered it.
        """
        self._worker.enter(self._memberships.latest())
        if self._first == self._worker.id:
            self.ask(ask="follow")
        self._worker.report_joined()

    def leave(self) -> bool:
        """End as a member, without trials, once the others have taken their places.

        False where this worker is a member again, as others were lost meanwhile.
        """
        while self.is_leaving:
            self._resign()
            version = self._memberships.latest().version
            if self._memberships.dismissal_or_later(version) is None:
                self._worker.report_left()
                return True
        return False

    def ask(self, **question: Any) -> Answer:
        """The coordinator's answer; the question is asked again where the coordinator changes before it.

        SweepClosedError where the sweep has ended.
        """
        while True:
            try:
                return self._connect().ask(**question)
            except NoLongerAnsweredError:
                self._client = None

    def result(self) -> dict[str, Any] | None:
        """The sweep's result, once all workers have handed back their trials; all members return the same.

        None where this worker is to leave before.
        """
        while not self._store.check([_RESULT]):
            if self.is_changed and self.is_leaving:
                return None
            with contextlib.suppress(SweepClosedError):  # by the one that coordinated before
                if self.is_changed:
                    self.enter()
                if self._first == self._worker.id:
                    self._close_if_quiet()
            time.sleep(POLL_S)
        found: dict[str, Any] = json.loads(self._store.get(_RESULT))
        return found

    def _close_if_quiet(self) -> None:
        """As the coordinator, close the sweep where no worker has trials any more."""
        if self.ask(ask="close")["quiet"] and self._coordinator is not None and self._local is not None:
            self._local.close()
            self._store.set(_RESULT, json.dumps(self._coordinator.close().to_dict()))

    @property
    def _first(self) -> int:
        """The worker that coordinates the latest version."""
        return self._memberships.latest().members[0]

    def _connect(self) -> Client:
        """The client of the coordinator, which knows this worker's trials."""
        first = self._first
        if self._client is not None and self._asked == first:
            return self._client
        if first == self._worker.id:
            self._coordinate()
            assert self._local is not None
            client: Client = self._local
        else:
            self._resign()
            self._term = self._find_term(first)
            client = connect_client(self._store, _prefix(self._term), self._check)
        self._asked = first
        client.ask(ask="hold", worker=self._worker.id, trials=self.held())
        self._client = client
        return client

    def _find_term(self, first: int) -> int:
        """The latest term, once it is that of the worker `first`."""
        while True:
            term = self._latest_term()
            if term and int(self._store.get(_owner(term))) == first and not self._store.check([_end(term)]):
                return term
            wait_checked(self._store, _owner(term + 1), lambda: self._check_first(first))

    def _latest_term(self) -> int:
        term = self._term
        while self._store.check([_owner(term + 1)]):
            term += 1
        return term

    def _check(self) -> None:
        """Raise where the coordinator that was asked answers no more."""
        self._check_first(self._asked)
        if self._store.check([_owner(self._term + 1)]):
            raise NoLongerAnsweredError

    def _check_first(self, first: int) -> None:
        if self._store.check([_RESULT]):
            raise SweepClosedError
        if self._first != first:
            raise NoLongerAnsweredError

    def _coordinate(self) -> None:
        """Become the coordinator, after the former one has ended, unless this worker is it."""
        if self._coordinator is not None:
            return
        former = self._latest_term()
        holders: list[int] | None = None
        if former:
            self._await_end(former)
            holders = json.loads(self._store.get(_HOLDERS)) if self._store.check([_HOLDERS]) else []
        self._term = former + 1
        own = str(self._worker.id)
        self._coordinator = self._make(
            holders, lambda workers: self._store.set(_HOLDERS, json.dumps(list(workers)))
        )
        self._local = LocalClient(self._coordinator.answer)
        AnswerServer(self._store, _prefix(self._term), self._local)
        claimed = self._store.compare_set(_owner(self._term), "", own)
        assert claimed.decode() == own, f"worker {claimed.decode()} coordinates at the same time"

    def _await_end(self, term: int) -> None:
        """Return once the coordinator of that term has resigned or is lost."""
        owner = int(self._store.get(_owner(term)))
        while owner not in self._memberships.latest().lost and not self._store.check([_end(term)]):
            self._check_first(self._worker.id)
            time.sleep(POLL_S)

    def _resign(self) -> None:
        """Coordinate no more: what was answered is on disk, and the next coordinator may read it."""
        if self._coordinator is None or self._local is None:
            return
        self._local.close()
        self._coordinator.suspend()
        self._store.set(_end(self._term), "resigned")
        self._coordinator = self._local = self._client = None


def _prefix(term: int) -> str:
    return f"{_PREFIX}/{term}"


def _owner(term: int) -> str:
    """The key of the number of the worker that coordinates in that term."""
    return f"{_prefix(term)}/worker"


def _end(term: int) -> str:
    """The key that is set once the coordinator of that term has resigned."""
    return f"{_prefix(term)}/end"
