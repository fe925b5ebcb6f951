"""`plait.Elastic`: workers come, go and are lost, and the weights stay those of one process."""

from __future__ import annotations

import copy
import os
import signal
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR

import plait
from plait.api import world as worlds
from plait.api.launching import run_launched
from plait.comm.handshake import Address
from plait.comm.rendezvous import Rendezvous
from plait.comm.store import StoreClient, StoreServer
from plait.core.errors import InputError, LostPeer, PeerError
from support.elastic import ScriptedAgent, elastic_worker, membership
from support.elastic_loop import ENDED, LEFT, STEPS, Loop, eventful, run_alone
from support.further import but_further
from support.meeting import SECRET
from support.world import run_ranks


def close_to(expected: dict[str, Any], found: dict[str, Any]) -> bool:
    pairs = zip(expected["weights"], found["weights"], strict=True)
    differences = [(torch.tensor(one) - torch.tensor(other)).abs().max().item() for one, other in pairs]
    return max(differences) < 1e-10


@pytest.mark.usefixtures("forked_commands")
@pytest.mark.parametrize("is_fused", [False, True], ids=["", "fused"])
def test_workers_that_are_killed_join_leave_and_end_change_no_step(is_fused: bool):
    (alone,) = run_ranks(1, run_alone)
    (last,) = plait.launch(eventful, "cpu", is_fused, workers=3, elastic="1:3", timeout_s=150.0)
    assert close_to(alone, last)
    assert last["steps"] == alone["steps"] == (STEPS, STEPS, STEPS)
    assert last["rate"] == alone["rate"]
    # Worker 3 came in the place of worker 1, and has seen what followed.
    assert last["changes"] == [(LEFT, (0, 3), (), (2,), ()), (ENDED, (3,), (), (0,), ())]
    assert all(0 < seconds < 10 for seconds in last["stalls"])


def half_summed(rank: int, address: str, topology: str) -> dict[str, Any] | None:
    """The loop of worker `rank` of 3; worker 1 dies in the last step of an epoch, taken by worker 0 alone.

    A thread that has learnt of the loss in time says so when the others have gone on.
    """
    torch.distributed.destroy_process_group()
    agent = ScriptedAgent(rank, membership(2, (0, 2), lost=(1,)), store=address)
    worlds.set_launched(elastic_worker(rank, [(0, (0, 1, 2))], address, agent))
    store = StoreClient(Address(address), SECRET, rank)
    loop = Loop(topology=topology)
    late_calls = [each() for each in agent.memberships._on_loss]

    def look_at(flags: Any) -> bool:
        if loop.elastic.step == 5 and not loop.elastic.changes:
            if rank == 1:
                store.wait(["0 has it"], 30.0)
                store.set("1 dies", "")
                os.kill(os.getpid(), signal.SIGKILL)
            if rank == 2:
                store.wait(["1 dies"], 30.0)
                loop.elastic.lose(PeerError("worker 1 is lost", LostPeer.GONE, 1))
                return False
            store.set("0 has it", "")
        return kept(flags)

    kept = loop.model.rules.are_gradients_kept
    with mock.patch.object(loop.model.rules, "are_gradients_kept", look_at):
        for batch in loop.batches():
            if loop.elastic.changes and late_calls:
                for call in filter(None, late_calls):
                    call(PeerError("worker 1 is lost", LostPeer.GONE, 1))
                late_calls.clear()
            loop.step(*batch)
    loop.elastic.finish()
    return loop.result()


@pytest.mark.parametrize("topology", but_further(("default", "ring"), "ring"))
def test_a_worker_that_missed_the_last_sum_of_an_epoch_goes_on_from_one_that_has_it(topology: str):
    (alone,) = run_ranks(1, run_alone)
    store = StoreServer(SECRET)
    try:
        first, _, other = run_ranks(3, half_summed, store.address.text, topology, may_die=(1,))
    finally:
        store.close()
    for found in (first, other):
        assert close_to(alone, found)
        assert (found["steps"], found["rate"]) == (alone["steps"], alone["rate"])
    assert first["changes"] == other["changes"] == [(6, (0, 2), (), (), (1,))]


