"""Who trains together: versions of a job's membership, and those that one worker knows of.

Worker numbers (ids) are never reused; a worker's rank is its index among the members of a version. Only the
supervisor creates versions. It imports no torch.
"""

from __future__ import annotations

import inspect
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from plait.core.errors import LostPeer, PeerError


@dataclass(frozen=True)
class Membership:
    """The members of a version in the order of their ranks, the host of each, and the workers lost so far.

    `lost` holds the workers of earlier versions that died; workers that left on request are not included.
    `breaks` means that the members of the previous version cannot communicate: no one waits for a peer.

    In a sweep, workers train in groups. A membership with a `group`, the number of one, has only the members
    of that group: the loss of others does not concern them.
    """

    version: int
    members: tuple[int, ...]
    hosts: tuple[str, ...]
    lost: tuple[int, ...] = ()
    by: str = "launch"
    why: str = ""
    breaks: bool = False
    group: int | None = None

    def rank_of(self, worker: int) -> int:
        return self.members.index(worker)


# What is called with the loss of a member; None once its object is gone.
_LossCall = Callable[[], Callable[[PeerError], None] | None]


class Memberships:
    """The versions that this worker knows of; its agent's thread adds them, the main thread waits.

    If the loss of a worker ends the job (`can_change` is False), there is only one version. `can_grow` says
    whether workers may also join.

    `on_loss` functions are called, in the thread that received the report, when a member of the version that
    this worker has entered is lost: threads that wait for that member must be woken.
    """

    def __init__(self, worker: int, can_change: bool = True, can_grow: bool = True) -> None:
        self.worker = worker
        self.can_change = can_change
        self.can_grow = can_change and can_grow
        self._known: dict[int, Membership] = {}
        self._current: Membership | None = None
        self._is_dismissed = False
        self._changed = threading.Condition()
        self._on_loss: list[_LossCall] = []

    @property
    def has_entered(self) -> bool:
        """Whether this worker is a member."""
        return self._current is not None

    @property
    def current(self) -> Membership:
        """The version that this worker has entered."""
        assert self._current is not None
        return self._current

    def latest(self) -> Membership:
        with self._changed:
            return self._known[max(self._known)]

    def put(self, membership: Membership) -> None:
        """Add a version; wakes threads that wait for a member that it reports lost."""
        with self._changed:
            broken_before = self._loss()
            self._known[membership.version] = membership
            self._changed.notify_all()
            loss = None if broken_before else self._loss()
            woken = [call for each in self._on_loss if (call := each()) is not None]
        if loss is not None:
            for call in woken:
                call(loss)

    def enter(self, membership: Membership) -> None:
        """This worker is a member of that version from now on."""
        with self._changed:
            self._on_loss.clear()
            self._set_current(membership)

    def stay(self, version: int) -> None:
        """This worker is a member of that version from now on, together with the same workers."""
        with self._changed:
            self._set_current(replace(self.current, version=version))

    def _set_current(self, membership: Membership) -> None:
        self._current = membership
        self._known.setdefault(membership.version, membership)
        for version in [v for v in self._known if v < membership.version]:
            del self._known[version]

    def on_loss(self, call: Callable[[PeerError], None]) -> None:
        """Have `call` woken by the loss of a member; at once where it is known already.

        A method is forgotten together with its object.
        """
        with self._changed:
            kept = [each for each in self._on_loss if each() is not None]
            self._on_loss = [*kept, weakref.WeakMethod(call) if inspect.ismethod(call) else lambda: call]
            loss = self._loss()
        if loss is not None:
            call(loss)

    @property
    def is_asked(self) -> bool:
        """Whether there is a version later than the one that this worker has entered."""
        return self.can_change and self._current is not None and max(self._known) > self._current.version

    def loss(self) -> PeerError | None:
        """The loss of a member of the version that this worker has entered, if one is known."""
        with self._changed:
            return self._loss()

    def raise_loss(self) -> None:
        if (loss := self.loss()) is not None:
            raise loss

    def get(self, version: int, seconds: float) -> Membership:
        """Wait until this worker knows that version; PeerError after `seconds`."""
        return self._await(lambda: self._known.get(version), f"version {version} of the members", seconds)

    def after(self, version: int, seconds: float) -> Membership:
        """Wait for a version after `version` and return the latest; PeerError after `seconds`."""

        def later() -> Membership | None:
            latest = max(self._known, default=version)
            return self._known[latest] if latest > version else None

        return self._await(later, "the members that are left", seconds)

    def dismiss(self) -> None:
        """Let this worker end: all members of a version without it have joined."""
        with self._changed:
            self._is_dismissed = True
            self._changed.notify_all()

    def dismissal_or_later(self, version: int) -> Membership | None:
        """Wait until this worker may end (None), or a version after `version` needs it again."""
        with self._changed:
            while not self._is_dismissed and max(self._known) <= version:
                self._changed.wait()
            latest = self._known[max(self._known)]
            return latest if latest.version > version else None

    def _await(self, find: Callable[[], Membership | None], what: str, seconds: float) -> Membership:
        end = time.monotonic() + seconds
        with self._changed:
            while (membership := find()) is None:
                left = end - time.monotonic()
                if left <= 0:
                    raise PeerError(
                        f"worker {self.worker} did not receive {what} within {seconds:.0f} s",
                        LostPeer.SILENT,
                    )
                self._changed.wait(left)
        return membership

    def _loss(self) -> PeerError | None:
        if not self.can_change or self._current is None or not self._known:
            return None
        latest = self._known[max(self._known)]
        lost = set(latest.lost) & set(self._current.members)
        breaks = latest.breaks and latest.version > self._current.version and self._current.group is None
        if not lost and breaks:
            return PeerError(f"the workers cannot go on together: {latest.why}", LostPeer.GONE)
        if not lost:
            return None
        first = min(lost)
        return PeerError(f"worker {first} is lost", LostPeer.GONE, self._current.rank_of(first))


def fixed_memberships(rank: int, hosts: Sequence[str]) -> Memberships:
    """The memberships of worker `rank` in a job with fixed workers, one on each of `hosts`."""
    memberships = Memberships(rank, can_change=False)
    memberships.enter(Membership(1, tuple(range(len(hosts))), tuple(hosts)))
    return memberships
