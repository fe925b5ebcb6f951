"""Gradient noise scale and variance: what the monitors say is what a direct computation says."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import plait
from plait.adapt.monitors.gradient_noise import GradientAverages, GradientNorms, estimate
from plait.adapt.monitors.moving_average import MovingAverage
from plait.adapt.monitors.squared_norms import squared_norm, trial_squared_norms
from plait.core.errors import InputError
from support.world import WorldError, run_ranks

FEATURES, NOISE = 8, 0.5


class Regression:
    """Linear regression y = x.w + noise with x ~ N(0, 1) and weights at distance d from the true ones.

    The gradient of (x.v - y)²/2 at v = w + d is (x.d - e) x: its mean is d, and the trace of its covariance
    is (n + 1) |d|² + n s², with n features and noise of variance s².
    """

    def __init__(self, distance: float = 0.7) -> None:
        self.model = nn.Linear(FEATURES, 1, bias=False).double()
        self.target = torch.ones(FEATURES, dtype=torch.float64)
        with torch.no_grad():
            self.model.weight.copy_(self.target + distance / math.sqrt(FEATURES))
        self.squared_norm = distance**2
        self.variance = (FEATURES + 1) * distance**2 + FEATURES * NOISE**2

    def loss(self, samples: int) -> torch.Tensor:
        x = torch.randn(samples, FEATURES, dtype=torch.float64)
        y = x @ self.target + NOISE * torch.randn(samples, dtype=torch.float64)
        return (self.model(x).squeeze(1) - y).square().mean() / 2


def test_microbatches_of_one_worker_give_the_noise_scale_known_in_closed_form():
    torch.manual_seed(0)
    world = Regression()
    noise, variance = plait.GradientNoiseScale(world.model, 0.999), plait.GradientVariance(world.model, 0.999)
    for _ in range(400):
        world.model.zero_grad()
        for i, samples in enumerate((8, 16, 16)):
            (world.loss(samples) * samples / 40).backward()
            if i < 2:
                noise.after_microbatch(samples)
                variance.after_microbatch(samples)
        noise.update(40)
        variance.update(40)
    assert noise.squared_norm == pytest.approx(world.squared_norm, rel=0.15)
    assert variance.value == noise.variance == pytest.approx(world.variance, rel=0.1)
    assert noise.value == pytest.approx(world.variance / world.squared_norm, rel=0.2)
    assert noise.note is None


SHARES = (4, 8, 12)


def workers_with_an_all_reduce_of_their_own(rank: int, shares: tuple[int, ...], steps: int) -> list[float]:
    torch.manual_seed(rank)
    world, own, batch = Regression(), shares[rank], sum(shares)
    noise = plait.GradientNoiseScale(world.model)
    for _ in range(steps):
        world.model.zero_grad()
        world.loss(own).backward()
        numbers = noise.before_average(own)
        grad = world.model.weight.grad
        carried = torch.cat([grad.flatten() * own / batch, numbers])
        dist.all_reduce(carried)
        grad.copy_(carried[:-3].view_as(grad))
        noise.update(batch, carried[-3:])
    return [noise.variance, noise.squared_norm, noise.value]


def workers_with(
    wrap: Callable[[nn.Module], nn.Module], rank: int, shares: tuple[int, ...], steps: int
) -> list[float]:
    torch.manual_seed(rank)
    world = Regression()
    world.model = wrap(world.model)
    noise = plait.GradientNoiseScale(world.model)
    for _ in range(steps):
        world.model.zero_grad()
        world.loss(shares[rank]).backward()
        noise.update(sum(shares))
    return [noise.variance, noise.squared_norm, noise.value]


def directly(shares: tuple[int, ...], steps: int) -> list[float]:
    """The same averages from the gradients of all workers, computed here one after the other."""
    averages, batch, gradients = GradientAverages(), sum(shares), []
    for rank, own in enumerate(shares):
        torch.manual_seed(rank)
        world = Regression()
        gradients.append([torch.autograd.grad(world.loss(own), world.model.weight)[0] for _ in range(steps)])
    for parts in zip(*gradients):
        whole = sum(g * own / batch for g, own in zip(parts, shares))
        squares = sum(float(g.square().sum()) * own / batch for g, own in zip(parts, shares))
        averages.update(GradientNorms(squares, 1.0, len(shares), float(whole.square().sum()), batch))
    return [averages.variance, averages.squared_norm, averages.noise_scale]


def all_loops(rank: int, steps: int) -> tuple[list[float], ...]:
    return (
        workers_with_an_all_reduce_of_their_own(rank, SHARES, steps),
        workers_with(DistributedDataParallel, rank, (8, 8, 8), steps),
        workers_with(plait.DataParallel, rank, SHARES, steps),
        workers_with(fully_shard, rank, (8, 8, 8), steps),
    )


def test_workers_that_average_gradients_see_what_all_their_gradients_say():
    found = run_ranks(3, all_loops, 10)
    assert found[0] == found[1] == found[2]
    assert found[0][0] == pytest.approx(directly(SHARES, 10), rel=1e-9)
    assert found[0][1] == pytest.approx(directly((8, 8, 8), 10), rel=1e-9)
    assert found[0][2] == pytest.approx(directly(SHARES, 10), rel=1e-9)
    assert found[0][3] == pytest.approx(directly((8, 8, 8), 10), rel=1e-9)


def test_one_worker_with_data_parallel_has_no_parts_and_no_value():
    with plait.init():
        noise = workers_with(plait.DataParallel, 0, (8,), 2)
    assert noise == [None, None, None]


@given(
    shares=st.lists(st.integers(1, 50), min_size=2, max_size=6),
    measured=st.integers(1, 6),
    variance=st.floats(0.1, 100),
    squared=st.floats(0.01, 100),
)
def test_expected_norms_of_any_parts_give_back_the_moments(shares, measured, variance, squared):
    batch = sum(shares)
    parts = shares[: min(measured, len(shares))]
    weight = sum(parts) / batch
    norms = GradientNorms(
        sum(b / batch * (squared + variance / b) for b in parts),
        weight,
        len(parts),
        squared + variance / batch,
        batch,
    )
    found = estimate(norms)
    assert found is not None
    assert found.variance == pytest.approx(variance, rel=1e-6)
    assert found.squared_norm == pytest.approx(squared, rel=1e-6, abs=1e-6 * variance)


def test_a_gradient_hidden_by_noise_gives_a_lower_bound_and_says_so():
    averages = GradientAverages()
    # Norms whose difference says that |G|² is below zero.
    averages.update(GradientNorms(parts=2.4, weight=1.0, count=2, whole=1.0, samples=10))
    assert averages.squared_norm == pytest.approx(-0.4)
    assert averages.noise_scale == pytest.approx(averages.variance / 0.01)
    assert "at least" in averages.note
    assert "-0.4" in averages.note


def test_gradients_without_noise_have_a_noise_scale_of_zero_and_say_so():
    averages = GradientAverages()
    averages.update(GradientNorms(parts=0.9, weight=1.0, count=2, whole=1.0, samples=10))
    assert averages.noise_scale == 0.0
    assert "no noise" in averages.note


def test_an_overflown_step_and_a_step_without_parts_are_left_out():
    averages = GradientAverages()
    averages.update(GradientNorms(math.inf, 1.0, 2, 1.0, 10))
    averages.update(GradientNorms(1.0, 1.0, 1, 1.0, 10))
    assert (averages.steps, averages.noise_scale, averages.note) == (0, None, None)


def test_a_moving_average_is_right_from_the_first_value_on():
    average = MovingAverage(0.9)
    assert average.value is None
    for value in (5.0, math.nan, 5.0):
        average.update(value)
    assert average.value == pytest.approx(5.0)
    other = MovingAverage(0.9)
    other.load(average.state())
    other.update(1.0)
    average.update(1.0)
    assert other.value == average.value != 5.0


def test_a_step_whose_parts_nobody_saw_is_answered_with_what_to_call():
    model = nn.Linear(2, 1)
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(InputError, match="after_microbatch"):
        plait.GradientNoiseScale(model).update(4)


def test_squared_norms_are_those_of_the_elements_also_by_trial():
    tensors = [torch.randn(3, 4, 5), torch.randn(3, 2).half(), torch.randn(3)]
    whole = sum(tensor.double().square().sum() for tensor in tensors)
    assert float(squared_norm(tensors)) == pytest.approx(float(whole), rel=1e-5)
    by_trial = trial_squared_norms(tensors, 3)
    for trial in range(3):
        expected = sum(tensor[trial].double().square().sum() for tensor in tensors)
        assert float(by_trial[trial]) == pytest.approx(float(expected), rel=1e-5)
    assert float(squared_norm([])) == 0.0


def sharded_over_two_dimensions(rank: int) -> list[float]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    return workers_with(partial(fully_shard, mesh=mesh), rank, (8,) * 4, 1)


def test_of_models_in_shards_only_those_over_one_mesh_of_one_dimension_are_measured():
    assert run_ranks(1, partial(workers_with, fully_shard), (8,), 2) == [[None, None, None]]
    with pytest.raises(WorldError, match="needs fully_shard over one mesh of one dimension, found"):
        run_ranks(4, sharded_over_two_dimensions)
