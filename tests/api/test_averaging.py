"""`plait.Averaging`: a plain loop whose workers average computes what a simulation in one process does."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import plait
from plait.api.world import World
from plait.core.errors import InputError, PeerError
from plait.data.sampler import Position, batches, share
from plait.schema.settings import OptimizerSettings, TrainSettings
from plait.sync.averaging.group_graph import pairs
from plait.training import components
from support.averaging import job_store
from support.syncs import settings_of
from support.training import PlainWorker, train_with
from support.world import run_ranks

WORKERS, STEPS = 3, 7
# Weights, buffers and momentum as numpy arrays, which processes can send to each other.
State = dict[str, Any]


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1)).double()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def loss_of(model: nn.Module, worker: int, step: int) -> Tensor:
    torch.manual_seed(1000 * worker + step)
    x = torch.randn(5, 4, dtype=torch.float64)
    return (model(x) - x.sum(1, keepdim=True).sin()).square().mean()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, worker: int, number: int) -> None:
    optimizer.zero_grad()
    loss_of(model, worker, number).backward()
    optimizer.step()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    kept = {f"momentum {i}": optimizer.state[p]["momentum_buffer"] for i, p in enumerate(model.parameters())}
    return {name: t.detach().clone().numpy() for name, t in (model.state_dict() | kept).items()}


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "local-sgd": ("local-sgd", {"every": 3}),
    "local-sgd at each step": ("local-sgd", {"every": 1}),
    "diloco": ("diloco", {"every": 3, "outer_lr": 0.6, "outer_momentum": 0.8}),
    "sma": ("sma", {"alpha": 0.3}),
    "pair-sync": ("pair-sync", {}),
    "partial-reduce": ("partial-reduce", {"minimum": WORKERS, "patience": 1e6}),
    "gradients": ("partial-reduce", {"minimum": WORKERS, "patience": 1e6, "average": "gradients"}),
}


def loop(rank: int, sync: str, options: dict[str, Any], steps: int = STEPS) -> State:
    """Each worker starts from another model; that of rank 0 counts."""
    model = net(seed=rank)
    optimizer = sgd(model)
    with plait.Averaging(model, optimizer, sync, seed=5, **options):
        for number in range(steps):
            step(model, optimizer, rank, number)
    return state_of(model, optimizer)


def loops(rank: int) -> dict[str, State]:
    return {name: loop(rank, *case) for name, case in CASES.items()} | {"all-reduce": by_all_reduce(rank)}


def by_all_reduce(rank: int) -> State:
    plain = net(seed=rank)
    model, optimizer = plait.DataParallel(plain), sgd(plain)
    for number in range(STEPS):
        step(model, optimizer, rank, number)
    model.close()
    return state_of(plain, optimizer)


def floats(models: list[nn.Module]) -> Iterator[list[Tensor]]:
    """Each weight and each running statistic of all models."""
    for tensors in zip(*({**model.state_dict()}.values() for model in models)):
        if tensors[0].is_floating_point():
            yield list(tensors)


def lerp_to_mean(models: list[nn.Module], alpha: float = 1.0) -> None:
    for tensors in floats(models):
        mean = torch.stack(tensors).mean(0)
        for tensor in tensors:
            tensor.lerp_(mean, alpha)


def simulate(average: Callable[[list[nn.Module], int], None]) -> State:
    """The workers one after the other; `average` follows each step, and the mean of all the last."""
    models = [net() for _ in range(WORKERS)]
    optimizers = [sgd(model) for model in models]
    for number in range(STEPS):
        for worker, (model, optimizer) in enumerate(zip(models, optimizers)):
            step(model, optimizer, worker, number)
        average(models, number + 1)
    average(models, 0)
    lerp_to_mean(models)
    states = [state_of(model, optimizer) for model, optimizer in zip(models, optimizers)]
    return {name: np.mean([state[name] for state in states], axis=0) for name in states[0]}


def local_sgd(every: int) -> Callable[[list[nn.Module], int], None]:
    return lambda models, done: lerp_to_mean(models) if done % every == 0 else None


def sma(models: list[nn.Module], done: int) -> None:
    lerp_to_mean(models, 0.3 if done else 1.0)


def pair_sync(models: list[nn.Module], done: int) -> None:
    matching = pairs(5, done - 1, range(WORKERS)) if done else {}
    for a, b in matching.items():
        if a < b:
            lerp_to_mean([models[a], models[b]])


def diloco() -> Callable[[list[nn.Module], int], None]:
    """The outer step is torch's own SGD; the last three steps and the one after them are two periods."""
    outer = net()
    optimizer = torch.optim.SGD(outer.parameters(), lr=0.6, momentum=0.8, nesterov=True)

    def average(models: list[nn.Module], done: int) -> None:
        if done % 3:
            return
        lerp_to_mean(models)
        for anchor, mean in zip(outer.parameters(), models[0].parameters()):
            anchor.grad = anchor.detach() - mean.detach()
        optimizer.step()
        for model in models:
            for weight, anchor in zip(model.parameters(), outer.parameters()):
                weight.data.copy_(anchor.data)

    return average


