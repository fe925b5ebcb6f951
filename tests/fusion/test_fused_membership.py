"""Trials leave, enter and take another's place; those that stay train on as if nobody had moved."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from fused_checks import CLOSE, fuse, make_models
from torch import nn

from plait.fusion import FusedOptimizer, FusionError, LossScales, add_trials, keep_trials, replace_trial
from plait.workloads import resnet


def dropping(p=0.2):
    return nn.Sequential(
        nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(p), nn.Linear(8, 3)
    )


def data(step, trial):
    generator = torch.Generator().manual_seed(1000 * trial + step)
    return (
        torch.randn(5, 6, dtype=torch.float64, generator=generator),
        torch.randint(0, 3, (5,), generator=generator),
    )


def train(fused, optimizer, trials, steps):
    """Each trial sees its own data at its own age, whichever trials are next to it."""
    for _ in range(steps):
        ages = fused.ages.tolist()
        x, y = (torch.stack(parts) for parts in zip(*(data(a, t) for a, t in zip(ages, trials))))
        optimizer.zero_grad()
        fused.map(F.cross_entropy, fused(x), y).sum().backward()
        optimizer.step()


def alone(model, trial, steps, **options):
    fused = fuse([model], seeds=[trial])
    optimizer = FusedOptimizer(fused, "adam", **options)
    train(fused, optimizer, [trial], steps)
    return fused.trial(0)


def assert_same(found, wanted):
    for (name, a), b in zip(found.state_dict().items(), wanted.state_dict().values()):
        torch.testing.assert_close(a, b, msg=lambda m, n=name: f"{n}: {m}", **CLOSE)


@pytest.fixture
def models():
    torch.manual_seed(0)
    return [dropping(p).double() for p in (0.1, 0.2, 0.3, 0.4, 0.5)]


def test_trials_that_leave_do_not_disturb_those_that_stay(models):
    fused = fuse(models)
    optimizer = FusedOptimizer(fused, "adam", lr=[0.01, 0.02, 0.03, 0.04, 0.05])
    train(fused, optimizer, range(5), 4)
    keep_trials(fused, optimizer, [3, 1])
    train(fused, optimizer, [3, 1], 4)
    assert fused.trials == 2
    assert_same(fused.trial(0), alone(models[3], 3, 8, lr=0.04))
    assert_same(fused.trial(1), alone(models[1], 1, 8, lr=0.02))
    assert [fused.trial(k)[3].p for k in range(2)] == [0.4, 0.2]


def test_trials_that_enter_begin_anew_next_to_the_old(models):
    fused = fuse(models[:2])
    optimizer = FusedOptimizer(fused, "adam", lr=[0.01, 0.02])
    train(fused, optimizer, range(2), 3)
    add_trials(fused, optimizer, models[2:4], seeds=[2, 3], hyperparameters={"lr": [0.03, 0.04]})
    train(fused, optimizer, range(4), 5)
    for trial, (steps, rate) in enumerate([(8, 0.01), (8, 0.02), (5, 0.03), (5, 0.04)]):
        assert_same(fused.trial(trial), alone(models[trial], trial, steps, lr=rate))


def test_a_trial_takes_anothers_place_and_memory(models):
    fused = fuse(models[:3])
    optimizer = FusedOptimizer(fused, "adam", lr=0.01, steps=[2, 9, 9])
    train(fused, optimizer, range(3), 4)
    assert_same(fused.trial(0), alone(models[0], 0, 2, lr=0.01))
    place = fused.module[0].weight.data_ptr()
    replace_trial(fused, optimizer, 0, models[4], seed=4, hyperparameters={"lr": 0.05}, steps=3)
    train(fused, optimizer, [4, 1, 2], 4)
    assert fused.module[0].weight.data_ptr() == place
    assert_same(fused.trial(0), alone(models[4], 4, 3, lr=0.05))
    assert_same(fused.trial(1), alone(models[1], 1, 8, lr=0.01))
    assert fused.trial(0)[3].p == 0.5


def test_a_winners_state_copied_over_a_losers_trains_on_as_the_winner(models):
    fused = fuse(models[:2])
    optimizer = FusedOptimizer(fused, "adam", lr=[0.01, 0.02])
    train(fused, optimizer, range(2), 3)
    keep_trials(fused, optimizer, [1, 1], seeds=[1, 1])
    train(fused, optimizer, [1, 1], 2)
    for trial in range(2):
        assert_same(fused.trial(trial), alone(models[1], 1, 5, lr=0.02))


def test_a_trial_that_is_not_there_cannot_be_kept(models):
    fused = fuse(models[:2])
    with pytest.raises(FusionError, match=r"\[0, 2\].*0 to 1"):
        keep_trials(fused, FusedOptimizer(fused, "sgd"), [0, 2])


class TwiceNamed(nn.Module):
    """A buffer under two names, written under one and read under the other."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3, dtype=torch.float64)
        self.register_buffer("mean", torch.zeros(3, dtype=torch.float64))
        self.register_buffer("same", self.mean)

    def forward(self, x):
        y = self.layer(x)
        before = self.same.clone()
        self.mean.mul_(0.5).add_(y.detach().mean(0))
        return y - before


