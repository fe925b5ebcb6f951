"""All-reduce over topologies in real worlds: the same sum as the simplest way, with the same bits on all."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from plait.core.errors import PeerError, PlaitError
from plait.schema.topology import TOPOLOGIES, from_graphs, make_topology
from plait.sync.allreduce.buckets import AllReduce
from plait.sync.allreduce.reducers import Members, Spec, whole_world
from plait.sync.allreduce.topology_reduce import OverTopology
from support.further import but_further
from support.meeting import rendezvous_of, world_store
from support.world import run_ranks

CPU = torch.device("cpu")
# Empty, odd, smaller than the world, and of several pieces.
SIZES = (0, 1, 17, 2049)


def spread_hosts(size: int, hosts: int) -> tuple[str, ...]:
    """Hosts of the ranks: blocks for even counts, taken in turn for odd ones."""
    return tuple("abcd"[rank * hosts // size if hosts % 2 == 0 else rank % hosts] for rank in range(size))


def numbers(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    torch.manual_seed(100 * rank + size)
    return torch.randn(size, dtype=torch.float64).to(dtype)


def plain_sum(ranks: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.stack([numbers(rank, size, dtype).double() for rank in range(ranks)]).sum(0)


def members_of(rank: int, hosts: tuple[str, ...], deadline_s: float = 20.0) -> Members:
    return whole_world(rendezvous_of(rank, hosts, timeout_s=deadline_s))


def sum_all_ways(rank: int, layouts: list[tuple[str, ...]], dtypes: list[torch.dtype]) -> dict[str, Any]:
    """For each layout and topology: how far the mean is off, and a digest of the bits."""
    found = {}
    for hosts in layouts:
        specs = [Spec(size, dtype, CPU) for dtype in dtypes for size in SIZES]
        sums = OverTopology(members_of(rank, hosts), specs, most=2048, least=256)
        for name in TOPOLOGIES:
            sums.switch(make_topology(name, hosts))
            for spec, buffer in zip(specs, sums.buffers):
                buffer.copy_(numbers(rank, spec.count, spec.dtype))
            for wait in [sums.start(index) for index in range(len(specs))]:
                wait()
            off = dict.fromkeys(dtypes, 0.0)
            for spec, buffer in zip(specs, sums.buffers):
                wrong = (buffer.double() - plain_sum(len(hosts), spec.count, spec.dtype)).abs() / len(hosts)
                off[spec.dtype] = max(off[spec.dtype], float(wrong.max()) if spec.count else 0.0)
            bits = hashlib.sha256(b"".join(b.view(torch.uint8).numpy().tobytes() for b in sums.buffers))
            found[f"{name} over {hosts}"] = (off, bits.hexdigest())
        sums.close()
    return found


# Powers of two and others; the larger ones are for further shapes of trees.
@pytest.mark.parametrize("ranks", but_further(range(1, 9), 1, 3, 4, 5, 6, 8))
def test_every_topology_gives_the_same_mean_and_all_ranks_the_same_bits(ranks: int):
    counts = {4: (1, 2, 4), 6: (2,), 7: (3,), 8: (4,)}.get(ranks, (1, 2, 3))
    layouts = [spread_hosts(ranks, hosts) for hosts in counts if hosts <= ranks]
    answers = run_ranks(ranks, sum_all_ways, layouts, [torch.float64])
    for case, (off, bits) in answers[0].items():
        assert off[torch.float64] < 1e-12, case
        assert {answer[case][1] for answer in answers} == {bits}, case


def test_other_types_are_summed_too():
    dtypes = [torch.bfloat16, torch.float32, torch.float16]
    answers = run_ranks(4, sum_all_ways, [("a", "a", "b", "b")], dtypes)
    for case, (off, bits) in answers[0].items():
        for dtype in dtypes:
            # Each of at most three additions rounds; parts of a sum of four are below ten.
            assert off[dtype] < 10 * torch.finfo(dtype).eps, case
        assert {answer[case][1] for answer in answers} == {bits}, case


def sum_in_a_group(rank: int) -> list[float]:
    """Ranks 1 and 3 and 4 of a world of five sum over a graph of their own; the others do not care."""
    ranks = (1, 3, 4)
    group = dist.new_group(list(ranks))
    if rank not in ranks:
        return []
    members = Members(rendezvous_of(rank, ("", "a", "", "a", "b")), ranks, group)
    sums = OverTopology(members, [Spec(5, torch.float32, CPU)])
    sums.switch(from_graphs([{"reduce": [[2, 1], [0, 1]], "broadcast": [[1, 0], [0, 2]]}], 3, "test"))
    sums.buffers[0].fill_(float(rank))
    sums.start(0)()
    sums.close()
    return sums.buffers[0].tolist()


def test_a_group_of_workers_sums_over_a_graph_that_the_user_gave():
    assert run_ranks(5, sum_in_a_group) == [[], [8.0] * 5, [], [8.0] * 5, [8.0] * 5]


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3)
        )
        self.unused = nn.Parameter(torch.ones(3))
        self.empty = nn.Parameter(torch.ones(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) + self.empty.sum()


def train_switching(rank: int, hosts: tuple[str, ...], order: list[str | None]) -> list[list[float]]:
    """One step over each topology of `order`; the weights' sum and square sum after each, and the notes'."""
    model = Layers().double()
    sync = AllReduce(list(model.parameters()), members=members_of(rank, hosts))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    reported = []
    for step, name in enumerate(order):
        if step == 0 or name != order[step - 1]:
            sync.switch(make_topology(name, hosts) if name else None)
        torch.manual_seed(step)
        x, y = torch.randn(12, 6).double(), torch.randn(12, 3).double()
        share = slice(rank * 12 // len(hosts), (rank + 1) * 12 // len(hosts))
        sync.begin()
        sync.before_backward(last=True)
        loss = ((model(x[share]) - y[share]) ** 2).sum() / 36
        loss.backward()
        (summed,) = sync.sum_gradients(loss.detach()[None]).tolist()
        assert model.unused.grad is None
        optimizer.step()
        flat = torch.cat([p.detach().flatten() for p in model.parameters()])
        reported.append([summed, float(flat.sum()), float(flat.square().sum())])
    sync.close()
    return reported


def test_a_running_job_switches_between_any_two_steps_and_loses_none():
    order = [None, "ring", "ring", "clique", None, "star:2", "multi-star", "binary-tree", None, "ring"]
    alone = run_ranks(1, train_switching, ("a",), [None] * len(order))[0]
    for reported in run_ranks(3, train_switching, ("a", "b", "a"), order):
        for found, expected in zip(reported, alone, strict=True):
            assert found == pytest.approx(expected, rel=1e-12)


def switch_apart(rank: int) -> str:
    sums = OverTopology(members_of(rank, ("a", "a")), [Spec(5, torch.float32, CPU)])
    try:
        sums.switch(make_topology(("star", "ring")[rank], ("a", "a")))
    except PlaitError as failure:
        return str(failure)
    return ""


def test_workers_that_switch_to_different_topologies_are_refused():
    for words in run_ranks(2, switch_apart):
        assert "the workers were asked for star, ring" in words


def transfer_beside_other_work(rank: int) -> bool:
    """The sum is there although this thread never gave the engine a moment of its own."""
    sums = OverTopology(members_of(rank, ("a", "b")), [Spec(100_000, torch.float32, CPU)])
    sums.switch(make_topology("ring", ("a", "b")))
    sums.buffers[0].fill_(1.0)
    wait = sums.start(0)
    end = time.monotonic() + 20
    while float(sums.buffers[0].sum()) != 200_000 and time.monotonic() < end:
        torch.randn(100, 100) @ torch.randn(100, 100)
    arrived = float(sums.buffers[0].sum()) == 200_000
    wait()
    sums.close()
    return arrived


def test_sums_travel_while_the_worker_computes():
    assert run_ranks(2, transfer_beside_other_work) == [True, True]


def lose_a_peer(rank: int, hosts: tuple[str, ...], how: str) -> Any:
    # Who waits for one that has died needs no deadline to notice: this one is longer than the world's.
    deadline_s = 1.0 if how == "hangs" else 60.0
    sums = OverTopology(members_of(rank, hosts, deadline_s=deadline_s), [Spec(5, torch.float32, CPU)])
    sums.switch(make_topology("star", hosts))
    if rank == 1 and how == "dies":
        os._exit(9)
    if rank == 1:
        threading.Event().wait(30)
    try:
        sums.start(0)()
        return None
    except PeerError as failure:
        # Worker 2 also loses worker 1; if it ended before worker 0 looked, it would be gone as well.
        if rank == 0:
            world_store().set("worker 0 knows", "")
        else:
            world_store().wait(["worker 0 knows"], timedelta(seconds=20))
        return str(failure)


@pytest.mark.parametrize(
    ("hosts", "how", "words"),
    [
        (("a", "a", "a"), "dies", "worker 1 is gone"),
        (("a", "b", "a"), "dies", "worker 1"),
        (("a", "a", "a"), "hangs", "waited 1 s for worker 1"),
        (("a", "b", "a"), "hangs", "worker 1"),
    ],
)
def test_a_peer_that_dies_or_hangs_is_named_in_time(hosts: tuple[str, ...], how: str, words: str):
    reported = run_ranks(3, lose_a_peer, hosts, how, may_die=(1, 2), deadline_s=25)[0]
    assert words in reported
