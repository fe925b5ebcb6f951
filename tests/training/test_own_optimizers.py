"""Optimizers of one's own: what they keep is saved and resumed, what stages cannot give them is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from plait.core.errors import JobError
from plait.pipeline.named_state import load_optimizer_state, optimizer_state, unsaved_state
from plait.pipeline.verify.optimizer_traits import Traits
from plait.planner.schedules.in_flight import Schedule
from plait.schema.plans.plan import Layout
from plait.schema.settings import LrScheduleSettings, ModelSettings, OptimizerSettings
from plait.training import components
from plait.training.checks.plan_settings import check_pipeline
from plait.training.engines.pipeline_setup import check_optimizer, trace_components
from plait.training.optimizers.build import build_optimizer
from plait.training.optimizers.lr_schedule import set_lr
from plait.training.optimizers.traits import traits_of
from support.plans import in_stages, straight_layout
from support.silent_cases import HERE
from support.training import digits_job, largest_difference, refused_rank, train_here
from support.world import run_ranks


class LayerNorms(torch.optim.Optimizer):
    """Goes by the norm of each parameter alone, as LARS and LAMB do."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad * (p.norm() / (p.grad.norm() + 1e-3)), alpha=group["lr"])


class NeedsLoss(LayerNorms):
    """Fails where nobody has told it a loss."""

    def step(self, closure: Any = None) -> None:
        raise ZeroDivisionError("1 / self.loss")


class NormsLater(LayerNorms):
    """From its ninth update on it goes by the norm over all parameters."""

    updates = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.updates += 1
        trained = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in trained]).norm() if self.updates > 8 else 1.0
        for p in trained:
            p.sub_(p.grad / norm, alpha=0.1)


class EveryThird(LayerNorms):
    """Gathers the gradients of three steps, and then takes one."""

    calls, acted = 0, True

    def step(self, closure: Any = None) -> None:
        self.calls += 1
        self.acted = self.calls % 3 == 0
        if self.acted:
            super().step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self.acted:
            super().zero_grad(set_to_none)


OWN = ("LayerNorms", "NeedsLoss", "NormsLater", "EveryThird")


def own(name: str) -> OptimizerSettings:
    place = "test_own_optimizers:" if name in OWN else HERE
    return OptimizerSettings(f"{place}{name}", {"lr": 0.1})


@pytest.mark.parametrize(
    ("settings", "traits"),
    [
        (OptimizerSettings("adam", {"lr": 0.1}), Traits()),
        (own("LayerNorms"), Traits()),
        (own("NeedsLoss"), Traits()),
        (own("NormsLater"), Traits(couples=True, counts=True)),
        (own("EveryThird"), Traits(counts=True, keeps=True)),
        (own("KeepsGradients"), Traits()),
        (own("GlobalNorm"), Traits(couples=True)),
        (own("Noisy"), Traits(draws=True)),
        (own("ScheduleFree"), Traits(counts=True)),
        (own("CountsItself"), Traits(counts=True)),
        (own("OwnRate"), Traits(counts=True)),
    ],
)
def test_what_an_optimizer_goes_by_is_found_by_trying_it_out(
    settings: OptimizerSettings, traits: Traits
) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Conv2d(2, 3, 3), nn.Linear(4, 4))
    state = torch.get_rng_state()
    assert traits_of(settings, dict(model.named_parameters())) == traits
    assert torch.equal(torch.get_rng_state(), state)


def test_an_optimizer_that_keeps_gradients_is_refused_where_workers_sum_them(tmp_path: Path) -> None:
    job = digits_job(optimizer=own("EveryThird"), steps=2)
    for words in run_ranks(2, refused_rank, job, tmp_path / "two"):
        assert "zero_grad of test_own_optimizers:EveryThird leaves gradients for the next step" in words
    train_here(job, tmp_path / "one")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 10)
        self.b.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.b(self.a(x.flatten(1)).relu()))


@pytest.mark.parametrize(
    ("name", "layout", "schedule", "words"),
    [
        ("GlobalNorm", straight_layout((1, 1)), Schedule.FLUSH, "from all parameters together"),
        ("GlobalNorm", straight_layout((2,)), Schedule.FLUSH, ""),
        ("Noisy", straight_layout((1, 1)), Schedule.FLUSH, "draws random numbers"),
        ("Noisy", straight_layout((2,)), Schedule.FLUSH, ""),
        ("ScheduleFree", straight_layout((1, 1)), Schedule.FLUSH, ""),
        (
            "ScheduleFree",
            straight_layout((1, 1)),
            Schedule.STASH,
            "counts its updates .* several times a batch",
        ),
        ("ScheduleFree", Layout(((0,), (1,), (0,))), Schedule.STASH, "counts its updates"),
        ("LayerNorms", straight_layout((1, 1)), Schedule.STASH, ""),
    ],
)
def test_an_optimizer_that_would_do_something_else_in_stages_is_refused(
    name: str, layout: Layout, schedule: Schedule, words: str
) -> None:
    job = digits_job(model=ModelSettings("test_own_optimizers:Tied"), optimizer=own(name))
    job = in_stages(job, layout, schedule, 4)
    parts = components.build(job, torch.device("cpu"))
    arguments = job, parts, trace_components(job, parts, evaluation=False), check_pipeline(job, None)
    if not words:
        check_optimizer(*arguments)
        return
    with pytest.raises(JobError, match=words):
        check_optimizer(*arguments)


@pytest.mark.parametrize(
    "name", ["ScheduleFree", "StepsInGroup", "CountsItself", "OwnRate", "KeepsGradients"]
)
def test_all_numbers_and_tensors_of_an_optimizer_come_back_by_name(name: str) -> None:
    def step(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], seed: int) -> None:
        torch.manual_seed(seed)
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()

    torch.manual_seed(0)
    first = [nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(4))]
    names = dict(zip(first, ("a", "b")))
    optimizer = build_optimizer(own(name), first, names)
    for seed in range(3):
        step(optimizer, first, seed)
    saved = {path: value.clone() for path, value in optimizer_state(optimizer, names).items()}
    second = [nn.Parameter(parameter.detach().clone()) for parameter in first]
    again = build_optimizer(own(name), second, dict(zip(second, ("a", "b"))))
    load_optimizer_state(again, dict(zip(second, ("a", "b"))), saved)
    set_lr(again, [0.1], 1.0)
    for side in ((optimizer, first), (again, second)):
        step(*side, 3)
    assert all(torch.equal(one, other) for one, other in zip(first, second))
    assert unsaved_state(optimizer) == (["self.seen (list)"] if name == "CountsItself" else [])


def test_a_rate_of_the_optimizers_own_stays_unless_a_schedule_asks_for_another(tmp_path: Path) -> None:
    plain = digits_job(optimizer=own("OwnRate"), steps=3)
    scheduled = digits_job(optimizer=own("OwnRate"), steps=3, lr_schedule=LrScheduleSettings("cosine"))
    _, one = train_here(plain, tmp_path / "plain")
    _, other = train_here(scheduled, tmp_path / "scheduled")
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = build_optimizer(own("OwnRate"), [parameter])
    for factor, rate in ((1.0, 0.1), (1.0, 0.07), (0.5, 0.05), (0.5, 0.035), (1.0, 0.1)):
        set_lr(optimizer, [0.1], factor)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(rate)
        parameter.grad = torch.ones(1)
        optimizer.step()
    assert largest_difference(one, other) > 0
