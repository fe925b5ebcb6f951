"""The life of fused trials under the optimizers that people tune adapters with, next to the trials alone."""

from __future__ import annotations

import copy

import pytest
import torch
from fused_checks import fuse, make_models
from torch import nn

import plait
from plait.fusion import (
    FusedOptimizer,
    FusionError,
    LossScales,
    add_trials,
    fuse_optimizers,
    keep_trials,
    replace_trial,
    split_optimizer,
)
from plait.fusion.optim.conversion import load_trial
from plait.fusion.optim.matrix_kinds import orthogonalized
from plait.sync.weight_ema import EMA, keep_ema

CLOSE = {"rtol": 1e-12, "atol": 1e-12}
# One dictionary for each trial, and one for newcomers.
OPTIONS = {
    "nadam": [
        {"lr": 0.01 * n, "betas": (0.5 + 0.1 * n, 0.9), "momentum_decay": 0.01 * n, "weight_decay": 0.1 * n}
        for n in range(1, 5)
    ],
    "lion": [{"lr": 0.002 * n, "betas": (0.9 - 0.1 * n, 0.9), "weight_decay": 0.1 * n} for n in range(1, 5)],
    "adafactor": [
        {
            "lr": 0.02 * n,
            "eps": (None if n % 2 else 1e-5, 0.01 * n),
            "d": 1.0 + 0.1 * n,
            "beta2_decay": -0.2 * n,
        }
        for n in range(1, 5)
    ],
    "muon": [
        {"lr": 0.01 * n, "momentum": 0.2 * n, "weight_decay": 0.1 * n, "eps": 0.01 * n} for n in range(1, 5)
    ],
}
LONE = {
    "nadam": torch.optim.NAdam,
    "lion": plait.Lion,
    "adafactor": torch.optim.Adafactor,
    "muon": torch.optim.Muon,
}


class Shapes(nn.Module):
    """Parameters of none to four axes of a trial; those that are no matrices are frozen for Muon."""

    def __init__(self, kind):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.wide, self.conv, self.tall = nn.Linear(6, 8), nn.Conv1d(2, 3, 2), nn.Linear(9, 3)
        for parameter in self.parameters():
            parameter.requires_grad_(kind != "muon" or parameter.dim() == 2)

    def forward(self, x):
        x = self.wide(x).tanh().unflatten(1, (2, 4))
        return self.tall(self.conv(x).flatten(1)) * self.scale


def trained(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def data(step, trial):
    return torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * trial + step))


class Lone:
    """A trial alone: its model, its optimizer, which keeps an EMA, and its steps."""

    def __init__(self, kind, trial, model, options):
        self.trial, self.model, self.made = trial, model, 0
        self.optimizer = LONE[kind](trained(model), **options)
        keep_ema(self.optimizer, 0.5 + 0.1 * trial, True)

    def step(self):
        self.optimizer.zero_grad()
        self.model(data(self.made, self.trial)).square().mean().backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        self.optimizer.step()
        self.made += 1


def step_together(fused, optimizer, alone):
    optimizer.zero_grad()
    x = torch.stack([data(one.made, one.trial) for one in alone])
    fused(x).square().mean((1, 2)).sum().backward()
    optimizer.step()
    for one in alone:
        one.step()


def assert_same(fused, optimizer, alone):
    modules = fused.split()
    for module, own, one in zip(modules, split_optimizer(optimizer, modules), alone):
        for found, wanted in zip(module.parameters(), one.model.parameters()):
            torch.testing.assert_close(found, wanted, **CLOSE)
        for found, wanted in zip(trained(module), trained(one.model)):
            states = own.state[found], one.optimizer.state[wanted]
            assert states[0].keys() == states[1].keys()
            for key, value in states[1].items():
                torch.testing.assert_close(states[0][key], value, **CLOSE, msg=lambda m, k=key: f"{k}: {m}")


@pytest.mark.parametrize("kind", OPTIONS)
def test_trials_leave_enter_change_places_and_are_saved_as_if_alone(kind):
    models, options = make_models(lambda: Shapes(kind), 5), OPTIONS[kind]
    alone = [Lone(kind, n, copy.deepcopy(models[n]), options[n]) for n in range(3)]
    fused = fuse(models[:3])
    optimizer = fuse_optimizers(fused, [one.optimizer for one in alone], models=[o.model for o in alone])
    optimizer.clip_norm = torch.full((3,), 0.1, dtype=torch.float64)
    for _ in range(6):
        step_together(fused, optimizer, alone)
    keep_trials(fused, optimizer, [2, 0])
    alone = [alone[2], alone[0]]
    step_together(fused, optimizer, alone)
    alone[0] = Lone(kind, 3, copy.deepcopy(models[3]), options[3])
    replace_trial(fused, optimizer, 0, copy.deepcopy(models[3]), 3)
    load_trial(optimizer, alone[0].optimizer, 0, alone[0].model)
    step_together(fused, optimizer, alone)
    add_trials(fused, optimizer, [copy.deepcopy(models[4])], [4])
    alone.append(Lone(kind, 1, copy.deepcopy(models[4]), options[1]))
    load_trial(optimizer, alone[2].optimizer, 2, alone[2].model)
    again = FusedOptimizer(
        fused, kind, clip_norm=0.1, params=optimizer.groups[0]["params"], ema=optimizer.ema
    )
    for _ in range(3):
        step_together(fused, optimizer, alone)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for _ in range(8):
        step_together(fused, again, alone)
    assert_same(fused, again, alone)
    again.eval()
    for own, one in zip(fused.split(), alone):
        for found, parameter in zip(trained(own), trained(one.model)):
            torch.testing.assert_close(found, one.optimizer.state[parameter][EMA], **CLOSE)