def difference(state: State, expected: State) -> float:
    assert state.keys() == expected.keys()
    return max(float(np.abs(state[name] - expected[name]).max()) for name in state)


def test_a_loop_ends_on_all_workers_with_what_a_simulation_of_its_sync_gives():
    at_each_step = simulate(local_sgd(1))
    expected = {
        "local-sgd": simulate(local_sgd(3)),
        "diloco": simulate(diloco()),
        "sma": simulate(sma),
        "pair-sync": simulate(pair_sync),
        **dict.fromkeys(["local-sgd at each step", "partial-reduce", "gradients"], at_each_step),
    }
    first, *others = run_ranks(WORKERS, loops)
    for name in CASES:
        for other in others:
            assert difference(other[name], first[name]) == 0.0, name
        assert difference(first[name], expected[name]) < 1e-12, name
    # Buffers of DataParallel are those of rank 0.
    weights = [name for name in first["all-reduce"] if "running" not in name and "tracked" not in name]
    for name in weights:
        assert np.abs(first["all-reduce"][name] - first["local-sgd at each step"][name]).max() < 1e-12


def job_and_loop(rank: int, address: str, jobs: dict[str, TrainSettings], folder: Path) -> dict[str, float]:
    """How far the weights and statistics of a job's run are from those of a loop over the same batches."""
    apart = {}
    for name, settings in jobs.items():
        worker = PlainWorker(address=address)
        _, trained = train_with(worker, settings, folder / name)
        parts = components.build(settings, torch.device("cpu"))
        model, optimizer, data, size = parts.model, parts.optimizer, parts.train_set, settings.data.batch_size
        order = batches(Position(), len(data), size, seed=settings.seed, shuffle=True, keep_last=True)
        sync, seed = settings.sync, settings.seed
        with plait.Averaging(model, optimizer, sync.kind, seed=seed, **sync.options):
            for batch, _ in zip(order, range(settings.steps)):
                x, y = data.batch(batch.epoch, share(batch.samples, rank, WORKERS), seed)
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x.double()), y).backward()
                optimizer.step()
        expected = trained.model.state_dict()
        apart[name] = max(float((t - expected[key]).abs().max()) for key, t in model.state_dict().items())
    return apart


def test_a_loop_computes_what_a_job_with_the_same_batches_does(tmp_path: Path):
    momentum = OptimizerSettings("sgd", {"lr": 0.05, "momentum": 0.9})
    syncs = {
        "local-sgd": {"every": 3, "outer": "nesterov"},
        "sma": {"alpha": 0.3},
        "pair-sync": {},
    }
    jobs = {
        sync: settings_of(sync, options, steps=7, precision="float64", optimizer=momentum)
        for sync, options in syncs.items()
    }
    with job_store() as address:
        for apart in run_ranks(WORKERS, job_and_loop, address, jobs, tmp_path):
            assert apart == pytest.approx(dict.fromkeys(syncs, 0.0), abs=1e-12)