def test_a_buffer_with_two_names_stays_one_when_trials_leave_and_enter():
    torch.manual_seed(0)
    models = [TwiceNamed() for _ in range(3)]
    fused = fuse(models[:2])
    optimizer = FusedOptimizer(fused, "adam", lr=[0.01, 0.02])
    train(fused, optimizer, range(2), 3)
    keep_trials(fused, optimizer, [1, 0])
    train(fused, optimizer, [1, 0], 3)
    assert_same(fused.trial(0), alone(models[1], 1, 6, lr=0.02))
    replace_trial(fused, optimizer, 1, models[2], seed=2, hyperparameters={"lr": 0.03})
    train(fused, optimizer, [1, 2], 2)
    assert_same(fused.trial(1), alone(models[2], 2, 2, lr=0.03))


class Recurring(nn.Module):
    """State in a plain attribute, a list of tensors, from one forward to the next."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.kept = []

    def forward(self, x):
        y = self.layer(x)
        before = self.kept[0].detach() if self.kept else 0.0
        self.kept = [y]
        return y + 0.5 * before


def test_what_a_model_keeps_in_a_list_leaves_with_its_trial():
    torch.manual_seed(0)
    models = make_models(Recurring)
    fused = fuse(models)
    optimizer = FusedOptimizer(fused, "adam", lr=[0.01, 0.02, 0.03])
    train(fused, optimizer, range(3), 3)
    keep_trials(fused, optimizer, [2, 1])
    train(fused, optimizer, [2, 1], 3)
    found, wanted = fused.trial(0), alone(models[2], 2, 6, lr=0.03)
    assert_same(found, wanted)
    torch.testing.assert_close(found.kept[0], wanted.kept[0], **CLOSE)


def test_a_trial_that_enters_has_its_own_limit_for_gradients(models):
    fused = fuse(models[:2])
    optimizer = FusedOptimizer(fused, "adam", lr=0.01)
    add_trials(fused, optimizer, [models[2]], [2], {"clip_norm": [0.05], "lr": [0.02]})
    train(fused, optimizer, range(3), 4)
    assert_same(fused.trial(0), alone(models[0], 0, 4, lr=0.01))
    assert_same(fused.trial(2), alone(models[2], 2, 4, lr=0.02, clip_norm=[0.05]))
    with pytest.raises(FusionError, match="no hyperparameter 'lrr'; did you mean 'lr'"):
        replace_trial(fused, optimizer, 0, models[3], seed=3, hyperparameters={"lrr": 0.1})


BLOCKS = ["block2_1", "block2_2", "block3_1", "block3_2", "block4_1", "block4_2", "block5_1", "block5_2"]


@pytest.mark.parametrize("count", [0, 3, len(BLOCKS)])
def test_any_number_of_unfused_blocks_trains_the_same(count):
    models = make_models(resnet.resnet18_tiny, count=2)
    arrays = [fuse(models), fuse(models, unfused=BLOCKS[:count])]
    for fused in arrays:
        optimizer = FusedOptimizer(fused, "sgd", lr=[0.01, 0.05], momentum=0.9)
        generator = torch.Generator().manual_seed(0)
        for _ in range(3):
            x = torch.randn(2, 3, 1, 8, 8, dtype=torch.float64, generator=generator)
            optimizer.zero_grad()
            fused(x).square().mean((1, 2)).sum().backward()
            optimizer.step()
    for trial in range(2):
        assert_same(arrays[1].trial(trial), arrays[0].trial(trial))


@pytest.mark.parametrize("kind", ["sgd", "adam", "adagrad"])
def test_one_trials_overflow_costs_no_other_a_step(kind):
    models = [model.float() for model in make_models(lambda: nn.Linear(3, 2))]
    x, y = torch.randn(3, 4, 3), torch.randn(3, 4, 2)
    plain, scaled = fuse(models), fuse(models)
    expected = FusedOptimizer(plain, kind, lr=0.1)
    optimizer = FusedOptimizer(scaled, kind, lr=0.1)
    scales = LossScales(3, initial=1024.0, growth_interval=3)
    for step in range(3):
        expected.zero_grad()
        plain.map(F.mse_loss, plain(x), y).sum().backward()
        expected.step()
        optimizer.zero_grad()
        losses = scaled.map(F.mse_loss, scaled(x), y)
        if step == 1:
            losses = losses * torch.tensor([1.0, float("inf"), 1.0])
        scales.scale(losses).sum().backward()
        stood = scales.step(optimizer)
        assert stood.tolist() == [False, step == 1, False]
    for trial in (0, 2):
        for a, b in zip(scaled.trial(trial).parameters(), plain.trial(trial).parameters()):
            torch.testing.assert_close(a, b)
    assert optimizer.steps.tolist() == [3, 2, 3]
    assert scales.scales.tolist() == [2048.0, 512.0, 2048.0]


def test_autocast_computes_in_bfloat16_what_lone_models_do():
    models = [
        model.float()
        for model in make_models(
            lambda: nn.Sequential(
                nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
            )
        )
    ]
    x = torch.randn(3, 5, 2, 6, 6)
    fused = fuse(models)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = fused(x)
        wanted = torch.stack([model(own) for model, own in zip(models, x)])
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, wanted, rtol=0.05, atol=0.05)
    found.float().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in fused.parameters())


def test_channels_last_inputs_give_the_same():
    models = make_models(lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.MaxPool2d(2)))
    x = torch.randn(3, 5, 2, 6, 6, dtype=torch.float64)
    last = x.flatten(0, 1).contiguous(memory_format=torch.channels_last).unflatten(0, (3, 5))
    torch.testing.assert_close(fuse(models)(last), fuse(models)(x), **CLOSE)
