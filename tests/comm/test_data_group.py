"""Sums over a communicator that waits for lost peers for ever, as NCCL's does, without a GPU."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

from plait.api import world as worlds
from plait.comm import data_group
from plait.comm.data_group import DataGroup, find_data_group
from plait.comm.handshake import Address
from plait.comm.rendezvous import Rendezvous
from plait.comm.store import StoreClient, StoreServer
from plait.core.errors import LostPeer, PeerError
from support.elastic import ScriptedAgent, elastic_worker, membership
from support.elastic_loop import Loop, run_alone
from support.fake_nccl import FakeBackend, using_fake
from support.meeting import SECRET, world_store
from support.world import run_ranks

CPU = torch.device("cpu")


def nothing_is_lost() -> None: ...


def lose_one(rank: int, address: str) -> dict[str, Any]:
    """The loop of worker `rank` of 3; worker 1 dies in a backward pass, whose sums others have begun."""
    dist.destroy_process_group()
    agent = ScriptedAgent(rank, membership(2, (0, 2), lost=(1,)), store=address)
    worlds.set_launched(elastic_worker(rank, [(0, (0, 1, 2))], address, agent))
    store = StoreClient(Address(address), SECRET, rank)
    with using_fake(rank):
        loop = Loop(topology="native")

        def die(gradient: torch.Tensor) -> None:
            if loop.elastic.step == 5 and not loop.elastic.changes:
                store.set(f"begun/{rank}", "")
                if rank == 1:
                    store.wait(["begun/0", "begun/2"], 30.0)
                    store.set("test/lost", "")  # the agents learn of it, and no peer does by itself
                    os.kill(os.getpid(), signal.SIGKILL)

        # The last gradient of a backward pass.
        next(loop.model.parameters()).register_hook(die)
        for batch in loop.batches():
            loop.step(*batch)
        loop.elastic.finish()
        worlds.init().close()
    made = [(each.size, each.aborted_by) for each in FakeBackend.made]
    return {**loop.result(), "made": made}


def test_a_loss_aborts_the_communicator_and_the_others_make_another_for_the_same_step():
    (alone,) = run_ranks(1, run_alone)
    server = StoreServer(SECRET)
    try:
        first, _, other = run_ranks(3, lose_one, server.address.text, may_die=(1,))
    finally:
        server.close()
    for found in (first, other):
        for one, two in zip(alone["weights"], found["weights"], strict=True):
            assert (torch.tensor(one) - torch.tensor(two)).abs().max() < 1e-10
        assert (found["steps"], found["rate"]) == (alone["steps"], alone["rate"])
        assert found["changes"] == [(5, (0, 2), (), (), (1,))]
        # None is left, and no thread that trains has waited for its end.
        assert found["made"] == [(3, "plait-abort"), (2, "plait-abort")]


class Stuck:
    """A communicator whose sums, and whose end, never come; with `error`, NCCL reports one at once."""

    def __init__(self, error: int | None = None) -> None:
        self.was_asked_to_end, self.ends = threading.Event(), threading.Event()
        self._result: torch.futures.Future[int] = torch.futures.Future()
        self._completed = error is not None
        if error is not None:
            self._result.set_result(error)

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> Stuck:
        return self

    def is_completed(self) -> bool:
        return self._completed

    def get_future_result(self) -> torch.futures.Future[int]:
        return self._result

    def abort(self) -> None:
        self.was_asked_to_end.set()
        self.ends.wait(30.0)


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [(None, LostPeer.SILENT, "no result within 0.05 s"), (2, LostPeer.GONE, "NCCL error")],
)
def test_a_sum_ends_at_its_deadline_or_by_an_error_whatever_the_communicator_does(
    error: int | None, kind: LostPeer, words: str
):
    meeting = Rendezvous(dist.HashStore(), b"", 0, ("here", "there"), timeout_s=0.05, check=nothing_is_lost)
    group, backend = DataGroup(meeting, (0, 1)), Stuck(error)
    group._backend = backend
    sum_ = group.all_reduce(torch.ones(1))
    with pytest.raises(PeerError, match=words) as failure:
        sum_()
    assert failure.value.kind is kind
    assert backend.was_asked_to_end.wait(10.0)
    with pytest.raises(PeerError, match="they were ended"):
        group.all_reduce(torch.ones(1))
    backend.ends.set()


class Refusing(FakeBackend):
    """A communicator that one of the members cannot make."""

    def eager_connect_single_device(self, device: torch.device) -> None:
        if self.rank == 1:
            raise RuntimeError("no network")
        super().eager_connect_single_device(device)
        threading.Event().wait(60.0)


def choose(rank: int, case: str) -> tuple[bool, int]:
    """Whether there is a communicator, and how many were made and not aborted."""
    meeting = Rendezvous(world_store(), SECRET, rank, ("here",) * 2, timeout_s=3.0, check=nothing_is_lost)
    with using_fake(0 if case == "one GPU" else rank):
        if case == "one without":
            data_group.gpu_of = lambda device: "" if rank else "GPU 0"
        if case == "refused":
            data_group.make_backend = Refusing
        first = find_data_group(meeting, (0, 1), CPU)
        assert find_data_group(meeting, (0, 1), CPU) is first
        if first is not None:
            x = torch.full((3,), 1.0 + rank)
            first.all_reduce(x)()
            assert x.tolist() == [3.0] * 3
        return first is not None, sum(each.aborted_by is None for each in FakeBackend.made)


@pytest.mark.parametrize(
    ("case", "expected"),
    [("one each", (True, 1)), ("one GPU", (False, 0)), ("one without", (False, 0)), ("refused", (False, 0))],
)
def test_members_sum_by_nccl_where_each_has_a_gpu_to_itself_and_all_can_connect(
    case: str, expected: tuple[bool, int]
):
    assert run_ranks(2, choose, case) == [expected, expected]
