"""Observations are equal up to rounding, and nothing beyond rounding passes for it."""

from __future__ import annotations

import random

import numpy
import pytest
import torch
from torch import Tensor, nn

from plait.verification import find_differences, measure_noise, observe_step, perturb, same_random_numbers
from plait.verification.audit import ObservedStep
from plait.verification.compare import Noise


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def look(model: nn.Module, x: Tensor) -> dict[str, Tensor | None]:
    def forward() -> tuple[Tensor, Tensor]:
        out = model(x)
        return out, out.square().sum()

    return observe_step(model, forward)


X = torch.randn(16, 6, generator=torch.Generator().manual_seed(1))


def differences(change) -> list[str]:
    expected = look(make(), X)
    noise = measure_noise(expected, lambda seed: look(make(), perturb(X, seed)))
    other = make()
    with torch.no_grad():
        change(other)
    return [difference.name for difference in find_differences(expected, look(other, X), noise)]


def test_the_same_model_has_no_differences():
    assert differences(lambda model: None) == []


def test_the_same_sum_in_another_order_has_none():
    expected = look(make(), X)
    noise = measure_noise(expected, lambda seed: look(make(), perturb(X, seed)))
    order = torch.randperm(16, generator=torch.Generator().manual_seed(2))
    found = look(make(), X[order])
    found["output"] = found["output"][order.argsort()]  # type: ignore[index]
    assert find_differences(expected, found, noise) == []


def test_a_weight_changed_beyond_rounding_is_seen_from_the_output_on():
    names = differences(lambda model: model[3].weight[0, 0].add_(1e-3))
    assert names[0] == "output"
    assert "the loss" in names


def test_a_momentum_changed_is_seen_in_the_buffers_alone():
    assert differences(lambda model: setattr(model[1], "momentum", 0.2)) == [
        "the buffer 1.running_mean",
        "the buffer 1.running_var",
    ]


def test_a_gradient_that_is_missing_or_too_many_is_seen():
    assert differences(lambda model: model[0].weight.requires_grad_(False)) == ["the gradient of 0.weight"]
    frozen = make()
    frozen[0].weight.requires_grad_(False)
    expected = look(frozen, X)
    found = find_differences(expected, look(make(), X), measure_noise(expected, lambda _: expected))
    assert list(map(str, found)) == ["the gradient of 0.weight: there is one, but the plain model has none"]


def test_shapes_types_and_missing_values_are_differences():
    one = {"a": torch.zeros(2), "b": torch.zeros(2), "c": torch.zeros(1)}
    other = {"a": torch.zeros(3), "b": torch.zeros(2, dtype=torch.float64), "d": torch.zeros(1)}
    noise = measure_noise(one, lambda _: one)
    assert [d.name for d in find_differences(one, other, noise)] == ["a", "b", "c", "d"]


def test_nan_and_infinity_equal_themselves_and_nothing_else():
    value = torch.tensor([1.0, torch.nan, torch.inf])
    noise = measure_noise({"x": value}, lambda _: {"x": value})
    assert find_differences({"x": value}, {"x": value.clone()}, noise) == []
    for index, wrong in ((1, 0.0), (2, -torch.inf), (0, torch.nan)):
        other = value.clone()
        other[index] = wrong
        assert len(find_differences({"x": value}, {"x": other}, noise)) == 1


def test_random_numbers_repeat_within_and_go_on_as_before_afterwards():
    def draw() -> list[float]:
        return [random.random(), float(numpy.random.rand()), float(torch.rand(()))]

    def draws() -> list[list[float]]:
        random.seed(5), numpy.random.seed(5), torch.manual_seed(5)
        return [draw()]

    first = draws()
    with same_random_numbers(3):
        inside = draw()
    first.append(draw())
    assert [*draws(), draw()] == first
    with same_random_numbers(3):
        assert draw() == inside


def test_a_seed_of_63_bits_serves_all_generators():
    drawn = []
    for _ in range(2):
        with same_random_numbers((1 << 63) - 5):
            drawn.append([random.random(), float(numpy.random.rand()), float(torch.rand(()))])
    assert drawn[0] == drawn[1]


def test_gpus_that_nobody_uses_are_not_started_and_keep_the_seed_they_would_begin_with(monkeypatch):
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: pytest.fail("started a GPU"))
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    torch.manual_seed(5)
    seeds.clear()
    with same_random_numbers(3):
        pass
    assert (seeds[-2:], torch.initial_seed()) == ([3, 5], 5)


def test_a_loss_of_float32_may_differ_by_its_rounding_though_it_is_summed_in_float64():
    grad = {"weight": torch.ones(2)}
    one, other = (ObservedStep(torch.tensor(loss, dtype=torch.float64), grad, {}) for loss in (2.0, 2 + 6e-8))
    assert find_differences(one.tensors(), other.tensors(), Noise({})) == []
    wide = {"weight": torch.ones(2, dtype=torch.float64)}
    one, other = (ObservedStep(torch.tensor(loss, dtype=torch.float64), wide, {}) for loss in (2.0, 2 + 6e-8))
    assert [each.name for each in find_differences(one.tensors(), other.tensors(), Noise({}))] == ["the loss"]


def test_a_computation_that_is_coarser_than_its_result_may_be_off_by_its_own_rounding():
    exact = {"the gradient of bias": torch.full((4,), 33.0)}
    rounded = {"the gradient of bias": torch.full((4,), 33.0 * (1 + 2.0**-8))}
    wrong = {"the gradient of bias": torch.full((4,), 33.0 * (1 + 2.0**-5))}
    coarse, fine = (measure_noise(exact, lambda _: exact, rounding) for rounding in (2.0**-8, 0.0))
    assert find_differences(exact, rounded, coarse) == []
    assert [each.name for each in find_differences(exact, wrong, coarse)] == ["the gradient of bias"]
    assert find_differences(exact, rounded, fine) != []


def test_a_counter_that_lags_behind_is_seen_in_a_coarse_computation_too():
    exact, lagging = ({"the buffer steps": torch.tensor(count)} for count in (200.0, 199.0))
    noise = measure_noise(exact, lambda _: exact, rounding=2.0**-8)
    assert [each.name for each in find_differences(exact, lagging, noise)] == ["the buffer steps"]
