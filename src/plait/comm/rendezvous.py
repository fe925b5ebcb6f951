"""Authenticated connections between pairs of workers.

Addresses are exchanged in the job's store. Workers of one host use local sockets, others TCP.
"""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from plait.comm.handshake import Address, Listener, connect
from plait.core.errors import LostPeer, PeerError
from plait.core.events import Event

CHECK_S = 0.2


def shares_memory() -> bool:
    """Whether workers of one host can share anonymous memory on this system."""
    return hasattr(os, "memfd_create")


def sharing_memory(peers: Iterable[int], own: int, hosts: Sequence[str] | Mapping[int, str]) -> set[int]:
    """Those of `peers` that can share memory with worker `own`: those on its host."""
    return {peer for peer in peers if shares_memory() and hosts[peer] == hosts[own]}


@dataclass(eq=False)
class Rendezvous:
    """Connects this worker with others of its job.

    `hosts` names the host of each rank, `address` is where other hosts reach this one, and `timeout_s` limits
    waits for the others. `check` is called periodically while this worker waits; an exception from it ends
    the wait.
    """

    store: dist.Store
    secret: bytes = field(repr=False)
    rank: int
    hosts: Sequence[str]
    address: str = "127.0.0.1"
    timeout_s: float = 300.0
    check: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        self.hosts = tuple(self.hosts)
        self._calls = Counter[str]()
        self._groups = Counter[tuple[int, ...]]()
        # The process groups of all ranks that were joined here; a script may leave one and join another.
        self.worlds = 0
        # The descriptors of the TCP connections of its process groups, by inode.
        self.connections: dict[int, int] = {}
        # By world and ranks: the communicator for sums of GPU tensors, None if gloo sums them.
        self.data_groups: dict[tuple[int | str, ...], Any] = {}
        # The names of topologies that were chosen by measuring, by the ranks that sum and the size of their
        # sums; and the events of choices that no record has yet.
        self.topologies: dict[tuple[tuple[int, ...], int], str] = {}
        self.unrecorded: list[Event] = []

    def next_group(self, ranks: Sequence[int]) -> str:
        """A name for the next process group of these ranks, which all create in the same order."""
        key = tuple(ranks)
        self._groups[key] += 1
        return f"plait/group/{','.join(map(str, key))}/{self._groups[key]}"

    def connect(
        self,
        name: str,
        peers: Iterable[int],
        own: int | None = None,
        hosts: Sequence[str] | Mapping[int, str] | None = None,
    ) -> dict[int, socket.socket]:
        """A connection to each of `peers`; all of them call it with the same name, and each other as peers.

        If members are not numbered by rank, `own` is this worker's number and `hosts` names the host of each.
        Sockets to workers of the same host keep message boundaries.
        """
        own = self.rank if own is None else own
        hosts = self.hosts if hosts is None else hosts
        self._calls[name] += 1
        where = f"plait/link/{name}/{self._calls[name]}"
        peers = sorted(set(peers) - {own})
        return _AddressExchange(self, where, own, sharing_memory(peers, own, hosts)).link(peers)

    def listen(self, purpose: str, near: bool) -> Listener:
        return Listener(self.secret, purpose, None if near else self.address, packets=near)


@dataclass(eq=False)
class _AddressExchange:
    """One exchange of addresses: lower numbers listen, higher ones connect."""

    rendezvous: Rendezvous
    where: str
    own: int
    near: set[int]

    def __post_init__(self) -> None:
        self._end = time.monotonic() + self.rendezvous.timeout_s

    def link(self, peers: Sequence[int]) -> dict[int, socket.socket]:
        higher = [peer for peer in peers if peer > self.own]
        listeners = {
            near: self.rendezvous.listen(self._purpose(self.own), near)
            for near in (True, False)
            if any((peer in self.near) == near for peer in higher)
        }
        store = self.rendezvous.store
        connections: dict[int, socket.socket] = {}
        try:
            for near, listener in listeners.items():
                store.set(self._key(self.own, near), listener.address.text)
            for peer in (p for p in peers if p < self.own):
                connections[peer] = self._connect(peer)
            for near, listener in listeners.items():
                waiting = {peer for peer in higher if (peer in self.near) == near}
                connections |= self._accept(listener, waiting)
        finally:
            for near, listener in listeners.items():
                listener.close()
                store.delete_key(self._key(self.own, near))
        return connections

    def _purpose(self, listener: int) -> str:
        return f"{self.where}/{listener}"

    def _key(self, listener: int, near: bool) -> str:
        return f"{self.where}/{listener}/{'local' if near else 'remote'}"

    def _connect(self, peer: int) -> socket.socket:
        key = self._key(peer, peer in self.near)
        store = self.rendezvous.store
        try:
            store.wait([key], timedelta(seconds=self._left_s()))
            address = Address(store.get(key).decode())
            while True:
                seconds = self._slice_s()
                try:
                    return connect(address, self.rendezvous.secret, self._purpose(peer), self.own, seconds)
                except TimeoutError:
                    if time.monotonic() >= self._end:
                        raise
        except (OSError, RuntimeError) as failure:
            self._check()
            raise self._missing([peer]) from failure

    def _check(self) -> None:
        if self.rendezvous.check is not None:
            self.rendezvous.check()

    def _slice_s(self) -> float:
        """How long to wait before calling `check` again."""
        self._check()
        return self._left_s() if self.rendezvous.check is None else min(CHECK_S, self._left_s())

    def _accept(self, listener: Listener, waiting: set[int]) -> dict[int, socket.socket]:
        accepted: dict[int, socket.socket] = {}
        while waiting:
            try:
                peer, connection = listener.accept(time.monotonic() + self._slice_s())
            except TimeoutError as failure:
                if time.monotonic() < self._end:
                    continue
                raise self._missing(sorted(waiting)) from failure
            if peer in accepted:  # its first connection was lost and it tried again
                accepted[peer].close()
            accepted[peer] = connection
            waiting.discard(peer)
        return accepted

    def _missing(self, peers: Sequence[int]) -> PeerError:
        names = ", ".join(map(str, peers))
        return PeerError(
            f"worker {self.own} waited {self.rendezvous.timeout_s:g} s to be linked with worker {names}",
            LostPeer.SILENT,
            peers[0],
        )

    def _left_s(self) -> float:
        return max(0.1, self._end - time.monotonic())
