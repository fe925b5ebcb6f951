"""Training loops around fused modules that go their own ways: right as alone, or refused in words."""

from __future__ import annotations

import collections
import copy
import itertools
import logging
import random

import numpy
import pytest
import torch
from fused_checks import CLOSE, fuse, make_models
from test_fused_optimizer_states import assert_same, batch, net, step_alone, step_fused
from torch import nn
from torch.nn.utils import prune
from torch.optim import lr_scheduler

import plait
from plait.fusion import FusedOptimizer, FusionError, keep_trials, replace_trial
from plait.fusion.dispatch.fallback import python_marks

TRIALS = 3
RATES = [0.01, 0.02, 0.05]
TORCHS = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adagrad": torch.optim.Adagrad}


def arrays(kind="adam", **options):
    """A fused module with its optimizer, and the same trials alone."""
    models = make_models(net, TRIALS)
    fused = fuse(copy.deepcopy(models))
    lone = [TORCHS[kind](m.parameters(), lr=rate, **options) for m, rate in zip(models, RATES)]
    return fused, FusedOptimizer(fused, kind, lr=RATES, **options), models, lone


@pytest.mark.parametrize("kind", TORCHS)
def test_gradients_that_a_loop_assigns_may_have_any_layout(kind):
    fused, optimizer, models, lone = arrays(kind)
    for step in range(3):
        x = batch(step, 4, 5)
        for p, g in zip(fused.parameters(), torch.autograd.grad(fused(x).square().sum(), fused.parameters())):
            turned = g.movedim(0, -1).contiguous().movedim(-1, 0)
            p.grad = turned if step == 1 else g
        optimizer.step()
        for model, own, inputs in zip(models, lone, x):
            own.zero_grad()
            model(inputs).square().sum().backward()
            own.step()
    assert_same(fused, models)


@pytest.mark.parametrize("reset", [dict.clear, None])
def test_clearing_an_optimizers_state_begins_anew_as_in_torch(reset):
    fused, optimizer, models, lone = arrays()
    for step in range(6):
        if step == 3:
            for each in (optimizer, *lone):
                if reset is None:
                    each.state = collections.defaultdict(dict)
                else:
                    reset(each.state)
        x = batch(step, 4, 5)
        step_fused(fused, optimizer, x)
        for model, own, inputs in zip(models, lone, x):
            step_alone(model, own, inputs)
    assert_same(fused, models)


def test_gradients_that_were_accumulated_stay_when_trials_leave_and_go_with_the_replaced():
    fused, optimizer, models, lone = arrays("sgd")
    order = [2, 0]
    first, second = batch(0, 4, 5), batch(1, 4, 5)
    fused(first).square().sum().backward()
    keep_trials(fused, optimizer, order)
    replace_trial(fused, optimizer, 1, copy.deepcopy(models[1]), 1, {"lr": RATES[1]})
    fused(second[[2, 1]]).square().sum().backward()
    optimizer.step()
    models[2](first[2]).square().sum().backward()
    for number in (2, 1):
        models[number](second[number]).square().sum().backward()
        lone[number].step()
    assert_same(fused, [models[2], models[1]])


SCHEDULERS = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
    "step": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "warmup": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.LambdaLR(o, lambda e: 0.9**e)], [3]
    ),
}


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("order", [[2, 0, 1], [2, 2, 0], [1]], ids=str)
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_of_all_trials_follows_them_to_other_places(name, order, resumed):
    fused = fuse(make_models(net, TRIALS))
    optimizer = FusedOptimizer(fused, "sgd", lr=RATES)
    lone = [torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=rate) for rate in RATES]
    schedules = [SCHEDULERS[name](each) for each in (optimizer, *lone)]
    if resumed:
        states = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(schedules[0].state_dict())
        optimizer.load_state_dict(states[0])
        schedules[0].load_state_dict(states[1])
    for step in range(5):
        if step == 2:
            keep_trials(fused, optimizer, order)
        for each in (optimizer, *lone, *schedules):
            each.step()
    found = optimizer.param_groups[0]["lr"]
    wanted = [lone[number].param_groups[0]["lr"] for number in order]
    assert (list(found.values) if len(order) > 1 else [found]) == pytest.approx(wanted)


@pytest.mark.parametrize("rates", [RATES, 0.1])
def test_a_scheduler_of_all_trials_goes_on_from_the_rate_of_one_that_joins(rates):
    fused = fuse(make_models(net, TRIALS))
    optimizer = FusedOptimizer(fused, "sgd", lr=rates)
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
    before = [0.1] * TRIALS if rates == 0.1 else RATES
    replace_trial(fused, optimizer, 1, make_models(net, 1)[0], 9, {"lr": 0.4})
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"].values == pytest.approx([before[0] / 2, 0.2, before[2] / 2])


