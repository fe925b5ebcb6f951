"""Sums, and what a pipeline costs by itself, are timed between real processes."""

from __future__ import annotations

import time
from typing import Any

import torch.distributed as dist
from torch import nn

from plait.measure.allreduce_cost import groups_of, measure_sums
from plait.measure.overhead import measure_overhead
from plait.profiler.link_bandwidth import Sum
from plait.schema.topology_spec import TopologySpec
from support.meeting import rendezvous_of
from support.world import run_ranks


def sums_of(rank: int, hosts: list[str], topology: str = "native") -> tuple[Sum, ...]:
    return measure_sums(nn.Linear(512, 512), rendezvous_of(rank, hosts), TopologySpec(topology), repeats=3)


def test_all_ranks_learn_the_same_speed_of_their_sums() -> None:
    results = run_ranks(3, sums_of, hosts=["here"] * 3)
    assert results[0] == results[1] == results[2]
    (found,) = results[0]
    assert (found.workers, found.same_host) == (3, True)
    assert 1e6 < found.bytes_per_s < 1e12
    assert 0 <= found.latency_s < 0.5


def slow_sums(rank: int) -> tuple[Sum, ...]:
    """A world in which every large sum takes 50 ms longer."""
    plain = dist.all_reduce

    def slow(tensor: Any, *args: Any, **options: Any) -> Any:
        if tensor.numel() > 100_000:
            time.sleep(0.05)
        return plain(tensor, *args, **options)

    dist.all_reduce = slow
    return measure_sums(nn.Linear(512, 512), rendezvous_of(rank, ["here"] * 2))


def test_a_slow_sum_is_seen_to_be_slow() -> None:
    (found,) = run_ranks(2, slow_sums)[0]
    # Twice, since small sums may have waited; without the 50 ms it was four times that.
    assert found.bytes_per_s < 2 * 4 * 0.5 * (1 << 20) / 0.05


def test_the_topology_of_the_job_is_what_is_measured() -> None:
    (found,) = run_ranks(2, sums_of, hosts=["here"] * 2, topology="star")[0]
    assert found.bytes_per_s > 1e6


def test_hosts_alike_are_measured_inside_and_between_others_as_one() -> None:
    assert groups_of(["a", "a", "a"]) == [[[0, 1, 2]]]
    assert groups_of(["a", "a", "b", "b"]) == [[[0, 1], [2, 3]], [[0, 2]]]
    assert groups_of(["a", "b"]) == [[[0, 1]]]
    assert groups_of(["a", "a", "b"]) == [[[0, 1, 2]]]


def test_workers_of_two_hosts_learn_both_speeds() -> None:
    near, far = run_ranks(4, sums_of, hosts=["a", "a", "b", "b"])[0]
    assert (near.same_host, far.same_host) == (True, False)
    assert near.workers == far.workers == 2


def overhead_of(rank: int) -> float:
    return measure_overhead(rendezvous_of(rank, ["here"] * 3))


def test_all_ranks_learn_what_a_pipeline_costs_besides_its_layers() -> None:
    found = run_ranks(3, overhead_of)
    assert found[0] == found[1] == found[2]
    assert 1e-5 < found[0] < 0.1