def resumed(rank: int) -> tuple[dict[str, Any], int]:
    """A fixed world of two that goes on from the state of an earlier loop, and numbers of steps."""
    begun = Loop()
    for _, batch in zip(range(8), begun.batches()):
        begun.step(*batch)
    saved = copy.deepcopy(begun.elastic.state_dict())
    loop = Loop()
    loop.elastic.load_state_dict(saved)
    for batch in loop.batches():
        loop.step(*batch)
    loop.elastic.finish()
    return loop.result(), loop.elastic.step


def test_a_fixed_world_trains_as_one_process_and_goes_on_from_a_checkpoint():
    (alone,) = run_ranks(1, run_alone)
    for found, steps in run_ranks(2, resumed):
        assert close_to(alone, found)
        assert steps == STEPS
        assert found["changes"] == []


def test_a_loop_without_loader_takes_its_numbered_steps():
    model = plait.DataParallel(nn.Linear(2, 1), world=worlds.world_of_one("cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    elastic = plait.Elastic(model, optimizer)
    taken = []
    for step in elastic.steps(3):
        model(torch.ones(4, 2)).sum().backward()
        optimizer.step()
        taken.append(step)
    assert taken == [0, 1, 2]
    with pytest.raises(InputError, match=r"without a new batch.*loader=loader.*elastic\.steps"):
        optimizer.step()
    with pytest.raises(InputError, match="workers of this world are fixed"):
        elastic.leave()
    next(elastic.steps(4))
    with pytest.raises(InputError, match="was given a closure"):
        optimizer.step(lambda: 0.0)


def parallel(module: nn.Module) -> plait.DataParallel:
    return plait.DataParallel(module, world=worlds.world_of_one("cpu"))


class Handle:
    """A state that no other process can have."""

    def state_dict(self) -> dict[str, Any]:
        return {"file": object()}

    def load_state_dict(self, state: Any) -> None: ...


def make(case: str) -> None:
    layer = nn.Linear(2, 1)
    sgd = torch.optim.SGD(layer.parameters(), lr=0.1)
    match case:
        case "plain model":
            plait.Elastic(layer, sgd)  # type: ignore[arg-type]
        case "DDP":
            plait.Elastic(DistributedDataParallel.__new__(DistributedDataParallel), sgd)  # type: ignore[arg-type]
        case "scheduler as optimizer":
            plait.Elastic(parallel(layer), StepLR(sgd, 1))  # type: ignore[arg-type]
        case "optimizer of another model":
            plait.Elastic(parallel(nn.Linear(2, 1)), sgd)
        case "number":
            plait.Elastic(parallel(layer), sgd, epoch=3)
        case "torch's loader":
            plait.Elastic(parallel(layer), sgd, loader=torch.utils.data.DataLoader([1, 2]))  # type: ignore[arg-type]
        case "no names":
            plait.Elastic(parallel(layer), sgd, torch.utils.data.DataLoader([1]), StepLR(sgd, 1))  # type: ignore[arg-type]
        case "second optimizer":
            plait.Elastic(parallel(layer), sgd, second=torch.optim.SGD([layer.bias], lr=0.1))
        case "twice":
            model = parallel(layer)
            plait.Elastic(model, sgd)
            plait.Elastic(model, sgd)
        case "unsendable":
            plait.Elastic(parallel(layer), sgd, log=Handle())
        case "other names":
            elastic = plait.Elastic(parallel(layer), sgd, counts={})
            elastic.load_state_dict({**elastic.state_dict(), "state": {"scheduler": {}}})
        case "limits":
            plait.launch(make, workers=2, elastic="3:4")


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("plain model", "found a Linear, expected a plait.DataParallel.*model = plait.DataParallel"),
        ("DDP", "DistributedDataParallel, whose workers are fixed; use plait.DataParallel"),
        ("scheduler as optimizer", "found a StepLR, expected the torch optimizer.*scheduler=scheduler"),
        ("optimizer of another model", r"param_groups\[0\].*\[1, 2\] that is not one of the model's"),
        ("number", "epoch is a int without state_dict; expected a dict that holds it"),
        ("torch's loader", "loader is a DataLoader without state_dict; expected a plait.DataLoader"),
        ("no names", r"found 2 arguments after .*Elastic\(model, optimizer, loader=loader, scheduler=sch"),
        ("second optimizer", "found a second optimizer, second, .*expected one, with param_groups"),
        ("twice", "found a model that has an Elastic already"),
        ("unsendable", "state of 'log' holds a builtins.object, which cannot be sent"),
        ("other names", "found a state with scheduler, expected counts"),
        ("limits", "found '3:4' for 2 workers, expected limits such as '1:2'"),
    ],
)
def test_wrong_input_is_refused_in_words(case: str, words: str):
    with pytest.raises(InputError, match=words):
        make(case)