@pytest.mark.parametrize("kind", OPTIONS)
def test_a_trial_that_overflows_misses_a_step_and_changes_nothing(kind):
    models = [model.float() for model in make_models(lambda: Shapes(kind), 2)]
    fused, still = fuse(models), fuse(copy.deepcopy(models))
    arrays = [(f, FusedOptimizer(f, kind, params=trained(f.module)), LossScales(2)) for f in (fused, still)]
    for step in range(3):
        for number, (each, optimizer, scales) in enumerate(arrays):
            if step == 1 and number == 1:
                continue
            x = torch.stack([data(step, trial).float() for trial in range(2)])
            x[1, 0, 0] = float("inf") if step == 1 else x[1, 0, 0]
            optimizer.zero_grad()
            scales.scale(each(x).square().mean((1, 2))).sum().backward()
            assert scales.step(optimizer).tolist() == [False, step == 1]
    for found, wanted in zip(fused.trial(1).parameters(), still.trial(1).parameters()):
        torch.testing.assert_close(found, wanted)
    assert not torch.equal(fused.module.wide.weight[0], still.module.wide.weight[0])


def test_muon_updates_the_matrices_and_another_optimizer_the_rest():
    models = make_models(lambda: Shapes("lion"), 3)
    fused = fuse(copy.deepcopy(models))
    with pytest.raises(FusionError, match=r"muon found a parameter of shape \(\) .* expected matrices"):
        FusedOptimizer(fused, "muon")

    def optimizers(make, model, dim):
        matrices = [p for p in model.parameters() if p.dim() == dim]
        return make("muon", matrices), make("adamw", [p for p in model.parameters() if p.dim() != dim])

    frozen = fuse(make_models(lambda: Shapes("muon"), 2))
    optimizer = FusedOptimizer(frozen, "muon")  # what is frozen is not updated
    frozen.module.conv.requires_grad_(True)
    frozen(torch.ones(2, 5, 6, dtype=torch.float64)).sum().backward()
    with pytest.raises(FusionError, match=r"shape \(3, 2, 2\) .* expected matrices"):
        optimizer.step()

    together = optimizers(lambda kind, params: FusedOptimizer(fused, kind, params=params), fused.module, 3)
    torchs = {"muon": torch.optim.Muon, "adamw": torch.optim.AdamW}
    alone = [optimizers(lambda kind, params: torchs[kind](params), model, 2) for model in models]
    for step in range(5):
        x = torch.stack([data(step, trial) for trial in range(3)])
        fused(x).square().mean((1, 2)).sum().backward()
        for model, own in zip(models, x):
            model(own).square().mean().backward()
        for optimizer in (*together, *(one for pair in alone for one in pair)):
            optimizer.step()
            optimizer.zero_grad()
    for found, wanted in zip(fused.split(), models):
        for a, b in zip(found.parameters(), wanted.parameters()):
            torch.testing.assert_close(a, b, **CLOSE)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("shape", [(4, 6), (6, 4), (5, 5)])
def test_matrices_are_orthogonalized_in_a_batch_as_one_by_one(shape):
    x, eps = torch.randn(3, *shape, dtype=torch.float64), torch.tensor([1e-7, 1e-3, 1e-7])
    x[1] *= 1e-4  # below its eps
    options = ((3.4445, -4.775, 2.0315), 5, eps.view(3, 1, 1))
    batched, each = (orthogonalized(x, *options, batched=batched) for batched in (True, False))
    torch.testing.assert_close(batched.float(), each.float(), rtol=0.0, atol=0.02)


REFUSED = {
    "found lr = None, expected a number": ("adafactor", {"lr": None}),
    "adafactor takes no 'relative_step'": ("adafactor", {"relative_step": True}),
    "refuses trial 1's values: Clipping threshold": ("adafactor", {"d": [1.0, 0.5]}),
    "refuses trial 0's values: Adjust learning rate function": ("muon", {"adjust_lr_fn": "half"}),
    "lion takes no 'eps'": ("lion", {"eps": 1e-8}),
    "refuses trial 1's values: Invalid momentum_decay": ("nadam", {"momentum_decay": [0.0, -1.0]}),
}


@pytest.mark.parametrize("message", REFUSED)
def test_values_that_cannot_be_are_refused_in_words(message):
    kind, options = REFUSED[message]
    fused = fuse([nn.Linear(3, 2, bias=False) for _ in range(2)])
    with pytest.raises(FusionError, match=message):
        FusedOptimizer(fused, kind, **options)


def test_an_optimizer_of_the_same_name_from_elsewhere_is_refused():
    class Adafactor(torch.optim.SGD):
        pass

    Adafactor.__module__ = "transformers.optimization"
    models = [nn.Linear(3, 2) for _ in range(2)]
    with pytest.raises(FusionError, match=r"found \[\"transformers's Adafactor\"\]"):
        fuse_optimizers(fuse(models), [Adafactor(model.parameters()) for model in models])


def test_the_state_of_a_schedule_with_a_rate_for_each_trial_is_loaded_as_plain_data(tmp_path):
    optimizer = FusedOptimizer(fuse([nn.Linear(2, 2) for _ in range(2)]), "sgd", lr=[0.1, 0.2])
    state = torch.optim.lr_scheduler.StepLR(optimizer, 3).state_dict()
    torch.save(state, tmp_path / "schedule.pt")
    assert torch.load(tmp_path / "schedule.pt", weights_only=True) == state
