"""Optimizers of fused trials against torch's own: parameters that rest, switches, order, saved states."""

from __future__ import annotations

import copy

import pytest
import torch
from fused_checks import CLOSE, fuse, make_models
from torch import nn

import plait
from plait.fusion import FusedOptimizer, FusionError, fuse_optimizers, replace_trial, split_optimizer
from plait.fusion.optim.conversion import load_trial

TRIALS = 3
LONE = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
LONE |= {"rmsprop": torch.optim.RMSprop, "adagrad": torch.optim.Adagrad, "adadelta": torch.optim.Adadelta}
LONE |= {"nadam": torch.optim.NAdam, "lion": plait.Lion, "adafactor": torch.optim.Adafactor}


class Heads(nn.Module):
    """Two heads, of which each forward uses one: the other has no gradient in that step."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(6, 5)
        self.heads = nn.ModuleList([nn.Linear(5, 2), nn.Linear(5, 2)])
        self.turn = 0

    def forward(self, x):
        return self.heads[self.turn](self.body(x).tanh())


def net():
    return nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5))


def batch(step, *shape):
    return torch.randn(TRIALS, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def step_fused(fused, optimizer, x):
    optimizer.zero_grad()
    fused(x).square().mean((1, 2)).sum().backward()
    optimizer.step()


def step_alone(model, optimizer, x):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def assert_same(fused, models):
    for own, model in zip(fused.split(), models):
        for found, wanted in zip(own.parameters(), model.parameters()):
            torch.testing.assert_close(found, wanted, **CLOSE)


@pytest.mark.parametrize("kind", LONE)
def test_a_parameter_that_rests_in_some_steps_counts_only_its_own(kind):
    models = make_models(Heads, TRIALS)
    fused = fuse(copy.deepcopy(models))
    optimizer = FusedOptimizer(fused, kind, lr=[0.01, 0.02, 0.03])
    lone = [LONE[kind](m.parameters(), lr=0.01 * (k + 1)) for k, m in enumerate(models)]
    for step in range(10):
        fused.module.turn = turn = int(step % 3 == 2)
        x = batch(step, 4, 6)
        step_fused(fused, optimizer, x)
        for number, model in enumerate(models):
            model.turn = turn
            step_alone(model, lone[number], x[number])
    assert_same(fused, models)
    split = split_optimizer(optimizer, fused.split())
    for own, other in zip(split, lone):
        for a, b in zip(own.param_groups[0]["params"], other.param_groups[0]["params"]):
            assert float(own.state[a].get("step", 0)) == float(other.state[b].get("step", 0))


def test_a_parameter_that_never_moved_has_no_state_of_its_own():
    fused = fuse(make_models(Heads, TRIALS))
    optimizer = FusedOptimizer(fused, "adamw", lr=0.1)
    step_fused(fused, optimizer, batch(0, 4, 6))
    model = fused.trial(0)
    lone = split_optimizer(optimizer, [model])[0]
    assert all(parameter not in lone.state for parameter in model.heads[1].parameters())


SWITCHED = {
    "sgd upwards": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, maximize=True),
    "adam upwards": lambda p: torch.optim.Adam(p, lr=0.01, maximize=True),
    "rmsprop upwards": lambda p: torch.optim.RMSprop(p, lr=0.01, maximize=True),
    "adam with decay apart": lambda p: torch.optim.Adam(
        p, lr=0.05, weight_decay=0.1, decoupled_weight_decay=True
    ),
}


@pytest.mark.parametrize("name", SWITCHED)
def test_switches_of_torchs_optimizers_are_kept(name):
    models = make_models(net, TRIALS)
    fused = fuse(copy.deepcopy(models))
    optimizer = fuse_optimizers(fused, [SWITCHED[name](m.parameters()) for m in copy.deepcopy(models)])
    lone = [SWITCHED[name](m.parameters()) for m in models]
    for step in range(5):
        x = batch(step, 4, 5)
        step_fused(fused, optimizer, x)
        for number, model in enumerate(models):
            step_alone(model, lone[number], x[number])
    assert_same(fused, models)


@pytest.mark.parametrize(
    ("switch", "make"),
    [
        ("amsgrad", torch.optim.Adam),
        ("maximize", torch.optim.Adam),
        ("nesterov", lambda p, **o: torch.optim.SGD(p, momentum=0.9, **o)),
        ("centered", torch.optim.RMSprop),
        ("decoupled_weight_decay", torch.optim.Adam),
        ("decoupled_weight_decay", torch.optim.NAdam),
    ],
)
def test_switches_that_differ_between_trials_are_refused(switch, make):
    models = make_models(net, TRIALS)
    lone = [make(m.parameters(), **{switch: bool(number)}) for number, m in enumerate(models)]
    with pytest.raises(FusionError, match=switch):
        fuse_optimizers(fuse(models), lone)


def shuffled(model):
    return [*model[2].parameters(), *model[0].parameters()]


def test_states_find_their_parameters_in_any_order():
    models = make_models(net, TRIALS)
    lone = [torch.optim.Adam(shuffled(m), lr=0.05) for m in models]
    for step in range(3):
        for number, model in enumerate(models):
            step_alone(model, lone[number], batch(step, 4, 5)[number])
    fused = fuse(models)
    optimizer = fuse_optimizers(fused, lone)
    for step in range(3, 6):
        x = batch(step, 4, 5)
        step_fused(fused, optimizer, x)
        for number, model in enumerate(models):
            step_alone(model, lone[number], x[number])
    assert_same(fused, models)


def test_the_state_of_another_model_is_refused():
    models, others = make_models(net, TRIALS), make_models(net, TRIALS, seed=1)
    optimizer = torch.optim.Adam(others[0].parameters())
    step_alone(others[0], optimizer, batch(0, 4, 5)[0])
    with pytest.raises(FusionError, match="the optimizer of the model that was fused"):
        load_trial(FusedOptimizer(fuse(models), "adam"), optimizer, 0)


def test_a_momentum_set_after_the_start_is_restored():
    fused = fuse(make_models(net, TRIALS))
    optimizer = FusedOptimizer(fused, "sgd", lr=0.1)
    optimizer.set(momentum=[0.9, 0.5, 0.0])
    for step in range(3):
        step_fused(fused, optimizer, batch(step, 4, 5))
    again = FusedOptimizer(fused, "sgd", lr=0.1)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for own, other in zip(optimizer.state.values(), again.state.values()):
        assert own["momentum_buffer"].abs().max() > 0
        assert torch.equal(own["momentum_buffer"], other["momentum_buffer"])


@pytest.mark.parametrize("dampening", [0.0, 0.3])
@pytest.mark.parametrize("nesterov", [False, True])
def test_a_momentum_that_begins_late_begins_with_the_gradient(dampening, nesterov):
    # The last trial's dampening keeps torch's kernels away.
    if nesterov and dampening:
        pytest.skip("torch has no nesterov momentum with dampening")
    momenta = {0: 0.0, 3: 0.9, 6: 0.0, 8: 0.8}
    models = make_models(net, TRIALS)
    fused = fuse(copy.deepcopy(models))
    spread = [dampening, dampening, 0.0 if nesterov else 0.1]
    optimizer = FusedOptimizer(fused, "sgd", lr=0.1, momentum=0.5, dampening=spread, nesterov=nesterov)
    lone = [
        torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.5, dampening=d, nesterov=nesterov)
        for m, d in zip(models, spread)
    ]
    for step in range(10):
        if step in momenta:
            optimizer.set(momentum=momenta[step])
            for one in lone:
                one.param_groups[0]["momentum"] = momenta[step]
        x = batch(step, 4, 5)
        step_fused(fused, optimizer, x)
        for number, model in enumerate(models):
            step_alone(model, lone[number], x[number])
    assert_same(fused, models)


def test_a_newcomers_state_begins_with_its_own_hyperparameters():
    fused = fuse(make_models(net, TRIALS))
    optimizer = FusedOptimizer(fused, "adagrad", initial_accumulator_value=[0.5, 2.0, 1.0])
    replace_trial(fused, optimizer, 1, net().double(), 3, {"initial_accumulator_value": 7.0})
    assert all((state["sum"][1] == 7.0).all() for state in optimizer.state.values())


def test_a_tensor_kept_from_another_number_of_trials_is_refused():
    from plait.fusion import keep_trials

    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.GRUCell(6, 5)

        def forward(self, x):
            kept[:] = [self.cell(x, kept[0].detach() if kept else None)]
            return kept[0]

    # Not in the module, where it would be found.
    kept = []

    fused = fuse(make_models(Keeps, TRIALS))
    x = batch(0, 4, 6)
    fused(x)
    keep_trials(fused, FusedOptimizer(fused, "sgd"), [1])
    with pytest.raises(FusionError, match="had 3 trials"):
        fused(x[1:2])


@pytest.mark.parametrize("kind", LONE)
def test_weights_in_bfloat16_move_as_with_torchs_optimizer(kind):
    torch.manual_seed(0)
    lone, rate = [net().bfloat16() for _ in range(TRIALS)], 1.0 if kind == "adadelta" else 0.01
    optimizers = [LONE[kind](m.parameters(), lr=rate, weight_decay=0.1) for m in lone]
    fused = fuse(lone)
    optimizer = FusedOptimizer(fused, kind, lr=rate, weight_decay=0.1)
    before = [p.clone() for p in lone[0].parameters()]
    for _ in range(3):
        # Not computed, as another rounding may have another sign, which is all that Lion takes.
        for together, *apart in zip(fused.parameters(), *(model.parameters() for model in lone)):
            together.grad = torch.randn(together.shape).bfloat16()
            for each, gradient in zip(apart, together.grad):
                each.grad = gradient.clone()
        for each in (optimizer, *optimizers):
            each.step()
    assert any(not torch.equal(p, first) for p, first in zip(lone[0].parameters(), before))
    for own, model in zip(fused.split(), lone):
        for found, wanted in zip(own.parameters(), model.parameters()):
            torch.testing.assert_close(found, wanted, rtol=0.02, atol=0.01)
