"""Workers that average in tests: a store that outlives all of them, and what each needs to take part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from plait.cluster.mail import Mail, open_mail
from plait.cluster.presence import Presence
from plait.sync.partial_reduce import PartialReduce
from plait.sync.peers import Peers
from plait.sync.rounds import Closed, Rules, read_outcome


@contextmanager
def job_store() -> Iterator[int]:
    """The port of a store in this process, as a host's agent holds it."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port


def enter(
    rank: int, size: int, port: int, lease_s: float = 1.0, hosts: list[str] | None = None
) -> tuple[dist.TCPStore, Mail, Presence]:
    """This rank's store, mail and presence."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    mail = open_mail(store, "t", rank, hosts or ["a"] * size, "127.0.0.1", 20.0)
    presence = Presence(store, "t", rank, range(size), lease_s)
    return store, mail, presence


def partial_reduce(
    rank: int,
    size: int,
    port: int,
    tensors: list[torch.Tensor],
    lease_s: float = 1.0,
    hosts: list[str] | None = None,
    **rules: Any,
) -> PartialReduce:
    store, mail, presence = enter(rank, size, port, lease_s, hosts)
    return PartialReduce(Peers(store, "t", mail, presence), [lambda: tensors], Rules(**rules))


def closed_rounds(port: int) -> list[tuple[int, ...]]:
    """The groups of all rounds so far, in order."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    number, groups = 0, []
    while store.check([key := f"t/partial/round/{number}"]):
        found = read_outcome(number, store.get(key))
        groups += [found.round.members] if isinstance(found, Closed) else []
        number += 1
    return groups
