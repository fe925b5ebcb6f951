"""Changes of the members of a sweep, as its record has them."""

from __future__ import annotations

from collections.abc import Iterable

from plait.core import run_events
from plait.core.events import Event
from plait.launch.membership import Membership


def members_of(past: Iterable[Event]) -> Membership:
    """The members of a sweep by the events of its record."""
    version, members = 0, tuple[int, ...]()
    for event in past:
        match event:
            case run_events.SweepStarted():
                version, members = 1, tuple(range(event.workers))
            case run_events.WorkersChanged():
                version, members = event.version, event.members
            case _:
                pass
    return Membership(version, members, ())


def workers_changed(before: Membership, now: Membership, step: int) -> run_events.WorkersChanged:
    """The event of a change, after `step` steps of all trials; no worker that stays waits for it."""
    gone = set(before.members) - set(now.members)
    return run_events.WorkersChanged(
        step=step,
        version=now.version,
        members=now.members,
        joined=tuple(sorted(set(now.members) - set(before.members))),
        left=tuple(sorted(gone - set(now.lost))),
        lost=tuple(sorted(gone & set(now.lost))),
        seconds=0.0,
        by=now.by,
        why=now.why,
    )
