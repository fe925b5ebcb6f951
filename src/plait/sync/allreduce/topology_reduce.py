"""All-reduce over a topology: the buffers in shared memory, the local peers, and the reducing thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from plait.comm.collectives import all_gather_values
from plait.comm.links.shm_regions import LocalPeer, SharedBuffer
from plait.comm.rendezvous import sharing_memory
from plait.core.codec import encode
from plait.core.errors import LostPeer, PeerError, PlaitError
from plait.schema.topology import Topology
from plait.sync.allreduce.chunking import LEAST_BYTES, MOST_BYTES, MOST_REMOTE_BYTES
from plait.sync.allreduce.reduce_thread import ReduceThread, Reduction, layout
from plait.sync.allreduce.reducers import Members, Spec, WaitForSum


class OverTopology:
    """Sums buffers along a topology while the workers compute; all members create one together.

    `buffers` are in memory that the workers of this host share; those of a GPU are copied through it.
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
            # From the host names, which are the same on all members.
            most = MOST_BYTES if len(set(members.hosts)) == 1 else MOST_REMOTE_BYTES
        self._engine = ReduceThread(members, _share_regions(members, region), most, least)
        self._engine.start()
        self.topology: Topology | None = None

    def start(self, index: int, fill: Callable[[], None] | None = None) -> WaitForSum:
        flat, host = self.buffers[index], self._host[index]
        if flat is not host:
            # Work on a GPU is queued by this thread, in order, without blocking.
            if fill is not None:
                fill()
            fill = _fetch(flat, host)
        # The reducing thread fills the host's buffer, overlapped with backward.
        job = Reduction(host, self._offsets[index], fill)
        self._engine.take(job)

        def wait() -> None:
            self._engine.wait(job)
            if flat is not host:
                flat.copy_(host, non_blocking=True)

        return wait

    def switch(self, topology: Topology) -> None:
        """Sum along `topology` from now on; all members call it together, with no sum in flight."""
        # The whole topology is compared, as text; it has a few thousand routes at most.
        topologies = all_gather_values([topology.name, encode(topology)], self._members.group)
        if any(other != topologies[0] for other in topologies):
            names = ", ".join(name for name, _ in topologies)
            raise PlaitError(
                f"worker {self._members.rank} was asked to switch to topology {topology.name!r}, but the "
                f"workers were asked for {names}; all must switch to the same one between the same two steps"
            )
        assert topology.size == len(self._members.ranks)
        self._engine.use(topology)
        self.topology = topology

    def fail(self, failure: BaseException) -> None:
        """End the thread, and all waits for a sum, with `failure`; may be called from any thread."""
        self._engine.fail(failure)

    def close(self) -> None:
        """End the thread; called with no sum in flight here. Sums of others may still be in flight."""
        self._engine.close()
        self._engine.join(self._members.deadline_s)


def _share_regions(members: Members, region: SharedBuffer) -> dict[int, LocalPeer]:
    """Exchange regions with the members on this host; returns these by their ranks in the topology."""
    end = time.monotonic() + members.deadline_s
    local = sharing_memory(members.ranks, members.rank, members.rendezvous.hosts)
    connections = members.rendezvous.connect(f"sums/{','.join(map(str, members.ranks))}", local)
    local_peers = {
        members.ranks.index(rank): LocalPeer(connection) for rank, connection in connections.items()
    }
    for peer in local_peers.values():
        peer.show(region)
    for index, peer in local_peers.items():
        try:
            peer.see(end - time.monotonic())
        except OSError as failure:
            raise PeerError(
                f"worker {members.ranks[index]} showed worker {members.rank} no memory: {failure}",
                LostPeer.GONE,
                members.ranks[index],
            ) from failure
    region.close()
    return local_peers


def _fetch(flat: Tensor, host: Tensor) -> Callable[[], None]:
    """A function that copies a GPU's buffer to the host once the work queued so far has filled it."""
    filled = torch.cuda.Event()
    filled.record(torch.cuda.current_stream(flat.device))
    copy_stream = torch.cuda.Stream(flat.device)

    def fetch() -> None:
        with torch.cuda.stream(copy_stream):
            copy_stream.wait_event(filled)
            host.copy_(flat, non_blocking=True)
        copy_stream.synchronize()

    return fetch
