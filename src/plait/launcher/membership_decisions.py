"""The members of an elastic job: decides which workers to start, to end and to make members.

Pure: it starts nothing and waits for nothing. The supervisor reports events and executes the returned steps.
The target number of workers has a version for clients that resize (compare and set); the membership has
another one for the workers.
"""

from __future__ import annotations

import enum
import itertools
import queue
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from plait.core.errors import InputError, PlaitError
from plait.core.shown import shown
from plait.launcher.membership import Membership
from plait.schema.hosts import Host
from plait.schema.placement import ElasticRules

# Give up after this many workers in a row have died before they joined.
MOST_FAILED_STARTS = 3


class StaleVersionError(InputError):
    """The number of workers has changed since the client read it."""


@dataclass(frozen=True)
class ControlRequest:
    """A request to change the number of workers or their hosts, or to list the workers.

    `answer` receives the requested state and the current members, or the error.
    """

    workers: int | None = None
    hosts: tuple[Host, ...] | None = None
    version: int | None = None
    without: tuple[int, ...] = ()
    by: str = "resize"
    why: str = ""
    answer: queue.SimpleQueue[dict[str, Any] | PlaitError] = field(default_factory=queue.SimpleQueue)


class _Stage(enum.Enum):
    STARTING = "starting"
    READY = "ready"
    MEMBER = "member"
    DONE = "done"
    GONE = "gone"


@dataclass
class _Entry:
    host: int
    slot: int
    stage: _Stage


@dataclass(frozen=True)
class Start:
    """A worker to start: its number, the index of its host, and its slot there."""

    worker: int
    host: int
    slot: int


@dataclass(frozen=True)
class NextSteps:
    """What the supervisor does next. `too_few` is the message if the job has to end."""

    start: tuple[Start, ...] = ()
    publish: Membership | None = None
    end: tuple[int, ...] = ()
    too_few: str | None = None


@dataclass(frozen=True)
class WorkerTarget:
    """The requested number of workers, its version, and the members that are to leave."""

    workers: int
    version: int = 1
    without: frozenset[int] = frozenset()
    by: str = "launch"
    why: str = ""


