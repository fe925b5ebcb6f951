"""The cost of all-reduce on the workers of a job, measured with the sums that its replicas will make."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import Parameter

from plait.comm.groups import new_group
from plait.comm.rendezvous import Rendezvous
from plait.profiler.link_bandwidth import Sum, sum_of_times
from plait.schema.topology_spec import TopologySpec
from plait.sync.allreduce.autotune import resolve_topology
from plait.sync.allreduce.buckets import AllReduce
from plait.sync.allreduce.reducers import Members

FEW_BYTES, LEAST_BYTES, MOST_BYTES = 16 << 10, 1 << 20, 16 << 20
BEYOND_CACHES_BYTES = 16 << 20


def measure_sums(
    model: nn.Module,
    rendezvous: Rendezvous,
    topology: TopologySpec | None = None,
    repeats: int = 15,
    device: torch.device | None = None,
) -> tuple[Sum, ...]:
    """How fast workers sum gradients like the model's within hosts and between them, equal on every rank.

    All ranks of the default group call it together, at least two. Hosts with as many workers each are
    measured inside, all at once, and between their first workers; others as one set of workers. `device` is
    where the job's gradients are, the CPU if None; those measured are on the CPU.
    """
    hosts = rendezvous.hosts
    probes = [[Parameter(torch.zeros(FEW_BYTES // 4))], _like(model)]
    costs: list[Sum] = []
    for groups in groups_of(hosts):
        times = _time(groups, rendezvous, probes, topology, repeats, device or torch.device("cpu"))
        few, many = (sum(p.numel() * p.element_size() for p in probe) for probe in probes)
        same_host = len({hosts[rank] for rank in groups[0]}) == 1
        costs.append(sum_of_times(len(groups[0]), same_host, (few, times[0]), (many, times[1])))
    return tuple(costs)


def groups_of(hosts: Sequence[str]) -> list[list[list[int]]]:
    """The groups of ranks that reduce concurrently, one list per measured level."""
    ranks: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks.setdefault(host, []).append(rank)
    inside = list(ranks.values())
    if len(inside) == 1 or len({len(group) for group in inside}) > 1:
        return [[list(range(len(hosts)))]]
    between = [[group[0] for group in inside]]
    return [inside, between] if len(inside[0]) > 1 else [between]


def _like(model: nn.Module) -> list[Parameter]:
    """Parameters as many and as large as the model's, the small ones first, but not too many bytes."""
    chosen: list[Parameter] = []
    size = 0
    for parameter in sorted((p for p in model.parameters() if p.requires_grad), key=torch.numel):
        size += parameter.numel() * parameter.element_size()
        if size > MOST_BYTES:
            break
        chosen.append(Parameter(torch.zeros(parameter.shape, dtype=parameter.dtype)))
    held = sum(p.numel() * p.element_size() for p in chosen)
    if held < LEAST_BYTES:
        rest = (LEAST_BYTES if size <= MOST_BYTES else MOST_BYTES) - held
        chosen.append(Parameter(torch.zeros(rest // 4)))
    return chosen


def _time(
    groups: Sequence[Sequence[int]],
    rendezvous: Rendezvous,
    probes: Sequence[Sequence[Parameter]],
    topology: TopologySpec | None,
    repeats: int,
    device: torch.device,
) -> list[float]:
    """Seconds to reduce each probe in the slowest of `groups`, which run concurrently; all ranks call it."""
    rank = rendezvous.rank
    made = [(new_group(rendezvous, ranks), ranks) for ranks in groups]
    seconds = torch.zeros(len(probes), dtype=torch.float64)
    for group, ranks in made:
        if rank in ranks:
            members = Members(rendezvous, tuple(ranks), group)
            for index, probe in enumerate(probes):
                seconds[index] = _time_one(probe, members, topology, repeats, device)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    for group, ranks in made:
        if rank in ranks:
            dist.destroy_process_group(group)
    return [float(each) for each in seconds]


def _time_one(
    probe: Sequence[Parameter],
    members: Members,
    topology: TopologySpec | None,
    repeats: int,
    device: torch.device,
) -> float:
    sync = AllReduce(list(probe), members)
    if topology is not None:
        sync.switch(resolve_topology(topology, members, sync.gradient_bytes, device)[0])
    samples = []
    elsewhere = torch.zeros(BEYOND_CACHES_BYTES // 4)
    for _ in range(repeats + 1):
        sync.begin()
        for parameter in probe:
            parameter.grad = torch.zeros_like(parameter)
        # As after a backward: most gradients have left the caches, and some workers come later than others.
        elsewhere.add_(1)
        started = time.perf_counter()
        sync.sum_gradients(torch.zeros(0, dtype=torch.float64))
        samples.append(time.perf_counter() - started)
    sync.close()
    # Without the first, which connects the workers, and the slowest, which may be noise. The mean of the
    # others and of all workers: a run pays for every wait.
    mean = torch.tensor(statistics.fmean(sorted(samples[1:])[: max(1, repeats - 1)]), dtype=torch.float64)
    dist.all_reduce(mean, group=members.group)
    return float(mean) / len(members.ranks)
