"""Process groups of torch.distributed whose members are authenticated.

gloo listens on TCP ports and accepts the first process that connects as a peer. So the members of a new group
prove to each other, over the group itself, that they know the job's secret; if a proof fails, the group is
made again. Ports are opened only when all members are ready, and closed once they are authenticated.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import itertools
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from plait.comm.handshake import Address
from plait.comm.ports import close_ports, listening, raise_descriptor_limit, stop_accepting, tcp_sockets
from plait.comm.rendezvous import CHECK_S, Rendezvous
from plait.comm.tags import Tag
from plait.core.errors import LostPeer, PeerError
from plait.core.shown import shortened

ATTEMPTS = 5
# How long to wait for a proof that was reported as sent.
PROOF_S = 5.0


def cut_connections(rendezvous: Rendezvous) -> None:
    """Shut down the TCP connections of process groups: all waits in them, on both ends, fail at once.

    gloo itself would wait for a stopped or unreachable peer until the group's timeout.
    """
    for identity, descriptor in list(rendezvous.connections.items()):
        with contextlib.suppress(OSError):
            if os.fstat(descriptor).st_ino == identity:
                with socket.socket(fileno=os.dup(descriptor)) as copy:
                    copy.shutdown(socket.SHUT_RDWR)


def abandon_world() -> None:
    """Forget the process groups of a world that has lost a member.

    gloo's threads may wait for that member until the timeout, even if the connection to it is closed, and the
    destructor of a group waits for its threads: so another thread runs it.
    """
    groups = list(distributed_c10d._world.pg_map)
    dist.destroy_process_group()
    threading.Thread(target=groups.clear, name="plait-abandon", daemon=True).start()


def join_world(backend: str, rendezvous: Rendezvous) -> None:
    """Initialize the default process group; every rank calls it."""
    rendezvous.worlds += 1

    def make(attempt: int) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        # Torch numbers groups, and all members must have the same count, also after a group that could not be
        # made. Torch resets the count itself if a group is destroyed.
        distributed_c10d._world.group_count = 0
        dist.init_process_group(
            backend,
            store=dist.PrefixStore(f"plait/world/{rendezvous.worlds}/{attempt}", rendezvous.store),
            rank=rendezvous.rank,
            world_size=len(rendezvous.hosts),
            timeout=timedelta(seconds=rendezvous.timeout_s),
        )

    _make_proven(rendezvous, range(len(rendezvous.hosts)), interruptible(make, rendezvous))


def interruptible(
    make: Callable[[int], None], rendezvous: Rendezvous, seconds: float = math.inf
) -> Callable[[int], None]:
    """Run `make` in a thread, which is abandoned if a member is lost meanwhile, or after `seconds`.

    gloo tries to connect to a dead peer for five times the group's timeout, and cannot be interrupted.
    """
    if rendezvous.check is None:
        return make
    check = rendezvous.check

    def made(attempt: int) -> None:
        check()
        end = time.monotonic() + seconds
        failures: list[BaseException] = []

        def run() -> None:
            try:
                make(attempt)
            except BaseException as failure:
                failures.append(failure)

        thread = threading.Thread(target=run, name="plait-join", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(CHECK_S)
            try:
                check()
            except BaseException:
                # It may still succeed; the next group's caller closes it.
                thread.join(CHECK_S)
                raise
            if time.monotonic() > end:
                raise PeerError(f"no connection of all workers within {seconds:g} s", LostPeer.SILENT)
        if failures:
            raise failures.pop()

    return made


def _connected(rendezvous: Rendezvous) -> dict[int, int]:
    """The descriptors of TCP connections to other workers, by inode."""
    if rendezvous.check is None:
        return {}
    store = getattr(rendezvous.store, "address", None)
    connections = {}
    for identity, descriptor in tcp_sockets(listening=False).items():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as copy:
            host, port = copy.getpeername()[:2]
            if Address(f"tcp:{host}:{port}") != store:
                connections[identity] = descriptor
    return connections


def new_group(
    rendezvous: Rendezvous, ranks: Sequence[int], timeout: timedelta | None = None, backend: str | None = None
) -> Any:
    """A process group of these ranks, with its own timeout; every rank of the world calls it."""
    deadline = timeout or timedelta(seconds=rendezvous.timeout_s)
    return _make_proven(
        rendezvous, ranks, lambda _: dist.new_group(list(ranks), timeout=deadline, backend=backend)
    )


def new_group_of_members(rendezvous: Rendezvous, ranks: Sequence[int]) -> Any:
    """A process group of these ranks, which call it in one order; other ranks do not."""
    deadline = timedelta(seconds=rendezvous.timeout_s)

    def make(attempt: int) -> Any:
        with _named_by_members(attempt):
            return dist.new_group(list(ranks), timeout=deadline, use_local_synchronization=True)

    return _make_proven(rendezvous, ranks, make)


@contextlib.contextmanager
def _named_by_members(attempt: int) -> Iterator[None]:
    """Have torch name a group by its ranks and how many groups of these there were.

    Torch itself counts all groups of a rank, which may be more on one member than on another.
    """
    before = distributed_c10d._hash_ranks_to_str

    def name_of(ranks: Sequence[int]) -> str:
        name = f"plait/{','.join(map(str, ranks))}/{attempt}"
        taken = set(distributed_c10d._world.pg_names.values())
        return next(f"{name}/{i}" for i in itertools.count() if f"{name}/{i}" not in taken)

    distributed_c10d._hash_ranks_to_str = name_of
    try:
        yield
    finally:
        distributed_c10d._hash_ranks_to_str = before


def _make_proven(rendezvous: Rendezvous, ranks: Sequence[int], make: Callable[[int], Any]) -> Any:
    """The group that `make` returns, after all members are authenticated; all ranks agree on the outcome."""
    group_name = rendezvous.next_group(ranks)
    failed, connected = "", _connected(rendezvous)
    raise_descriptor_limit()
    for attempt in range(ATTEMPTS):
        name = f"{group_name}/{attempt}"
        _await_all(rendezvous, f"{name}/here", ranks)
        before = listening()
        try:
            group, fine = None, True
            try:
                group = make(attempt)
            except RuntimeError as failure:
                fine, failed = False, f"; the last error here: {shortened(str(failure), 300)}"
                if rendezvous.check is not None:
                    rendezvous.check()
            if _is_proven(rendezvous, name, ranks, group, fine):
                close_ports(before)
                new = {i: d for i, d in _connected(rendezvous).items() if i not in connected}
                rendezvous.connections.update(new)
                return group
        finally:
            stop_accepting(before)
    raise PeerError(
        f"a process group of workers {list(ranks)} could not be made in {ATTEMPTS} attempts: some "
        f"connections came from elsewhere, or broke{failed}",
        LostPeer.GONE,
    )


def _is_proven(rendezvous: Rendezvous, name: str, ranks: Sequence[int], group: Any, fine: bool) -> bool:
    """Whether every member of the group has authenticated itself to every other one."""
    store, rank = rendezvous.store, rendezvous.rank
    proofs = _Proofs(rendezvous, name, ranks, group) if fine and rank in ranks and len(ranks) > 1 else None
    _await_all(rendezvous, f"{name}/sent", ranks)
    if rank in ranks:
        fine = fine and (proofs is None or proofs.all_are_right())
        store.set(f"{name}/fine/{rank}", "1" if fine else "0")
    verdicts = [f"{name}/fine/{member}" for member in ranks]
    _wait(rendezvous, verdicts)
    return all(store.get(verdict) == b"1" for verdict in verdicts)


def _await_all(rendezvous: Rendezvous, what: str, ranks: Sequence[int]) -> None:
    """Wait until all of `ranks` have reached this call; other ranks only wait."""
    if rendezvous.rank in ranks:
        rendezvous.store.set(f"{what}/{rendezvous.rank}", "")
    _wait(rendezvous, [f"{what}/{rank}" for rank in ranks])


def _wait(rendezvous: Rendezvous, keys: Sequence[str]) -> None:
    rendezvous.store.wait(list(keys), timedelta(seconds=rendezvous.timeout_s))


class _Proofs:
    """The proofs that a member sends to the others, and those that it expects."""

    def __init__(self, rendezvous: Rendezvous, name: str, ranks: Sequence[int], group: Any) -> None:
        self._secret, self._name, self._own = rendezvous.secret, name, rendezvous.rank
        self._works: list[dist.Work | None] = []
        self._received: dict[int, torch.Tensor] = {}
        self._kept = []
        try:
            for peer in (rank for rank in ranks if rank != self._own):
                proof = torch.frombuffer(bytearray(self._proof(self._own, peer)), dtype=torch.uint8)
                theirs = torch.zeros_like(proof)
                self._kept.append(proof)
                self._received[peer] = theirs
                self._works.append(dist.isend(proof, peer, group=group, tag=Tag.PROOF))
                self._works.append(dist.irecv(theirs, peer, group=group, tag=Tag.PROOF))
        except RuntimeError:
            self._works.append(None)

    def _proof(self, sender: int, receiver: int) -> bytes:
        content = f"group|{self._name}|{sender}|{receiver}".encode()
        return hmac.new(self._secret, content, hashlib.sha256).digest()

    def all_are_right(self) -> bool:
        """Whether all proofs are valid; called after all members report that they have sent theirs."""
        try:
            for work in self._works:
                if work is None:
                    return False
                work.wait(timedelta(seconds=PROOF_S))
        except RuntimeError:
            return False
        return all(
            hmac.compare_digest(theirs.numpy().tobytes(), self._proof(peer, self._own))
            for peer, theirs in self._received.items()
        )
