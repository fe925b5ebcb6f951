"""Process groups of torch's that no stranger can enter.

gloo listens on TCP ports, and the first process that connects there is taken for a peer. So the members of a
new group prove to each other, over the group itself, that they know the job's secret, and a group that a
stranger has entered is made again. No port is opened before all members have come, and it is closed once they
have proven themselves.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from plait.comm.ports import close_ports, listening, raise_descriptor_limit, stop_accepting, tcp_sockets
from plait.comm.rendezvous import CHECK_S, Rendezvous
from plait.comm.tags import Tag
from plait.core.errors import LostPeer, PeerError
from plait.core.shown import shortened

ATTEMPTS = 5
# For a proof that its sender says is on its way.
PROOF_S = 5.0


class WorldConnections:
    """The TCP connections of a process group, so that a wait for a member that is gone can be ended."""

    def __init__(self, descriptors: Mapping[int, int]) -> None:
        self._descriptors = dict(descriptors)

    def cut(self) -> None:
        """Shut them down: all waits in the group, here or at the other end, fail at once.

        gloo itself would wait for a stopped peer, or one behind a cut link, until the group's timeout.
        """
        for identity, descriptor in self._descriptors.items():
            with contextlib.suppress(OSError):
                if os.fstat(descriptor).st_ino == identity:
                    with socket.socket(fileno=os.dup(descriptor)) as copy:
                        copy.shutdown(socket.SHUT_RDWR)


def join_world(backend: str, rendezvous: Rendezvous) -> WorldConnections:
    """Make the process group of all workers; every rank calls it."""

    def make(attempt: int) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        # Torch names groups by their number, which all members must count alike: also one that has left
        # behind a group that was never made. It begins anew itself where a group is destroyed.
        distributed_c10d._world.group_count = 0
        dist.init_process_group(
            backend,
            store=dist.PrefixStore(f"plait/world/{attempt}", rendezvous.store),
            rank=rendezvous.rank,
            world_size=len(rendezvous.hosts),
            timeout=timedelta(seconds=rendezvous.timeout_s),
        )

    before = _connected(rendezvous)
    _make_proven(rendezvous, range(len(rendezvous.hosts)), _interruptible(make, rendezvous))
    return WorldConnections({i: d for i, d in _connected(rendezvous).items() if i not in before})


def _interruptible(make: Callable[[int], None], rendezvous: Rendezvous) -> Callable[[int], None]:
    """`make` in a thread that is left behind where a member is lost meanwhile.

    gloo connects to a peer that has died for five times the group's timeout, and nothing ends that.
    """
    if rendezvous.check is None:
        return make
    check = rendezvous.check

    def made(attempt: int) -> None:
        check()
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
                # It may be about to succeed; the caller that makes the next group closes it.
                thread.join(CHECK_S)
                raise
        if failures:
            raise failures.pop()

    return made


def _connected(rendezvous: Rendezvous) -> dict[int, int]:
    """The descriptors of TCP connections to other workers, by a number that no other has."""
    if rendezvous.check is None:
        return {}
    store = getattr(rendezvous.store, "address", "")
    found = {}
    for identity, descriptor in tcp_sockets(listening=False).items():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as copy:
            host, port = copy.getpeername()[:2]
            if f"tcp:{host}:{port}" != store:
                found[identity] = descriptor
    return found


def new_group(
    rendezvous: Rendezvous, ranks: Sequence[int], timeout: timedelta | None = None, backend: str | None = None
) -> Any:
    """A process group of these ranks, with a timeout of its own; every rank of the world calls it."""
    deadline = timeout or timedelta(seconds=rendezvous.timeout_s)
    return _make_proven(
        rendezvous, ranks, lambda _: dist.new_group(list(ranks), timeout=deadline, backend=backend)
    )


def _make_proven(rendezvous: Rendezvous, ranks: Sequence[int], make: Callable[[int], Any]) -> Any:
    """What `make` returned, once all members have proven themselves in it; all ranks agree on that."""
    group_name = rendezvous.next_group(ranks)
    failed = ""
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
                return group
        finally:
            stop_accepting(before)
    raise PeerError(
        f"a process group of workers {list(ranks)} could not be made in {ATTEMPTS} attempts: some "
        f"connections came from elsewhere, or broke{failed}",
        LostPeer.GONE,
    )


def _is_proven(rendezvous: Rendezvous, name: str, ranks: Sequence[int], group: Any, fine: bool) -> bool:
    """Whether every member of the group has proven to every other one that it is a worker of the job."""
    store, own = rendezvous.store, rendezvous.rank
    proofs = _Proofs(rendezvous, name, ranks, group) if fine and own in ranks and len(ranks) > 1 else None
    _await_all(rendezvous, f"{name}/sent", ranks)
    if own in ranks:
        fine = fine and (proofs is None or proofs.all_are_right())
        store.set(f"{name}/fine/{own}", "1" if fine else "0")
    verdicts = [f"{name}/fine/{rank}" for rank in ranks]
    _wait(rendezvous, verdicts)
    return all(store.get(verdict) == b"1" for verdict in verdicts)


def _await_all(rendezvous: Rendezvous, what: str, ranks: Sequence[int]) -> None:
    """Wait until all of `ranks` have come here; others only wait."""
    if rendezvous.rank in ranks:
        rendezvous.store.set(f"{what}/{rendezvous.rank}", "")
    _wait(rendezvous, [f"{what}/{rank}" for rank in ranks])


def _wait(rendezvous: Rendezvous, keys: Sequence[str]) -> None:
    rendezvous.store.wait(list(keys), timedelta(seconds=rendezvous.timeout_s))


class _Proofs:
    """The proofs that a member sends to each other one, and those that it expects."""

    def __init__(self, rendezvous: Rendezvous, name: str, ranks: Sequence[int], group: Any) -> None:
        self._secret, self._name, self._own = rendezvous.secret, name, rendezvous.rank
        self._works: list[dist.Work | None] = []
        self._received: dict[int, torch.Tensor] = {}
        self._kept = []
        try:
            for peer in (rank for rank in ranks if rank != self._own):
                own = torch.frombuffer(bytearray(self._proof(self._own, peer)), dtype=torch.uint8)
                theirs = torch.zeros_like(own)
                self._kept.append(own)
                self._received[peer] = theirs
                self._works.append(dist.isend(own, peer, group=group, tag=Tag.PROOF))
                self._works.append(dist.irecv(theirs, peer, group=group, tag=Tag.PROOF))
        except RuntimeError:
            self._works.append(None)

    def _proof(self, sender: int, receiver: int) -> bytes:
        content = f"group|{self._name}|{sender}|{receiver}".encode()
        return hmac.new(self._secret, content, hashlib.sha256).digest()

    def all_are_right(self) -> bool:
        """Whether every other member has sent its proof; called once all say that they have."""
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
