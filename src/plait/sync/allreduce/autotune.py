"""Topology `auto`: the fastest one, measured on the workers before training."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

import torch
import torch.distributed as dist

from plait.comm.rendezvous import Rendezvous
from plait.core.events import Event
from plait.core.units import show_bytes, show_seconds
from plait.schema.topology import NATIVE, ROOTED, TOPOLOGIES, Hosts, Route, Topology, make_topology
from plait.schema.topology_spec import AUTO, DEFAULT, TopologySpec, build_topology
from plait.sync.allreduce.reducers import Members, Native, Spec
from plait.sync.allreduce.topology_reduce import OverTopology

FIRST_PROBE_BYTES = 256 << 10
LAST_PROBE_BYTES = 16 << 20
BUDGET_S = 2.0
log = logging.getLogger(__name__)


class TopologyChosen(Event):
    """The topology that `auto` chose, the last measured time of each candidate, and the reason.

    It is for the ranks `workers` and sums of about `for_bytes`; a resumed run or sweep goes on with it.
    """

    is_urgent: ClassVar[bool] = True

    topology: str
    bytes: int
    seconds: Mapping[str, float]
    reason: str
    workers: tuple[int, ...] = ()
    for_bytes: int = 0


def candidates(hosts: Hosts) -> list[Topology | None]:
    """The candidates of `auto`: the backend's all-reduce, all topologies, also rooted at each host.

    Topologies that have the same graphs on these hosts are tried once.
    """
    leaders = sorted({hosts.index(host) for host in hosts} - {0})
    names = [*TOPOLOGIES, *(f"{kind}:{leader}" for kind in ROOTED for leader in leaders)]
    by_routes: dict[tuple[Route, ...], Topology] = {}
    for name in names:
        topology = make_topology(name, hosts)
        by_routes.setdefault(topology.routes, topology)
    return [None, *by_routes.values()]


def probe_sizes(gradient_bytes: int) -> list[int]:
    """The sizes of the sums that are measured for gradients of that size."""
    sizes = [FIRST_PROBE_BYTES]
    while sizes[-1] < min(gradient_bytes, LAST_PROBE_BYTES):
        sizes.append(min(8 * sizes[-1], LAST_PROBE_BYTES))
    return sizes


def choose(members: Members, sizes: Sequence[int]) -> TopologyChosen:
    """The fastest candidate for sums of these sizes on these workers; all members call it together.

    Small sums are measured first; the faster half is measured again with sums of the next size, until one is
    left, all sizes are measured, or the time budget is spent.
    """
    probe = _Probe(members, sizes)
    left = {_name(topology): topology for topology in candidates(members.hosts)}
    seconds: dict[str, float] = {}
    measured = 0
    while len(left) > 1 and measured < len(sizes) and probe.spent_s < BUDGET_S:
        seconds |= {name: round(probe.time(topology, measured), 6) for name, topology in left.items()}
        ranking = sorted(left, key=seconds.__getitem__)
        left = {name: left[name] for name in ranking[: -(-len(ranking) // 2)]}
        measured += 1
    probe.close()
    size = sizes[measured - 1]
    reason = "; ".join(
        f"{name} sums {show_bytes(size)} in {show_seconds(seconds[name])}" for name in ranking[:2]
    )
    if members.group_rank == 0:
        log.info("topology: chose %s: %s", ranking[0], reason)
    return TopologyChosen(ranking[0], size, seconds, reason, members.ranks, sizes[-1])


def resolve_topology(
    spec: TopologySpec, members: Members, gradient_bytes: int, device: torch.device
) -> tuple[Topology | None, str | None]:
    """The topology to start with, and its name if it was chosen by measuring; all members call it together.

    It is measured once for these ranks and sums of about this size. `device` is that of the gradients.
    """
    if spec.name == DEFAULT and device.type != "cpu":
        return None, None
    if spec.name != AUTO:
        return build_topology(spec, members.hosts), None
    sizes, rendezvous = probe_sizes(gradient_bytes), members.rendezvous
    key = (members.ranks, sizes[-1])
    if key not in rendezvous.topologies:
        chosen = choose(members, sizes)
        remember([chosen], rendezvous)
        # One member has it recorded, for all.
        rendezvous.unrecorded += [chosen] * (members.group_rank == 0)
    name = rendezvous.topologies[key]
    return None if name == NATIVE else make_topology(name, members.hosts), name


def remember(choices: Iterable[TopologyChosen], rendezvous: Rendezvous) -> None:
    """Use these topologies instead of measuring again; all of their workers call it."""
    rendezvous.topologies |= {(each.workers, each.for_bytes): each.topology for each in choices}


def forget(members: Members) -> None:
    """Measure again for these workers: links may have changed since."""
    known = members.rendezvous.topologies
    for key in [key for key in known if key[0] == members.ranks]:
        del known[key]


def _name(topology: Topology | None) -> str:
    return NATIVE if topology is None else topology.name


class _Probe:
    """Measures sums of several sizes over one topology after the other."""

    def __init__(self, members: Members, sizes: Sequence[int]) -> None:
        self._group = members.group
        cpu = torch.device("cpu")
        self._over = OverTopology(members, [Spec(size // 4, torch.float32, cpu) for size in sizes])
        self._native = Native(self._over.buffers, members.group)
        self.spent_s = 0.0

    def time(self, topology: Topology | None, index: int) -> float:
        """Seconds of the slowest rank: the faster of two sums, after one to warm up."""
        if topology is not None:
            self._over.switch(topology)
        reducer = self._native if topology is None else self._over
        times = []
        for _ in range(3):
            dist.barrier(group=self._group)
            started = time.perf_counter()
            reducer.start(index)()
            seconds = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
            # All ranks must make the same decision, so all use the time of the slowest.
            dist.all_reduce(seconds, dist.ReduceOp.MAX, group=self._group)
            times.append(float(seconds))
        self.spent_s += sum(times)
        return min(times[1:])

    def close(self) -> None:
        self._over.close()
