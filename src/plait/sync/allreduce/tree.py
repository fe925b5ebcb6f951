"""All-reduce over a topology: the buffers, who is near, and the engine's thread behind them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from plait.comm.channels import meet_near
from plait.comm.collectives import all_gather_values
from plait.comm.links.shm_regions import LocalPeer, SharedBuffer
from plait.core.codec import encode
from plait.core.errors import LostPeer, PeerError, PlaitError
from plait.schema.topology import Topology
from plait.sync.allreduce.chunking import LEAST_BYTES, MOST_BYTES, MOST_REMOTE_BYTES
from plait.sync.allreduce.reduce_thread import ReduceThread, Reduction, layout
from plait.sync.allreduce.sums import Members, Pending, Spec


@dataclass(frozen=True)
class _Sum:
    engine: ReduceThread
    job: Reduction
    bring_back: Callable[[], object] | None

    def wait(self) -> None:
        self.engine.wait(self.job)
        if self.bring_back is not None:
            self.bring_back()


class OverTopology:
    """Sums buffers along a topology while the workers compute; all members make one together.

    `buffers` lie in memory that the other workers of this host see; those of a GPU pass through such memory.
    """

    def __init__(
        self, members: Members, specs: Sequence[Spec], most: int | None = None, least: int = LEAST_BYTES
    ) -> None:
        self._members = members
        offsets, size = layout([spec.size_bytes for spec in specs])
        self._offsets = offsets
        region = SharedBuffer(size)
        self._host = [
            region.flat[offset : offset + spec.size_bytes].view(spec.dtype)
            for spec, offset in zip(specs, offsets)
        ]
        self.buffers = [
            host if spec.device.type == "cpu" else torch.zeros_like(host, device=spec.device)
            for spec, host in zip(specs, self._host)
        ]
        if most is None:
            # From the hosts' names, which all members know alike.
            most = MOST_BYTES if len(set(members.hosts)) == 1 else MOST_REMOTE_BYTES
        self._engine = ReduceThread(members, _see_each_other(members, region), most, least)
        self._engine.start()
        self.topology: Topology | None = None

    def start(self, index: int, fill: Callable[[], None] | None = None) -> Pending:
        flat, host = self.buffers[index], self._host[index]
        if flat is host:
            # The engine fills the buffer, so that backward goes on meanwhile.
            job, bring_back = Reduction(host, self._offsets[index], fill), None
        else:
            # A GPU's work is queued in order by this thread, and waits for nobody.
            if fill is not None:
                fill()
            job = Reduction(host, self._offsets[index], _fetch(flat, host))

            def bring_back() -> object:
                return flat.copy_(host, non_blocking=True)

        self._engine.take(job)
        return _Sum(self._engine, job, bring_back)

    def switch(self, topology: Topology) -> None:
        """Sum along `topology` from now on; all members call it together, with no sum under way."""
        # All of it is compared, as text; a few thousand routes at most.
        found = all_gather_values([topology.name, encode(topology)], self._members.group)
        if any(other != found[0] for other in found):
            names = ", ".join(name for name, _ in found)
            raise PlaitError(
                f"worker {self._members.rank} was asked to switch to topology {topology.name!r}, but the "
                f"workers were asked for {names}; all must switch to the same one between the same two steps"
            )
        size = len(self._members.ranks)
        if topology.size != size:
            raise PlaitError(f"topology {topology.name!r} spans {topology.size} workers, expected {size}")
        self._engine.use(topology)
        self.topology = topology

    def fail(self, failure: BaseException) -> None:
        """End the engine, and all waits for a sum, with `failure`; may be called from any thread."""
        self._engine.fail(failure)

    def close(self) -> None:
        """End the engine; no sum is under way here. Those of others that need nothing more go on."""
        self._engine.close()
        self._engine.join(self._members.deadline_s)


def _see_each_other(members: Members, region: SharedBuffer) -> dict[int, LocalPeer]:
    """The members of this host, by their places in the topology, each with its region in sight."""
    end = time.monotonic() + members.deadline_s
    met = meet_near(members.rendezvous, f"sums/{','.join(map(str, members.ranks))}", members.ranks)
    near = {members.ranks.index(rank): LocalPeer(connection) for rank, connection in met.items()}
    for peer in near.values():
        peer.show(region)
    for place, peer in near.items():
        try:
            peer.see(end - time.monotonic())
        except OSError as failure:
            raise PeerError(
                f"worker {members.ranks[place]} showed worker {members.rank} no memory: {failure}",
                LostPeer.GONE,
                members.ranks[place],
            ) from failure
    region.close()
    return near


def _fetch(flat: Tensor, host: Tensor) -> Callable[[], None]:
    """What copies a GPU's buffer to the host as soon as the work queued so far has filled it."""
    filled = torch.cuda.Event()
    filled.record(torch.cuda.current_stream(flat.device))
    aside = torch.cuda.Stream(flat.device)

    def fetch() -> None:
        with torch.cuda.stream(aside):
            aside.wait_event(filled)
            host.copy_(flat, non_blocking=True)
        aside.synchronize()

    return fetch
