"""Weight versions: the optimizer's writes go to the next buffer, exactly and for any optimizer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from plait.pipeline.updates.weight_stash import WeightVersions
from plait.workloads.lion import Lion


class WritesData(torch.optim.Optimizer):
    """SGD that writes `p.data`, as many optimizers from outside torch do."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.write(p, p.grad, group["lr"])

    def write(self, p: Any, grad: torch.Tensor, lr: float) -> None:
        data = p.data
        data.mul_(0.99)
        data.add_(grad.data, alpha=-lr * float(data.norm()))


class WritesDetached(WritesData):
    def write(self, p: Any, grad: torch.Tensor, lr: float) -> None:
        torch._foreach_add_([p.detach().view(-1)], [grad.reshape(-1)], alpha=-lr)


class ReplacesData(WritesData):
    def write(self, p: Any, grad: torch.Tensor, lr: float) -> None:
        p.data = p.data - lr * grad


OPTIMIZERS: dict[str, Any] = {
    "writes p.data": WritesData,
    "writes a view of p.detach()": WritesDetached,
    "replaces p.data": ReplacesData,
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-2),
    "foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=1e-2),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adamax": lambda p: torch.optim.Adamax(p),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "lion": lambda p: Lion(p, lr=0.01),
    "rprop": lambda p: torch.optim.Rprop(p),
    "maximize": lambda p: torch.optim.SGD(p, lr=0.1, maximize=True),
}


class Net(nn.Module):
    """An LSTM, which keeps lists of its weights, a tied pair, and a parameter without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 5)
        self.first = nn.Linear(5, 5)
        self.second = nn.Linear(5, 5)
        self.second.weight = self.first.weight
        self.unused = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(self.lstm(x)[0]).tanh())


def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def batch(number: int) -> torch.Tensor:
    return torch.randn(3, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(number))


def delayed_reference(make: Any, steps: int, delay: int) -> list[torch.Tensor]:
    """Whole copies: step t applies the gradient taken at the weights of `delay` steps before."""
    newest = net()
    optimizer = make(list(newest.parameters()))
    history = [copy.deepcopy(newest)]
    for t in range(steps):
        at = history[max(0, t - delay)]
        at.zero_grad()
        at(batch(t)).square().mean().backward()
        for ours, theirs in zip(newest.parameters(), at.parameters()):
            ours.grad = None if theirs.grad is None else theirs.grad.clone()
        optimizer.step()
        history.append(copy.deepcopy(newest))
    return [p.detach() for p in newest.parameters()]


def delayed_in_ring(make: Any, steps: int, delay: int) -> tuple[list[torch.Tensor], WeightVersions]:
    model = net()
    masters = list(model.parameters())
    optimizer = make(masters)
    versions = WeightVersions(model, masters)
    flying: list[tuple[int, torch.Tensor]] = []
    for t in range(steps + delay):
        if t < steps:
            version = max(0, t - delay)
            versions.use(version)
            flying.append((version, model(batch(t)).square().mean()))
        if t >= delay:
            version, loss = flying.pop(0)
            loss.backward()
            versions.done(version)
            versions.collect()
            versions.update(optimizer.step, needed_from=max(0, t + 1 - delay))
            optimizer.zero_grad()
    versions.restore_masters()
    return [p.detach() for p in model.parameters()], versions


@pytest.mark.parametrize("delay", [0, 2])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_updates_into_the_ring_equal_updates_of_whole_copies(kind: str, delay: int) -> None:
    make = OPTIMIZERS[kind]
    ring, versions = delayed_in_ring(make, 5, delay)
    for ours, theirs in zip(ring, delayed_reference(make, 5, delay)):
        assert torch.equal(ours, theirs)
    assert versions.buffers == delay + 1


def test_the_optimizer_writes_once_and_nothing_is_copied() -> None:
    model = net()
    masters = [p for p in model.parameters() if p is not model.unused]
    optimizer = torch.optim.SGD(masters, lr=0.1, momentum=0.9)
    versions = WeightVersions(model, masters)
    versions.use(0)
    model(batch(0)).sum().backward()
    versions.collect()
    copies: list[str] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            copies.extend([str(func)] if "copy_." in str(func) else [])
            return func(*args, **(kwargs or {}))

    with Watch():
        versions.update(optimizer.step, needed_from=1)
    assert copies == []
    assert all(m.data_ptr() != v.data_ptr() for m, v in zip(masters, versions.leaves(0)))


def test_weights_in_flight_are_not_written_over() -> None:
    model = net()
    masters = list(model.parameters())
    weight = model.first.weight
    versions = WeightVersions(model, masters)
    versions.use(0)
    loss = model(batch(0)).sum()
    other = net()
    expected = torch.autograd.grad(other(batch(0)).sum(), [other.first.weight])
    for _ in range(4):
        for master in masters:
            master.grad = torch.ones_like(master)
        versions.update(torch.optim.SGD(masters, lr=1.0).step, needed_from=versions.newest + 1)
    for master in masters:
        master.grad = None
    loss.backward()
    versions.collect()
    assert torch.equal(expected[0], weight.grad)


def test_gradients_that_lie_on_several_versions_come_together_on_one() -> None:
    model = net()
    masters = list(model.parameters())
    versions = WeightVersions(model, masters)
    losses = []
    for version in range(2):
        versions.use(version)
        losses.append(model(batch(version)).square().mean())
        for master in masters:
            master.grad = torch.ones_like(master)
        versions.update(torch.optim.SGD(masters, lr=0.1).step, needed_from=0)
        for master in masters:
            master.grad = None
    for loss in losses:
        loss.backward()
    first = [None if leaf.grad is None else leaf.grad.clone() for leaf in versions.leaves(0)]
    second = [None if leaf.grad is None else leaf.grad.clone() for leaf in versions.leaves(1)]
    leaves = versions.gather(1)
    assert [leaves[master] for master in masters] == list(versions.leaves(1))
    assert all(leaf.grad is None for leaf in versions.leaves(0))
    for leaf, one, other in zip(versions.leaves(1), first, second):
        assert (leaf.grad is None) == (one is None)
        assert leaf.grad is None or torch.equal(leaf.grad, one + other)


def test_an_rnn_takes_the_weights_of_a_version_for_its_own() -> None:
    """On a GPU it would otherwise move them to other memory, where no update finds them."""
    model = nn.LSTM(4, 5)
    versions = WeightVersions(model, list(model.parameters()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for version in range(3):
        versions.use(version)
        assert not model._weights_have_changed()
        model(torch.randn(3, 2, 4))[0].sum().backward()
        versions.collect()
        versions.update(optimizer.step, needed_from=version)
        versions.done(version)
    versions.restore_masters()
    assert not model._weights_have_changed()


def test_weights_that_lie_in_one_piece_do_so_in_every_version() -> None:
    model = nn.LSTM(4, 5)
    sizes = [p.numel() for p in model.parameters()]
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    for parameter, piece in zip(model.parameters(), flat.split(sizes)):
        parameter.data = piece.view_as(parameter)
    places = [p.storage_offset() for p in model.parameters()]
    masters = list(model.parameters())
    versions = WeightVersions(model, masters)
    optimizer = torch.optim.SGD(masters, lr=0.1)
    for version in range(3):
        versions.use(version)
        model(torch.randn(3, 2, 4))[0].sum().backward()
        versions.collect()
        versions.update(optimizer.step, needed_from=version)
        assert len({p.untyped_storage().data_ptr() for p in masters}) == 1
        assert [p.storage_offset() for p in masters] == places
    assert len({versions.leaves(v)[0].data_ptr() for v in range(4)}) == 4
