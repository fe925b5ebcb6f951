"""Optimizers and learning-rate schedules by name."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import plait
from plait.core.errors import JobError
from plait.planner.schedules.in_flight import Schedule
from plait.schema.settings import GroupSettings, LrScheduleSettings, ModelSettings, OptimizerSettings
from plait.training.optimizers.build import build_optimizer, check_groups, optimizer_kinds
from plait.training.optimizers.lr_schedule import build_lr_factor, check_lr_schedule
from support.plans import unverified_plan
from support.training import (
    largest_difference,
    saved_weights,
    train_each,
    train_here,
    unverified_job,
)
from support.world import run_ranks


def factors(kind: str, total: int, warmup: int = 0, **options: object) -> list[float]:
    factor = build_lr_factor(LrScheduleSettings(kind, warmup, options), total)
    return [factor(step) for step in range(total)]


def test_every_schedule_follows_its_formula():
    assert factors("constant", 3) == [1.0, 1.0, 1.0]
    assert factors("step", 5, every_steps=2, gamma=0.5) == [1.0, 1.0, 0.5, 0.5, 0.25]
    assert factors("polynomial", 4) == pytest.approx([1.0, 0.75, 0.5, 0.25])
    assert factors("polynomial", 4, power=2.0, end_factor=0.1) == pytest.approx(
        [0.1 + 0.9 * (1 - s / 4) ** 2 for s in range(4)]
    )
    assert factors("cosine", 4) == pytest.approx([0.5 * (1 + math.cos(math.pi * s / 4)) for s in range(4)])


def test_warm_up_is_linear_and_the_schedule_covers_what_is_left():
    assert factors("polynomial", 8, warmup=4) == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 0.75, 0.5, 0.25])


def own_factor(step: int, total: int, scale: float) -> float:
    return scale / (step + 1)


def test_a_schedule_of_ones_own_is_called_with_its_options():
    assert factors("test_optim:own_factor", 2, scale=3.0) == [3.0, 1.5]


@pytest.mark.parametrize("kind", ["sgd", "adagrad", "nadam", "lion", "adafactor"])
def test_any_optimizer_of_torch_can_be_named(kind: str):
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = build_optimizer(OptimizerSettings(kind, {"lr": 0.1}), [weight])
    assert type(optimizer) is optimizer_kinds()[kind]


@pytest.mark.parametrize("maximize", [False, True])
def test_lion_is_that_of_the_paper(maximize: bool):
    lr, beta1, beta2, decay = 0.01, 0.8, 0.95, 0.3
    weight = torch.nn.Parameter(torch.randn(4, 3, dtype=torch.float64))
    unused = torch.nn.Parameter(torch.ones(2))
    optimizer = plait.Lion([weight, unused], lr, (beta1, beta2), decay, maximize=maximize)
    expected, momentum = weight.detach().clone(), torch.zeros_like(weight)
    for _ in range(5):
        weight.grad = torch.randn_like(weight)
        gradient = -weight.grad if maximize else weight.grad
        update = torch.sign(beta1 * momentum + (1 - beta1) * gradient)
        expected -= lr * (update + decay * expected)
        momentum = beta2 * momentum + (1 - beta2) * gradient
        optimizer.step()
    torch.testing.assert_close(weight.detach(), expected, rtol=1e-12, atol=1e-12)
    assert unused not in optimizer.state
    with pytest.raises(ValueError, match="beta parameter at index 1: 1.0"):
        plait.Lion([weight], betas=(0.9, 1.0))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (OptimizerSettings("adm"), "optimizer.kind: found 'adm'.*did you mean 'adam'"),
        (OptimizerSettings("sgd", {"lr": True}), "optimizer.lr: found True, expected a number"),
        (OptimizerSettings("adafactor", {"lr": None}), "optimizer.lr: found null, expected a number"),
        (OptimizerSettings("muon"), "muon refused .* only supports 2D .*; freeze what is no matrix"),
        (
            OptimizerSettings("sgd", {"weight_decay": False}),
            "optimizer.weight_decay: found False, expected",
        ),
        (OptimizerSettings("adam", {"betas": [True, 0.9]}), "optimizer.betas: found True, expected a number"),
        (
            OptimizerSettings("builtins:max"),
            "builtins:max returned .*, expected a torch.optim",
        ),
        (OptimizerSettings("builtins:dict"), "optimizer: builtins:dict refused {}"),
        (
            OptimizerSettings("sgd", {"momentun": 1}),
            "optimizer.momentun: SGD takes no.*did you mean 'momentum'",
        ),
        (OptimizerSettings("lbfgs"), "optimizer.kind: lbfgs runs the model several times a step"),
        (OptimizerSettings("sgd", {"lr": -1}), "optimizer: sgd refused .*Invalid learning rate"),
    ],
)
def test_a_wrong_optimizer_is_explained(settings: OptimizerSettings, message: str):
    with pytest.raises(JobError, match=message):
        build_optimizer(settings, [torch.nn.Parameter(torch.ones(1))])


class Falling:
    """Falls with every call."""

    calls = 0

    def __call__(self, step: int, total: int) -> float:
        self.calls += 1
        return 1 / self.calls


falling = Falling()


def test_a_wrong_schedule_is_explained():
    with pytest.raises(JobError, match="lr_schedule: step refused .*ZeroDivisionError"):
        check_lr_schedule(LrScheduleSettings("step", 5, {"every_steps": 0}))
    with pytest.raises(JobError, match="lr_schedule.kind: test_optim:falling changes self.calls whenever"):
        check_lr_schedule(LrScheduleSettings("test_optim:falling"))
    assert falling.calls == 0
    with pytest.raises(JobError, match="step needs 'every_steps'; add lr_schedule.every_steps"):
        check_lr_schedule(LrScheduleSettings("step"))
    with pytest.raises(JobError, match="did you mean 'warmup_steps'"):
        check_lr_schedule(LrScheduleSettings("cosine", 0, {"warmup_step": 3}))
    with pytest.raises(JobError, match="lr_schedule.kind: found 'cosin'.*did you mean 'cosine'"):
        build_lr_factor(LrScheduleSettings("cosin"), 10)
    with pytest.raises(JobError, match="lr_schedule.gama: step takes no 'gama'; did you mean 'gamma'"):
        build_lr_factor(LrScheduleSettings("step", 0, {"every_steps": 1, "gama": 1}), 10)


NO_DECAY = GroupSettings("*.bias|*norm*", {"weight_decay": 0.0})
SLOW_HEAD = GroupSettings("head.*", {"lr": 0.01, "momentum": 0.5})


def test_a_parameter_is_in_the_first_group_that_its_name_matches():
    names = ["conv.weight", "norm1.weight", "head.weight", "head.bias"]
    weights = {torch.nn.Parameter(torch.ones(1)): name for name in names}
    settings = OptimizerSettings("sgd", {"lr": 0.1, "weight_decay": 0.5}, (NO_DECAY, SLOW_HEAD))
    groups = build_optimizer(settings, weights, weights).param_groups
    assert [[weights[p] for p in group["params"]] for group in groups] == [
        ["conv.weight"],
        ["norm1.weight", "head.bias"],
        ["head.weight"],
    ]
    assert [(group["lr"], group["weight_decay"]) for group in groups] == [(0.1, 0.5), (0.1, 0.0), (0.01, 0.5)]


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (
            [GroupSettings("*.bais")],
            r"groups\[0\].match: found '\*.bais', which no.*nearest names: head.bias",
        ),
        (
            [GroupSettings("head.*"), GroupSettings("head.bias")],
            r"groups\[1\].match: .*'head.bias', is in groups",
        ),
    ],
)
def test_a_group_that_no_parameter_is_in_is_refused_with_the_nearest_names(groups, message):
    with pytest.raises(JobError, match=message):
        check_groups(groups, ["conv.weight", "norm1.weight", "head.weight", "head.bias"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weight_decy": 0.0}, r"optimizer.groups\[0\].weight_decy: SGD takes no.*'weight_decay'"),
        ({"lr": "fast"}, r"optimizer.groups\[0\].lr: found 'fast', expected a number"),
    ],
)
def test_an_option_of_a_group_that_the_optimizer_does_not_take_is_refused(options, message):
    settings = OptimizerSettings("sgd", {"lr": 0.1}, (GroupSettings("*", options),))
    with pytest.raises(JobError, match=message):
        build_optimizer(settings, [torch.nn.Parameter(torch.ones(1))])


def with_groups(job):
    groups = (GroupSettings("*.bias", {"weight_decay": 0.0}), GroupSettings("5.*", {"lr": 0.01}))
    options = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}
    return replace(job, optimizer=OptimizerSettings("sgd", options, groups))


def test_groups_train_alike_in_one_process_on_workers_that_share_batches_and_in_stages(tmp_path: Path):
    """The head, layer 5, is in the second stage, and the first has none of its group."""
    _, expected = train_here(with_groups(unverified_job(steps=6)), tmp_path / "plain")
    _, without = train_here(unverified_job(steps=6), tmp_path / "without")
    assert largest_difference(expected, without) > 1e-3
    jobs = {
        "data-parallel": with_groups(unverified_job(steps=6)),
        "pipeline": with_groups(unverified_plan((1, 1), Schedule.FLUSH, steps=6)),
        "stash": with_groups(unverified_plan((1, 1), Schedule.STASH, 1, steps=6)),
    }
    run_ranks(2, train_each, jobs, tmp_path)
    assert largest_difference(saved_weights(tmp_path / "pipeline"), expected) < 1e-10
    _, again = train_here(with_groups(unverified_job(steps=6)), tmp_path / "pipeline", resume=True)
    assert largest_difference(again, expected) < 1e-10


def test_optimizers_for_adapters_train_alike_in_stages_and_when_resumed(tmp_path: Path):
    kinds = {
        kind: {"optimizer": OptimizerSettings(kind, {"lr": 0.01})} for kind in ("nadam", "lion", "adafactor")
    }
    stages = {kind: unverified_plan((1, 1), Schedule.FLUSH, steps=6, **job) for kind, job in kinds.items()}
    run_ranks(2, train_each, stages, tmp_path)
    for kind, job in kinds.items():
        _, expected = train_here(unverified_job(steps=6, **job), tmp_path / f"{kind} alone")
        assert largest_difference(saved_weights(tmp_path / kind), expected) < 1e-10
        train_here(unverified_job(steps=3, **job), tmp_path / f"{kind} resumed")
        _, again = train_here(unverified_job(steps=6, **job), tmp_path / f"{kind} resumed", resume=True)
        assert largest_difference(again, expected) == 0.0


def vectors_apart(parameters, lr: float) -> torch.optim.Optimizer:
    """An optimizer of one's own: vectors, if there are any, have a rate of their own."""
    parts = [[p for p in parameters if p.dim() == 1], [p for p in parameters if p.dim() > 1]]
    rates = (lr / 10, lr)
    return torch.optim.SGD([{"params": p, "lr": rate} for p, rate in zip(parts, rates) if p])


def test_a_stage_has_the_rates_of_its_own_groups_where_an_optimizer_leaves_out_empty_ones(tmp_path: Path):
    changes = {
        "model": ModelSettings("support.traced_models:BiasBehind"),
        "optimizer": OptimizerSettings("test_optim:vectors_apart", {"lr": 0.1}),
        "lr_schedule": LrScheduleSettings("cosine"),
        "steps": 5,
    }
    _, expected = train_here(unverified_job(**changes), tmp_path / "plain")
    run_ranks(2, train_each, {"stages": unverified_plan((1, 1), Schedule.FLUSH, **changes)}, tmp_path)
    assert largest_difference(saved_weights(tmp_path / "stages"), expected) < 1e-10