def test_a_copy_of_an_optimizer_with_a_scheduler_steps_its_own_module():
    fused, optimizer, *_ = arrays()
    lr_scheduler.StepLR(optimizer, 2)
    copied, own = copy.deepcopy((fused, optimizer))
    before = [p.detach().clone() for p in (*fused.parameters(), *copied.parameters())]
    step_fused(copied, own, batch(0, 4, 5))
    moved = [not torch.equal(p, b) for p, b in zip((*fused.parameters(), *copied.parameters()), before)]
    assert moved == [False] * (len(moved) // 2) + [True] * (len(moved) // 2)


def test_a_copy_draws_other_numbers_than_its_original():
    fused = fuse([nn.Dropout() for _ in range(2)])
    copied, x = copy.deepcopy(fused), torch.ones(2, 64)
    assert not torch.equal(fused(x), copied(x))


def test_steps_without_a_training_forward_draw_unlike_numbers():
    fused = fuse([nn.Linear(4, 4) for _ in range(2)]).eval()
    optimizers, x, drawn = [FusedOptimizer(fused, "sgd", lr=0.1) for _ in range(2)], torch.ones(2, 8), []
    for _ in range(3):
        for optimizer in optimizers:
            drawn += [fused.map(torch.rand_like, x), fused.call(lambda _, x: torch.rand_like(x), x)]
            optimizer.step()
    assert all(len(trial.unique()) == trial.numel() for trial in torch.cat(drawn, 1))


def test_a_fused_module_is_not_called_where_there_is_one_trial():
    fused, other = fuse(make_models(net, TRIALS)), plait.fuse(make_models(net, TRIALS))
    x = batch(0, 4, 5)
    for call in (
        lambda: fused.map(lambda x: fused(x).mean().sqrt(), x),
        lambda: fused.call(lambda model, x: other(x).mean(), x),
        lambda: fused.map(lambda x: other.map(torch.sin, x), x),
    ):
        with pytest.raises(FusionError, match=r"calls a fused module within .*call it on the result: other"):
            call()


def test_what_is_meant_for_one_model_is_refused_on_all_trials_at_once():
    class Scaled(nn.Linear):
        temperature = 1.0

    fused, other = (fuse([Scaled(4, 4) for _ in range(2)]) for _ in range(2))
    optimizer = FusedOptimizer(fused, "sgd", lr=0.1, params=[*fused.parameters(), *other.parameters()])
    fused(torch.randn(2, 3, 4)).sum().backward()
    for message, call in {
        r"set that of all trials: fused\.module\.temperature": lambda: setattr(fused, "temperature", 2.0),
        r"call it on each model before these are fused": lambda: fused.apply(nn.init.xavier_uniform_),
        r"found one with other parameters": lambda: keep_trials(fused, optimizer, [1, 0]),
        r"trials would be clipped by their common norm": lambda: nn.utils.clip_grads_with_norm_(
            fused.parameters(), 1.0, torch.ones(())
        ),
        r"adam takes no 'fused'": lambda: FusedOptimizer(fused, "adam", fused=True),
        r"found lr = \[nan, nan\]": lambda: optimizer.set(lr=float("nan")),
    }.items():
        with pytest.raises(FusionError, match=message):
            call()
    fused.note = "one's own attributes may be set"
    assert (fused.module.temperature, fused.note) == (1.0, "one's own attributes may be set")


@pytest.mark.parametrize("draw", [random.random, numpy.random.rand])
def test_draws_from_pythons_generators_are_warned_of_once(draw, caplog):
    class Skips(nn.Linear):
        def forward(self, x):
            return super().forward(x) * (1.0 if draw() < 2.0 else 0.0)

    fused, x = plait.fuse([Skips(4, 4) for _ in range(2)]), torch.randn(2, 3, 4)
    with caplog.at_level(logging.WARNING, "plait"):
        for _ in range(9):
            fused(x)
    assert [record.getMessage()[:9] for record in caplog.records] == ["the model"]
    caplog.clear()
    other = fuse([nn.Linear(4, 4) for _ in range(2)])
    other(x)
    assert not caplog.records
    other.map(lambda x: x * draw(), x)
    assert caplog.records[0].getMessage().startswith("a function given to fused.map drew from Python's")
    assert torch.allclose(other(x), other(x), **CLOSE)


def test_weights_that_two_fused_modules_would_train_apart_are_warned_of(caplog):
    shared = make_models(net, TRIALS)
    first, second = ([nn.Sequential(part, nn.Linear(5, 2)) for part in shared] for _ in range(2))
    kept = fuse(first)
    fuse(first)
    assert not caplog.records
    fuse(second)
    assert "0.0.weight and" in caplog.text
    assert "tied no more" in caplog.text
    caplog.clear()
    del kept
    fuse([nn.Sequential(part) for part in shared])
    for part in shared:
        part.requires_grad_(False)
    assert all((fuse(first), fuse(second)))
    assert not caplog.records


def replace_last(fused):
    fused.module[-1] = nn.Linear(5, TRIALS)


def train_functional(fused):
    state = {name: p.detach() for name, p in fused.named_parameters()}

    def loss(state):
        return torch.func.functional_call(fused, state, (torch.ones(TRIALS, 4, 4),)).sum()

    return torch.func.grad(loss)(state)


CHANGED = {
    "replaced": (replace_last, "weight' came into it after fusing"),
    "added": (lambda fused: fused.module.append(nn.Linear(3, 3)), "weight' came into it after fusing"),
    "pruned": (
        lambda fused: prune.l1_unstructured(fused.module[0], "weight", 0.3),
        r"'0\.weight(' was taken away|_orig' came into it)",
    ),
    "transformed": (train_functional, "within a transform of torch.func"),
    "traced": (lambda fused: torch.jit.trace(fused, torch.ones(TRIALS, 4, 4)), "torch.jit.trace does not"),
}


@pytest.mark.parametrize("is_called", [False, True])
@pytest.mark.parametrize("case", CHANGED)
def test_what_is_done_to_layers_after_fusing_is_refused_in_words(case, is_called):
    change, message = CHANGED[case]
    fused = plait.fuse([nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)) for _ in range(TRIALS)])
    x = torch.ones(TRIALS, 4, 4)
    if is_called:
        fused(x)

    def call_changed():
        change(fused)
        fused(x)

    with pytest.raises(FusionError, match=message):
        call_changed()


def test_each_draw_of_a_normal_number_by_numpy_is_noticed():
    marks = [python_marks()]
    for _ in range(4):  # two are made at once
        numpy.random.randn()
        marks.append(python_marks())
    assert all(one != other for one, other in itertools.pairwise(marks))
    assert python_marks() == marks[-1]