@dataclass
class Roster:
    """The state of the workers of an elastic job.

    `capacity` is the largest number of workers for each host; it is 0 in a job that is not elastic, which
    does not replace lost workers. The job starts with the slots of `hosts`. `has_begun` is set once all of
    these workers have joined.
    """

    hosts: Sequence[Host]
    capacity: list[int]
    rules: ElasticRules
    target: WorkerTarget = field(init=False)
    membership: Membership = field(init=False)

    def __post_init__(self) -> None:
        self._entries: dict[int, _Entry] = {}
        for index, host in enumerate(self.hosts):
            for slot in range(host.slots):
                self._entries[len(self._entries)] = _Entry(index, slot, _Stage.MEMBER)
        self.target = WorkerTarget(len(self._entries))
        self.membership = self._membership(1, tuple(self._entries), "launch", "")
        self._lost: list[int] = []
        # The version of the target at the last loss.
        self._lost_at = 0
        self._fresh_losses: list[tuple[int, str]] = []
        self._joined: set[int] = set()
        self._shown_version = 1
        # All workers that ever joined: only they hold the state of the run.
        self._holders: set[int] = set()
        # The workers that are ended on request: those that were dismissed, and joiners that are not needed.
        self.left: set[int] = set()
        self.has_begun = False
        self._failed_starts = 0
        self._failed_on = Counter[int]()
        self._losses_at_step = 0
        self._step = -1
        self._stopping = False

    def has_joined(self, worker: int) -> bool:
        """Whether the worker has ever joined, so it holds the state of the run."""
        return worker in self._holders

    @property
    def gives_up_joiners(self) -> bool:
        """Whether too many workers failed before they joined; no more are started until the next resize."""
        return self._failed_starts >= MOST_FAILED_STARTS

    @property
    def all_joined(self) -> bool:
        """Whether all members have joined the version that was published last."""
        return self._joined >= {m for m in self.membership.members if self._is(m, _Stage.MEMBER)}

    def leavers(self) -> list[int]:
        """The workers that are to leave but are not dismissed yet; they keep their state until then."""
        members = self.membership.members
        return [w for w in sorted(self._holders) if self._is(w, _Stage.MEMBER) and w not in members]

    def newly_joined(self) -> Membership | None:
        """The membership if all its members have joined it since the last call."""
        if not self.all_joined or self.membership.version == self._shown_version:
            return None
        self._shown_version = self.membership.version
        return self.membership

    def dismiss(self) -> tuple[int, ...]:
        """Remove the leavers from the job; called when all members have joined. Returns them."""
        leavers = tuple(self.leavers())
        self._remove(leavers)
        return leavers

    def _remove(self, workers: Iterable[int]) -> None:
        for worker in workers:
            self._entries[worker].stage = _Stage.GONE
            self.left.add(worker)

    def state(self) -> dict[str, Any]:
        """The requested workers and the current ones, for the control endpoint."""
        members = self.membership.members
        is_reached = len(members) == self.target.workers and not self.target.without & set(members)
        return {
            "workers": self.target.workers,
            "version": self.target.version,
            "members": list(members),
            "places": dict(zip(members, self.membership.hosts)),
            "is_settled": self.all_joined and is_reached,
            "hosts": {host.name: slots for host, slots in zip(self.hosts, self.capacity)},
        }

    def apply(self, request: ControlRequest) -> None:
        """Change the target as requested; a request to list the workers changes nothing.

        With a `version`, StaleVersionError if the target has changed since that version.
        """
        if request.hosts is not None:
            capacity, leaving = self._on_hosts(request.hosts)
            self._resize(replace(request, workers=sum(capacity), without=leaving), capacity)
        elif request.workers is not None:
            self._resize(request, self.capacity)

    def _on_hosts(self, hosts: Sequence[Host]) -> tuple[list[int], tuple[int, ...]]:
        """The capacity if these are the hosts, with all their slots, and the members that have to leave."""
        known = [host.name for host in self.hosts]
        if unknown := [host.name for host in hosts if host.name not in known]:
            raise InputError(
                f"hosts: found {unknown[0]!r}, expected hosts that the job has: {', '.join(known)}"
            )
        slots = {host.name: host.slots for host in hosts}
        capacity, leaving = [slots.get(name, 0) for name in known], list[int]()
        for index, most in enumerate(capacity):
            leaving += [m for m in self.membership.members if self._entries[m].host == index][most:]
        return capacity, tuple(leaving)

    def _resize(self, request: ControlRequest, capacity: list[int]) -> None:
        workers, version, target = request.workers, request.version, self.target
        if version is not None and version != target.version:
            raise StaleVersionError(
                f"version: found {version}, but the number of workers has changed since, to "
                f"{target.workers} (version {target.version}); look at it again and retry"
            )
        if type(workers) is not int:
            raise InputError(f"workers: found {shown(workers)}, expected a whole number")
        most = min(self.rules.max_allowed, sum(capacity))
        if not self.rules.min_workers <= workers <= most:
            raise InputError(
                f"workers: found {workers}, expected {self.rules.min_workers} to {most}, as "
                f"parallel.min_workers, parallel.max_workers and the hosts allow"
            )
        leaving = frozenset(request.without)
        if unknown := sorted(leaving - set(self.membership.members)):
            raise InputError(
                f"without: found {unknown[0]}, expected workers of the job: {list(self.membership.members)}"
            )
        self._failed_starts = 0
        self.capacity = capacity
        self.target = WorkerTarget(workers, target.version + 1, leaving, request.by, request.why)

    def add_host(self, host: Host) -> None:
        """A host that the job gets while it runs; no worker is started there before `open_host`."""
        self.hosts = (*self.hosts, host)
        self.capacity = [*self.capacity, 0]

    def open_host(self, index: int, slots: int) -> None:
        """That host is ready; the job grows onto it unless a resize has set the number of workers."""
        self.capacity[index] = slots
        most = min(self.rules.max_allowed, sum(self.capacity))
        if self.target.by == "launch" and most > self.target.workers:
            self.target = replace(self.target, workers=most, version=self.target.version + 1)

    def without(self, worker: int) -> ControlRequest | None:
        """The request to go on without a member that wants to leave; None if it is no member or leaves.

        It is replaced only if there would be fewer workers than the job must have.
        """
        members, target = set(self.membership.members), self.target
        if worker not in members or worker in target.without:
            return None
        workers = max(self.rules.min_workers, target.workers - 1)
        leaving = sorted(target.without & members | {worker})
        return ControlRequest(workers, without=tuple(leaving), by="worker", why=f"worker {worker} leaves")

    def close_host(self, index: int) -> None:
        """Start no more workers on that host: it is unreachable."""
        self.capacity[index] = 0

    def stop(self) -> None:
        """End the job: no worker joins or leaves any more, but lost workers are still removed."""
        self._stopping = True

    def on_ready(self, worker: int) -> None:
        if self._is(worker, _Stage.STARTING):
            self._entries[worker].stage = _Stage.READY

    def on_joined(self, worker: int, version: int) -> None:
        if worker not in self._holders and self.has_begun:
            self._failed_starts = 0
        self._holders.add(worker)
        if version == self.membership.version:
            self._joined.add(worker)
        self.has_begun = self.has_begun or self.all_joined

    def on_done(self, worker: int) -> None:
        if not self._is(worker, _Stage.GONE):
            self._entries[worker].stage = _Stage.DONE

    def on_progress(self, step: int) -> None:
        if step > self._step:
            self._step, self._losses_at_step = step, 0

    def on_gone(self, worker: int, why: str) -> None:
        """The worker has died, or was killed because it is unreachable; `why` is part of messages."""
        if worker in self.left:
            return
        state, self._entries[worker].stage = self._entries[worker].stage, _Stage.GONE
        if self.has_begun and not self.has_joined(worker):
            self._failed_starts += 1
            self._failed_on[self._entries[worker].host] += 1
        if state is _Stage.MEMBER:
            self._fresh_losses.append((worker, why))

    def is_over(self) -> bool:
        """Whether all workers that ever joined are done or gone, and some are done.

        Workers that have not joined yet do not count: the members may have finished the run meanwhile.
        """
        running = [worker for worker in self._holders if self._is(worker, _Stage.MEMBER)]
        return not running and any(entry.stage is _Stage.DONE for entry in self._entries.values())

    def next_steps(self) -> NextSteps:
        """What to do now; called after each event."""
        if self._fresh_losses:
            return self._leave_out_lost()
        if self._stopping or not self.has_begun or not self.all_joined:
            return NextSteps()
        if any(self._is(m, _Stage.DONE) for m in self.membership.members):
            return NextSteps()
        return self._approach_target()

    def form_again(self, version: int, why: str) -> NextSteps:
        """What to do if the members of that version cannot communicate, though none is known to be lost.

        Only a connection may have failed, so they retry a few times.
        """
        if version != self.membership.version or self._fresh_losses:
            return NextSteps()
        self._losses_at_step += 1
        rest = tuple(m for m in self.membership.members if self._is(m, _Stage.MEMBER))
        if self._losses_at_step > self._most_losses() or not rest:
            return NextSteps(too_few=f"the workers cannot work together: {why}")
        return NextSteps(publish=self._publish(rest, "supervisor", why, breaks=True))

    def _most_losses(self) -> int:
        """The largest number of losses without a finished step in between; the job ends after more."""
        return 3 + 2 * self.target.workers

    def _leave_out_lost(self) -> NextSteps:
        losses, self._fresh_losses = self._fresh_losses, []
        self._losses_at_step += len(losses)
        self._lost += [worker for worker, _ in losses]
        self._lost_at = self.target.version
        reasons = ", ".join(f"worker {worker} {why}" for worker, why in losses)
        rest = tuple(m for m in self.membership.members if self._is(m, _Stage.MEMBER))
        if not self._holders & set(rest):
            # Workers that were about to leave still hold the state of the run.
            rest = tuple(sorted({*rest, *self.leavers()}))
        if self.is_over():
            return NextSteps()
        if not rest:
            return NextSteps(too_few=f"no worker is left: {reasons}")
        if self._losses_at_step > self._most_losses():
            return NextSteps(
                too_few=f"{self._losses_at_step} workers were lost and the job came no further: {reasons}"
            )
        publish = self._publish(rest, "supervisor", reasons, breaks=True)
        least = self.rules.min_workers
        too_few = None
        if len(rest) < least and not any(self._is(m, _Stage.DONE) for m in self._entries):
            too_few = f"{len(rest)} of at least {least} workers (parallel.min_workers) are left: {reasons}"
            self._stopping = True
        return NextSteps(publish=publish, too_few=too_few)

    def _approach_target(self) -> NextSteps:
        members = self.membership.members
        keep = [m for m in members if m not in self.target.without][: self.target.workers]
        missing = self.target.workers - len(keep)
        ready = [w for w in self._entries if self._is(w, _Stage.READY)]
        starting = [w for w in self._entries if self._is(w, _Stage.STARTING)]
        surplus = tuple((ready + starting)[missing:])
        if surplus:
            self._remove(surplus)
            return NextSteps(end=surplus)
        start = self._to_start(missing - len(ready) - len(starting))
        if start or starting:
            return NextSteps(start=start)
        # If all members are replaced, keep the old ones until the new ones have copied their state.
        chosen = (*(keep or members), *ready) if ready else tuple(keep)
        if chosen == members or not chosen:
            return NextSteps()
        for worker in ready:
            self._entries[worker].stage = _Stage.MEMBER
        is_replaced = len(chosen) > len(members) and self._lost_at == self.target.version
        why = self.target.why or ("in the place of lost workers" if is_replaced else "")
        return NextSteps(publish=self._publish(chosen, self.target.by, why))

    def _to_start(self, count: int) -> tuple[Start, ...]:
        if self.gives_up_joiners:
            return ()
        starts: list[Start] = []
        # Hosts on which workers have failed come last: they may lack a file or a package.
        for host, slots in sorted(enumerate(self.capacity), key=lambda each: self._failed_on[each[0]]):
            here = [e for e in self._entries.values() if e.host == host and e.stage is not _Stage.GONE]
            taken = {entry.slot for entry in here}
            free = (slot for slot in range(len(here) + slots) if slot not in taken)
            for slot in itertools.islice(free, max(0, min(count - len(starts), slots - len(here)))):
                worker = len(self._entries)
                self._entries[worker] = _Entry(host, slot, _Stage.STARTING)
                starts.append(Start(worker, host, slot))
        return tuple(starts)

    def _publish(self, members: tuple[int, ...], by: str, why: str, breaks: bool = False) -> Membership:
        self._joined = set()
        membership = self._membership(self.membership.version + 1, members, by, why)
        self.membership = replace(membership, breaks=breaks)
        return self.membership

    def _membership(self, version: int, members: tuple[int, ...], by: str, why: str) -> Membership:
        hosts = tuple(self.hosts[self._entries[m].host].name for m in members)
        lost = tuple(self._lost) if version > 1 else ()
        return Membership(version, members, hosts, lost, by, why)

    def _is(self, worker: int, stage: _Stage) -> bool:
        return self._entries[worker].stage is stage
