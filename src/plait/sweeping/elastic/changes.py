"""Changes of the members of a sweep, as its record has them."""

from __future__ import annotations

from plait.core import run_events
from plait.launch.membership import Membership


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
