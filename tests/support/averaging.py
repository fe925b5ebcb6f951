"""Workers that average in tests: a store that outlives all of them, and what each needs to take part."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from plait.comm.handshake import Address
from plait.comm.job_store import JobStore
from plait.comm.store import StoreClient, StoreServer
from plait.sync.averaging.base import AveragedState
from plait.sync.averaging.group_graph import Group, disconnected
from plait.sync.averaging.mailbox import Mailbox, OnSend, open_mailbox
from plait.sync.averaging.partial_reduce import PartialReduce
from plait.sync.averaging.partial_reduce_rules import Closed, Rules, read_outcome
from plait.sync.averaging.peers import Peers
from support.leases import Leases
from support.meeting import SECRET, rendezvous_of


@contextmanager
def job_store() -> Iterator[str]:
    """The address of a store in this process, as a host's agent holds it."""
    server = StoreServer(SECRET)
    yield server.address.text
    server.close()


def open_store(address: str, rank: int = 0) -> JobStore:
    """The job's store as a worker has it."""
    return JobStore(StoreClient(Address(address), SECRET, rank, timeout_s=20.0))


def enter(
    rank: int,
    size: int,
    address: str,
    lease_s: float = 1.0,
    hosts: list[str] | None = None,
    on_send: OnSend | None = None,
) -> tuple[JobStore, Mailbox, Leases]:
    """This rank's store, mailbox and presence."""
    store = open_store(address, rank)
    mailbox = open_mailbox(rendezvous_of(rank, hosts or ["a"] * size, store), "t", on_send=on_send)
    presence = Leases(store, "t", rank, range(size), lease_s)
    return store, mailbox, presence


def partial_reduce(
    rank: int,
    size: int,
    address: str,
    tensors: list[torch.Tensor],
    lease_s: float = 1.0,
    hosts: list[str] | None = None,
    on_send: OnSend | None = None,
    **rules: Any,
) -> PartialReduce:
    store, mailbox, presence = enter(rank, size, address, lease_s, hosts, on_send)
    return PartialReduce(
        Peers(store, "t", mailbox, presence.lost), AveragedState([lambda: tensors]), Rules(**rules)
    )


def closed_rounds(address: str) -> list[tuple[int, ...]]:
    """The groups of all rounds so far, in order."""
    store = open_store(address)
    number, groups = 0, []
    while store.check([key := f"t/partial/round/{number}"]):
        found = read_outcome(number, store.get(key))
        groups += [found.round.members] if isinstance(found, Closed) else []
        number += 1
    return groups


def first_disconnected(groups: Sequence[Group], members: Collection[int], every: int) -> int | None:
    """The first group after which the last `every` rounds had not connected all; None where there is none."""
    for index, group in enumerate(groups):
        if disconnected(groups[:index], group, members, every):
            return index
    return None
