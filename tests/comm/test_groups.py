"""Process groups hold the job's own workers, and their ports are closed to everyone else."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from plait.comm import groups
from plait.comm.collectives import all_gather_values, broadcast_named, broadcast_value, gather_named
from plait.comm.ports import close_ports, listening
from plait.comm.rendezvous import Rendezvous
from plait.core.errors import LostPeer, PeerError
from support.meeting import SECRET, rendezvous_of, world_store
from support.world import run_ranks


def sums_in_new_groups(rank: int) -> dict[str, object]:
    """The sums over all and over two of three ranks, and how strangers fare at the ports that were opened."""
    rendezvous = rendezvous_of(rank, ["a"] * 3)
    before, ports = ports_of_process(), set[int]()
    dist.destroy_process_group()

    def note(known: Collection[int]) -> None:
        ports.update(ports_of_process())
        close_ports(known)

    with mock.patch.object(groups, "close_ports", note):
        groups.join_world("gloo", rendezvous)
        pair = groups.new_group(rendezvous, [0, 2])
    ports -= before
    found = []
    for group in (None, pair):
        x = torch.tensor([1.0 + rank])
        if group is None or rank != 1:
            dist.all_reduce(x, group=group)
        found.append(x.item())
    descriptors = len(os.listdir("/proc/self/fd"))
    answered = 0
    for port in ports:
        for _ in range(20):
            with socket.socket() as stranger:
                stranger.settimeout(0.02)
                answered += stranger.connect_ex(("127.0.0.1", port)) == 0
    dist.all_reduce(torch.zeros(1))
    gained = len(os.listdir("/proc/self/fd")) - descriptors
    dist.destroy_process_group()
    return {"sums": found, "ports": len(ports), "answered": answered, "gained": gained}


def ports_of_process() -> set[int]:
    """The TCP ports at which this process listens."""
    found = set()
    for descriptor in listening().values():
        with socket.socket(fileno=os.dup(descriptor)) as copy:
            found.add(copy.getsockname()[1])
    return found


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="ports are closed on Linux only")
def test_groups_work_and_nobody_else_can_connect_to_them():
    for rank, found in enumerate(run_ranks(3, sums_in_new_groups)):
        assert found["sums"] == [6.0, [4.0, 2.0, 4.0][rank]]
        assert found["ports"] >= 1
        assert found["answered"] == 0
        assert found["gained"] <= 0


def join_late(rank: int) -> tuple[list[int], bool]:
    """The ports that the first worker has opened before the other came, and whether its limit is raised."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 256), hard))
    store, opened = world_store(), list[int]()
    dist.destroy_process_group()
    rendezvous = rendezvous_of(rank, ["a"] * 2, store)
    with ThreadPoolExecutor() as pool:
        if rank == 1:
            store.wait(["looked"], timedelta(seconds=20))
        joining = pool.submit(groups.join_world, "gloo", rendezvous)
        if rank == 0:
            store.wait(["plait/group/0,1/1/0/here/0"], timedelta(seconds=20))
            opened += listening()
            store.set("looked", "")
        joining.result(20)
    return opened, resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard


def test_no_port_is_opened_before_all_members_have_come():
    assert run_ranks(2, join_late) == [([], True)] * 2


def test_a_port_that_stays_open_is_said_once(caplog: pytest.LogCaptureFixture):
    """Nobody waits for what comes to this one, as gloo does, so nothing can take its place."""
    before = listening()
    with socket.create_server(("127.0.0.1", 0)):
        for _ in range(2):
            close_ports(before)
    assert caplog.messages == ["1 of this process's ports could not be closed; see docs/faults.md"]


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
    store = world_store()
    dist.destroy_process_group()
    looks = iter(range(3))

    def lost() -> None:
        if next(looks, None) is None:
            raise PeerError("worker 1 is lost", LostPeer.GONE, 1)

    first = dist.PrefixStore("first", store)
    if rank == 1:  # it comes, and is lost before it makes the group
        first.set("plait/group/0,1/1/0/here/1", "")
    if rank == 0:
        alone = Rendezvous(first, SECRET, 0, ["here"] * 2, check=lost)
        with pytest.raises(PeerError, match="worker 1 is lost"):
            groups.join_world("gloo", alone)
    again = Rendezvous(
        dist.PrefixStore("second", store), SECRET, rank, ["here"] * 2, timeout_s=15, check=lambda: None
    )
    groups.join_world("gloo", again)
    total = torch.ones(())
    dist.all_reduce(total)
    groups.cut_connections(again)
    with pytest.raises(RuntimeError):
        dist.all_reduce(total)
    return float(total)


def test_a_worker_that_gave_up_joining_joins_others_and_its_waits_can_be_ended():
    assert run_ranks(2, join_after_a_loss, deadline_s=40) == [2.0, 2.0]


def abandon_a_wait(rank: int) -> float:
    """The sum in a new world, joined while a thread of the old one still waits for the other rank."""
    rendezvous = rendezvous_of(rank, ["a"] * 2)
    store = world_store()
    if rank == 0:
        dist.all_reduce(torch.zeros(1), async_op=True)
        groups.abandon_world()
        store.set("abandoned", "")
    else:
        store.wait(["abandoned"])
        dist.destroy_process_group()
    groups.join_world("gloo", rendezvous)
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()


def test_a_world_is_abandoned_while_a_thread_of_it_waits_for_a_lost_member():
    assert run_ranks(2, abandon_a_wait, deadline_s=20) == [2.0, 2.0]


def test_a_group_that_cannot_be_made_says_what_went_wrong_last(monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("Unable to find interface for: [127.0.0.1]")

    monkeypatch.setattr(dist, "new_group", fail)
    with pytest.raises(PeerError, match=r"in 5 attempts: .*; the last error here: Unable to find interface"):
        groups.new_group(rendezvous_of(0, ["a"], dist.HashStore()), [0])
