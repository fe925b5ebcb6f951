"""Deferred weight gradients: what is left for later adds up to what autograd gives at once."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from plait.fusion import fuse
from plait.pipeline.cpu.linear import transpose_weights
from plait.pipeline.split_backward import DeferWeights


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(2, 4, 3, padding=1)
        self.first = nn.Linear(4 * 36, 8)
        self.norm = nn.LayerNorm(8)
        self.second = nn.Linear(8, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.second(self.norm(self.first(self.convolution(x).relu().flatten(1))))
        return y


def gradients(precision: str, deferred: bool, trials: int = 0) -> tuple[list[torch.Tensor], int]:
    """Of the input and the parameters after two microbatches, and how many jobs were left for later.

    With `trials`, of as many models that are fused.
    """
    torch.manual_seed(0)
    net: nn.Module = fuse([Net() for _ in range(trials)], verify=False) if trials else Net()
    inputs = torch.randn(2, *[trials][:trials], 5, 2, 6, 6)
    if precision == "float64":
        net, inputs = net.double(), inputs.double()
    leaves = [x.clone().requires_grad_() for x in inputs]
    left = []
    for x in leaves:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            if deferred:
                with DeferWeights() as defer:
                    loss = net(x).square().mean()
            else:
                loss = net(x).square().mean()
        loss.backward()
        left += [defer] if deferred else []
    jobs = sum(len(each.jobs) for each in left)
    with torch.no_grad():
        for each in left:
            each.catch_up()
    found = [leaf.grad for leaf in (*leaves, *net.parameters())]
    assert all(grad is not None for grad in found)
    return [grad for grad in found if grad is not None], jobs


@pytest.mark.parametrize(("precision", "tolerance"), [("float64", 1e-12), ("float32", 1e-6), ("bf16", 2e-2)])
def test_what_is_left_for_later_adds_up_to_what_autograd_gives_at_once(
    precision: str, tolerance: float
) -> None:
    expected, _ = gradients(precision, deferred=False)
    found, jobs = gradients(precision, deferred=True)
    assert jobs == 2 * 3
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max()


def test_so_does_what_dense_layers_of_fused_trials_leave() -> None:
    expected, _ = gradients("float64", deferred=False, trials=3)
    found, jobs = gradients("float64", deferred=True, trials=3)
    assert jobs == 2 * 2
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).abs().max() <= 1e-12 * theirs.abs().max()


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_gradients_come_to_lie_as_turned_weights_do(precision: str) -> None:
    net = Net()
    transpose_weights(net)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"), DeferWeights() as defer:
        loss = net(torch.randn(3, 2, 6, 6)).sum()
    loss.backward()
    with torch.no_grad():
        defer.catch_up()
    for layer in (net.first, net.second):
        assert layer.weight.grad is not None
        assert layer.weight.grad.stride() == layer.weight.stride()


def test_once_all_is_done_the_graph_and_its_jobs_do_not_keep_each_other() -> None:
    net = Net()
    gc.disable()
    try:
        with DeferWeights() as defer:
            loss = net(torch.randn(1, 2, 6, 6)).sum()
        loss.backward()
        with torch.no_grad():
            defer.catch_up()
        seen = weakref.ref(defer)
        del defer, loss
        assert seen() is None
    finally:
        gc.enable()
