"""Waiting for notices of several links at once."""

from __future__ import annotations

import select
from collections.abc import Iterable

from plait.comm.links.shm import SharedLink
from plait.comm.links.tcp import TcpLink

Link = SharedLink | TcpLink


def wait_for_notices(links: Iterable[Link], seconds: float) -> None:
    """Return once some peer has sent a notice or is gone, which is handled, or after `seconds`."""
    poll = select.poll()
    by_descriptor = {link.fileno(): link for link in links if not link.ended and not link.lost}
    for descriptor, link in by_descriptor.items():
        poll.register(descriptor, select.POLLIN | (select.POLLOUT if link.has_unsent else 0))
    for descriptor, _ in poll.poll(max(0.0, seconds) * 1e3):
        by_descriptor[descriptor].take_notices()