def unlike(rank: int) -> str:
    """What a worker is told whose registered names are not those of the first."""
    layer = plait.DataParallel(nn.Linear(2, 1))
    sgd = torch.optim.SGD(layer.parameters(), lr=0.1)
    try:
        plait.Elastic(layer, sgd, **{f"state{rank}": {}})
    except InputError as failure:
        return str(failure)
    return ""


def test_workers_that_register_other_names_are_told_so():
    assert run_ranks(2, unlike)[1].startswith("Elastic: found state1 on rank 1, but state0 on rank 0")


def unlike_rates(rank: int) -> str:
    """What a worker is told whose scheduler is not registered, and at another step than that of the other."""
    model = plait.DataParallel(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = StepLR(optimizer, 2 + rank)
    elastic = plait.Elastic(model, optimizer)
    try:
        for _ in elastic.steps(4):
            model(torch.ones(4, 2)).sum().backward()
            optimizer.step()
            scheduler.step()
    except InputError as failure:
        return str(failure)
    return ""


def test_workers_whose_learning_rates_differ_are_told_to_register_the_scheduler():
    first, second = run_ranks(2, unlike_rates)
    assert "learning rate 0.01 on worker 0, but 0.055 in the mean of all workers in step 2" in first
    assert "learning rate 0.1 on worker 1" in second
    assert all("plait.Elastic(..., scheduler=scheduler)" in each for each in (first, second))


def as_of_two(elastic: plait.Elastic) -> plait.Elastic:
    """As if it had another worker that may be lost; sums are its own."""
    elastic._members.can_change, elastic.world.world_size = True, 2
    return elastic


def test_a_frozen_parameter_that_the_loop_changes_in_a_step_is_refused():
    layer, target = nn.Linear(2, 1), nn.Linear(2, 1).requires_grad_(False)
    model = parallel(nn.ModuleDict({"online": layer, "target": target}))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    elastic = as_of_two(plait.Elastic(model, optimizer))
    for _ in elastic.steps(2):
        layer(torch.ones(4, 2)).sum().backward()
        optimizer.step()
    target.load_state_dict(layer.state_dict())  # between two passes over the data, which happens once
    steps = elastic.steps(4)
    next(steps)
    optimizer.step()
    target.weight.lerp_(layer.weight, 0.1)
    with pytest.raises(InputError, match=r"changed target\.weight.*make it a buffer.*AveragedModel"):
        next(steps)


def test_a_worker_that_goes_on_when_others_have_ended_is_warned_once():
    layer = nn.Linear(2, 1)
    elastic = plait.Elastic(parallel(layer), torch.optim.SGD(layer.parameters(), lr=0.1))
    with pytest.warns(UserWarning, match=r"end of their loop since step 0.*while loader\.epoch <"):
        assert not elastic.are_gradients_kept([0.0, 1.0, 1.0, 0.2])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not elastic.are_gradients_kept([0.0, 1.0, 1.0, 0.2])
        # One that leaves is not at its end.
        elastic._has_warned = False
        assert not elastic.are_gradients_kept([0.0, 1.0, 0.0, 0.2])


class CountedJoins:
    """A worker of a launcher, in a world of two that it only counts the joins of."""

    rank, local_rank, world_size, hosts = 0, 0, 2, ("localhost", "localhost")
    rendezvous = Rendezvous(torch.distributed.HashStore(), b"", 0, hosts)
    joins = 0

    def join(self, backend: str) -> None:
        self.joins += 1


def test_a_script_that_has_closed_its_world_does_not_join_it_again_at_its_end(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(worlds, "_launched", None)
    worker = CountedJoins()
    run_launched(worker, lambda: plait.init("cpu").close())  # type: ignore[arg-type]
    assert worker.joins == 1
