"""Process groups hold the job's own workers, and their ports are closed to everyone else."""

from __future__ import annotations

import os
import socket

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from plait.comm import groups
from plait.comm.collectives import all_gather_values, broadcast_named, broadcast_value, gather_named
from plait.comm.rendezvous import Rendezvous
from plait.core.errors import LostPeer, PeerError
from support.meeting import SECRET, rendezvous_of
from support.world import run_ranks


def sums_in_new_groups(rank: int) -> tuple[list[float], list[int], int]:
    """The sums over all and over two of three ranks, how strangers fare at the ports, descriptors gained."""
    rendezvous = rendezvous_of(rank, ["a"] * 3)
    before = groups.listening()
    dist.destroy_process_group()
    groups.join_world("gloo", rendezvous)
    pair = groups.new_group(rendezvous, [0, 2])
    opened = [descriptor for number, descriptor in groups.listening().items() if number not in before]
    found = []
    for group in (None, pair):
        x = torch.tensor([1.0 + rank])
        if group is None or rank != 1:
            dist.all_reduce(x, group=group)
        found.append(x.item())
    descriptors = len(os.listdir("/proc/self/fd"))
    answered = 0
    for descriptor in opened:
        with socket.socket(fileno=os.dup(descriptor)) as listening:
            address = listening.getsockname()
        for _ in range(20):
            with socket.socket() as stranger:
                stranger.settimeout(0.02)
                try:
                    stranger.connect(address)
                    answered += 1
                except TimeoutError:
                    pass
    dist.all_reduce(torch.zeros(1))
    return found, [len(opened), answered], len(os.listdir("/proc/self/fd")) - descriptors


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="sockets are closed to others on Linux only")
def test_groups_work_and_nobody_else_can_connect_to_them():
    for rank, (found, (ports, answered), gained) in enumerate(run_ranks(3, sums_in_new_groups)):
        assert found == [6.0, [4.0, 2.0, 4.0][rank]]
        assert ports >= 1
        assert answered == 0
        assert gained <= 0


def join_with_another_secret(rank: int) -> str:
    rendezvous = rendezvous_of(rank, ["a"] * 3)
    if rank == 1:
        rendezvous.secret = b"another"
    dist.destroy_process_group()
    with pytest.raises(PeerError) as caught:
        groups.join_world("gloo", rendezvous)
    return str(caught.value)


def test_a_group_with_someone_in_it_that_cannot_prove_itself_is_not_used():
    for words in run_ranks(3, join_with_another_secret):
        assert words.startswith("a process group of workers [0, 1, 2] could not be made in 5 attempts")


def exchange_values(rank: int) -> tuple[object, ...]:
    state = {
        f"w{rank}": torch.full((rank, 2), float(rank)),
        "n": torch.tensor(rank),
        "h": torch.ones(1).half(),
    }
    gathered = gather_named(state, 1)
    received = broadcast_named(state if rank == 2 else None, 2)
    return (
        all_gather_values({"rank": rank, "text": "x" * rank}),
        broadcast_value(["from", rank], 2),
        {name: value.tolist() for name, value in gathered.items()},
        {name: (str(value.dtype), value.tolist()) for name, value in received.items()},
    )


def test_plain_values_and_named_tensors_travel_without_being_pickled():
    for rank, (everyone, received, gathered, state) in enumerate(run_ranks(3, exchange_values)):
        assert everyone == [{"rank": r, "text": "x" * r} for r in range(3)]
        assert received == ["from", 2]
        whole = {"w0": [], "w1": [[1.0, 1.0]], "w2": [[2.0, 2.0]] * 2, "n": 2, "h": [1.0]}
        assert gathered == (whole if rank == 1 else {})
        assert state == {
            "w2": ("torch.float32", [[2.0, 2.0]] * 2), "n": ("torch.int64", 2), "h": ("torch.float16", [1.0])
        }  # fmt: skip


def join_after_a_loss(rank: int) -> float:
    store = _get_default_store()
    dist.destroy_process_group()
    looks = iter(range(3))

    def lost() -> None:
        if next(looks, None) is None:
            raise PeerError("worker 1 is lost", LostPeer.GONE, 1)

    if rank == 0:
        alone = Rendezvous(dist.PrefixStore("first", store), SECRET, 0, ["here"] * 2, check=lost)
        with pytest.raises(PeerError, match="worker 1 is lost"):
            groups.join_world("gloo", alone)
    again = Rendezvous(
        dist.PrefixStore("second", store), SECRET, rank, ["here"] * 2, timeout_s=15, check=lambda: None
    )
    world = groups.join_world("gloo", again)
    total = torch.ones(())
    dist.all_reduce(total)
    world.cut()
    with pytest.raises(RuntimeError):
        dist.all_reduce(total)
    return float(total)


def test_a_worker_that_gave_up_joining_joins_others_and_its_waits_can_be_ended():
    assert run_ranks(2, join_after_a_loss, deadline_s=40) == [2.0, 2.0]


def test_a_group_that_cannot_be_made_says_what_went_wrong_last(monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("Unable to find interface for: [127.0.0.1]")

    monkeypatch.setattr(dist, "new_group", fail)
    with pytest.raises(PeerError, match=r"in 5 attempts: .*; the last error here: Unable to find interface"):
        groups.new_group(rendezvous_of(0, ["a"], dist.HashStore()), [0])