def add_up(rank: int, sync: str, options: dict[str, Any]) -> list[float]:
    """Updates that do not depend on the weights: step s of worker r subtracts 10^r (s + 1)."""
    model = nn.Linear(2, 1, bias=False).double()
    nn.init.constant_(model.weight, 3.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with plait.Averaging(model, optimizer, sync, **options):
        for number in range(STEPS):
            model.weight.grad = torch.full_like(model.weight, 10.0**rank * (number + 1))
            optimizer.step()
    return model.weight.flatten().tolist()


def test_a_parameter_server_adds_up_the_mean_of_all_changes_at_whatever_staleness():
    changes = sum(range(1, STEPS + 1)) * (1 + 10 + 100) / WORKERS
    options = {"servers": 2, "staleness": 2, "wave": 3}
    for weights in run_ranks(WORKERS, add_up, "hetpipe", options):
        assert weights == pytest.approx([3.0 - changes] * 2, abs=1e-10)


UNLIKE: dict[str, tuple[str, dict[str, Any]]] = {
    **{sync: (sync, {}) for sync in ("ad-psgd", "pair-averaging", "pair-sync", "sma", "hetpipe")},
    "hetpipe with servers that train": ("hetpipe", {"servers": 3, "staleness": 0}),
    "diloco": ("diloco", {"every": 3}),
    "partial-reduce": ("partial-reduce", {"patience": 1e6}),
}


def leave_one_after_the_other(rank: int) -> dict[str, tuple[State, float]]:
    """Worker 0 takes two steps, the others twenty and more; how large their groups were on average."""
    ended = {}
    for name, (sync, options) in UNLIKE.items():
        model = net(seed=rank)
        optimizer = sgd(model)
        with plait.Averaging(model, optimizer, sync, **options) as averaging:
            for number in range((2, 20, 21)[rank]):
                step(model, optimizer, rank, number)
            stats = averaging.stats
        ended[name] = state_of(model, optimizer), stats.members / max(1, stats.groups)
    return ended


def test_workers_that_take_more_steps_than_others_go_on_averaging_and_all_end_with_the_same():
    first, *others = run_ranks(3, leave_one_after_the_other)
    for name in UNLIKE:
        for other in others:
            assert difference(other[name][0], first[name][0]) == 0.0, name
    # The two that are left still wait for each other: alone are steps of one that the other has not got.
    assert min(worker["partial-reduce"][1] for worker in others) > 1.5


def loops_that_average_nothing(rank: int) -> list[str]:
    """What is warned of: a loop without its block, and one whose optimizer is another."""
    model = net()
    optimizer, other = sgd(model), sgd(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        averaging = plait.Averaging(model, optimizer, "local-sgd")
        step(model, optimizer, rank, 0)
        with averaging:
            step(model, other, rank, 1)
    return [str(each.message) for each in caught if "Averaging" in str(each.message)]


def test_a_loop_that_averages_nothing_is_warned_of():
    for outside, unused in run_ranks(2, loops_that_average_nothing):
        assert "optimizer.step was called outside of its block" in outside
        assert "took no step in the block" in unused


def one_step(rank: int, ends: str, world: World) -> None:
    """Worker 1 raises in the block, or takes no further step until worker 0 has given up."""
    model = net()
    optimizer = sgd(model)
    with plait.Averaging(model, optimizer, "ad-psgd"):
        step(model, optimizer, rank, 0)
        if ends == "hangs" and rank == 0:
            world.rendezvous.timeout_s = 0.5
        elif ends == "hangs":
            world.rendezvous.store.wait(["given up"])
        if rank == 1:
            raise ZeroDivisionError("of worker 1")


def message_of(rank: int, ends: str) -> str:
    world = plait.init()
    with pytest.raises((PeerError, ZeroDivisionError)) as raised:
        one_step(rank, ends, world)
    world.rendezvous.store.set("given up", "")
    return str(raised.value)


@pytest.mark.parametrize(
    ("ends", "message"),
    [("fails", "worker 1 left the block with an error"), ("hangs", "worker 1 took no step for 0.5 s")],
)
def test_an_error_or_a_hang_of_one_worker_is_named_by_those_that_wait_for_it(ends: str, message: str):
    waiting, other = run_ranks(2, message_of, ends)
    assert message in waiting
    assert other == "of worker 1"


def synchronize_and_go_on(rank: int, sync: str) -> tuple[State, State]:
    model = net(seed=rank)
    optimizer = sgd(model)
    with plait.Averaging(model, optimizer, sync) as averaging:
        for number in range(4):
            step(model, optimizer, rank, number)
        averaging.synchronize()
        middle = state_of(model, optimizer)
        step(model, optimizer, rank, 4)
    return middle, state_of(model, optimizer)


@pytest.mark.parametrize("sync", ["ad-psgd", pytest.param("local-sgd", marks=pytest.mark.extended)])
def test_workers_can_synchronize_in_the_middle_of_the_loop(sync: str):
    first, second = run_ranks(2, synchronize_and_go_on, sync)
    assert difference(first[0], second[0]) == difference(first[1], second[1]) == 0.0
    assert difference(first[0], first[1]) > 0


def test_one_process_is_a_plain_loop(alone: World):
    expected = net()
    optimizer = sgd(expected)
    for number in range(STEPS):
        step(expected, optimizer, 0, number)
    assert difference(loop(0, "partial-reduce", {}), state_of(expected, optimizer)) == 0.0


@pytest.fixture
def alone() -> Iterator[World]:
    """A world of this process."""
    with plait.init() as world:
        yield world


def of_another(model: nn.Module) -> torch.optim.Optimizer:
    return sgd(net())


@pytest.mark.parametrize(
    ("make", "optimizer", "sync", "options", "message"),
    [
        (
            net,
            sgd,
            "partial-reduse",
            {},
            "^Averaging: sync: found 'partial-reduse'; did you mean",
        ),
        (net, sgd, "all-reduce", {}, "use plait.DataParallel"),
        (net, sgd, "local-sgd", {"evry": 2}, "^Averaging: unknown field 'evry'; did you mean 'every'"),
        (net, sgd, "local-sgd", {"every": 0}, "^Averaging: every: found 0"),
        (net, sgd, "partial-reduce", {"minimum": 3}, "minimum: found 3"),
        (net, sgd, "ad-psgd", {"lease_s": 3.0}, "send no heartbeats"),
        (net, sgd, "hetpipe", {"dedicated": True}, "takes no steps"),
        (net, lambda model: model, "sma", {}, "found a Sequential where a torch Optimizer was expected"),
        (lambda: net().requires_grad_(False), sgd, "sma", {}, "no parameter of the model requires"),
        (net, of_another, "local-sgd", {}, "not one of the model's"),
        (lambda: plait.DataParallel(net()), sgd, "local-sgd", {}, "found a DataParallel"),
    ],
)
def test_wrong_arguments_are_refused_in_words(
    make: Callable[[], nn.Module],
    optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    sync: str,
    options: dict[str, Any],
    message: str,
    alone: World,
):
    model = make()
    with pytest.raises(InputError, match=message):
        plait.Averaging(model, optimizer(model), sync, **options)


def unlike_on_workers(rank: int) -> list[str]:
    """Other models and syncs, a closure where gradients are averaged, a parameter that is unfrozen."""
    messages = []
    for model, sync in [(nn.Linear(2, 1 + rank), "sma"), (net(), ("sma", "local-sgd")[rank])]:
        with pytest.raises(InputError) as raised, plait.Averaging(model, sgd(model), sync):
            pass
        messages.append(str(raised.value))
    model = net()
    optimizer = sgd(model)
    averaging = plait.Averaging(model, optimizer, "partial-reduce", average="gradients")
    with pytest.raises(InputError) as raised, averaging:
        optimizer.step(lambda: 0.0)
    messages.append(str(raised.value))
    frozen = next(model.parameters()).requires_grad_(False)
    averaging = plait.Averaging(model, optimizer, "local-sgd", every=2)
    averaging.__enter__()
    frozen.requires_grad_(True)
    with pytest.raises(InputError) as raised:
        optimizer.step()
    return [*messages, str(raised.value)]


def test_workers_that_differ_are_refused_on_all_of_them_with_the_difference():
    model, sync, closure, unfrozen = run_ranks(2, unlike_on_workers)[0]
    assert "weight is torch.float32 [1, 2] True on rank 0 and torch.float32 [2, 2] True on rank 1" in model
    assert "found local-sgd on rank 1 and sma on rank 0" in sync
    assert "average='weights'" in closure
    assert "was added, replaced or unfrozen after the Averaging was made" in unfrozen
