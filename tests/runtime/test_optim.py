"""Optimizers and learning-rate schedules by name."""

from __future__ import annotations

import math

import pytest
import torch

from plait.core.errors import JobError
from plait.runtime.optim import build_lr_factor, build_optimizer, check_lr_schedule, optimizer_kinds
from plait.runtime.settings import LrScheduleSettings, OptimizerSettings


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


@pytest.mark.parametrize("kind", ["sgd", "adam", "adamw", "rmsprop", "adagrad", "adadelta", "nadam"])
def test_any_optimizer_of_torch_can_be_named(kind: str):
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = build_optimizer(OptimizerSettings(kind, {"lr": 0.1}), [weight])
    assert type(optimizer) is optimizer_kinds()[kind]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (OptimizerSettings("adm"), "optimizer.kind: found 'adm'.*did you mean 'adam'"),
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


def test_a_wrong_schedule_is_explained():
    with pytest.raises(JobError, match="lr_schedule: step refused .*ZeroDivisionError"):
        check_lr_schedule(LrScheduleSettings("step", 5, {"every_steps": 0}))
    with pytest.raises(JobError, match="step needs 'every_steps'; add lr_schedule.every_steps"):
        check_lr_schedule(LrScheduleSettings("step"))
    with pytest.raises(JobError, match="did you mean 'warmup_steps'"):
        check_lr_schedule(LrScheduleSettings("cosine", 0, {"warmup_step": 3}))
    with pytest.raises(JobError, match="lr_schedule.kind: found 'cosin'.*did you mean 'cosine'"):
        build_lr_factor(LrScheduleSettings("cosin"), 10)
    with pytest.raises(JobError, match="lr_schedule.gama: step takes no 'gama'; did you mean 'gamma'"):
        build_lr_factor(LrScheduleSettings("step", 0, {"every_steps": 1, "gama": 1}), 10)
