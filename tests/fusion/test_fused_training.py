"""Training: each trial of a fused array ends where the same trial ends alone, in float64 to 1e-10."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from fused_checks import CLOSE, fuse, make_models
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import plait
from plait.fusion import FusedOptimizer, FusionError, fuse_optimizers, split_optimizer
from plait.workloads import alexnet, bert, lstm, mlp, mobilenet, pointnet, resnet, transformer, vgg
from support.further import but_further

TRIALS = 3
KINDS = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
    "adadelta": torch.optim.Adadelta,
    "nadam": torch.optim.NAdam,
    "lion": plait.Lion,
    "adafactor": torch.optim.Adafactor,
    "muon": torch.optim.Muon,
}


def small():
    return nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def small_for(kind):
    """Muon takes nothing but matrices: one is wide, one tall."""
    layers = nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 3, bias=False)
    return nn.Sequential(*layers) if kind == "muon" else small()


def batches(steps, shape=(5, 6), classes=3, trials=TRIALS, seed=7, tokens=None):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        if tokens is None:
            x = torch.randn(trials, *shape, dtype=torch.float64, generator=generator)
            y = torch.randint(0, classes, (trials, shape[0]), generator=generator)
        else:
            x = torch.randint(0, tokens, (trials, *shape), generator=generator)
            y = torch.randint(0, tokens, (trials, *shape), generator=generator)
        yield x, y


def loss_of(logits, target):
    return F.cross_entropy(logits.flatten(0, -2), target.flatten())


def train_fused(fused, optimizer, data):
    for x, y in data:
        optimizer.zero_grad()
        fused.map(loss_of, fused(x), y).sum().backward()
        optimizer.step()


def train_alone(model, optimizer, data, number, clip=None):
    for x, y in data:
        optimizer.zero_grad()
        loss_of(model(x[number]), y[number]).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


def assert_same_state(found: nn.Module, wanted: nn.Module, tolerance=None):
    for (name, a), b in zip(found.state_dict().items(), wanted.state_dict().values()):
        torch.testing.assert_close(a, b, msg=lambda m, n=name: f"{n}: {m}", **(tolerance or CLOSE))


# Steps too large for the problem are chaotic: they double the last digit's rounding step by step.
rates = st.floats(1e-4, 0.05)
scaled_rates = st.floats(1e-4, 0.01)
OPTIONS = {
    "sgd": st.fixed_dictionaries(
        {"lr": rates, "momentum": st.sampled_from([0.0, 0.5, 0.9]), "weight_decay": st.floats(0, 0.1)}
    ),
    "adam": st.fixed_dictionaries(
        {
            "lr": scaled_rates,
            "betas": st.tuples(st.floats(0.5, 0.99), st.floats(0.8, 0.9999)),
            "eps": st.floats(1e-8, 1e-3),
            "weight_decay": st.floats(0, 0.1),
        }
    ),
    "rmsprop": st.fixed_dictionaries(
        {
            "lr": scaled_rates,
            "alpha": st.floats(0.9, 0.999),
            "eps": st.floats(1e-3, 1e-2),
            "momentum": st.sampled_from([0.0, 0.9]),
            "weight_decay": st.floats(0, 0.1),
        }
    ),
    "adagrad": st.fixed_dictionaries(
        {"lr": rates, "lr_decay": st.floats(0, 0.1), "weight_decay": st.floats(0, 0.1)}
    ),
    "adadelta": st.fixed_dictionaries(
        {"lr": st.floats(0.1, 2), "rho": st.floats(0.5, 0.99), "weight_decay": st.floats(0, 0.1)}
    ),
}
betas = st.tuples(st.floats(0.5, 0.99), st.floats(0.8, 0.9999))
OPTIONS |= {
    "adamw": OPTIONS["adam"],
    "nadam": st.fixed_dictionaries(
        {
            "lr": scaled_rates,
            "betas": betas,
            "eps": st.floats(1e-8, 1e-3),
            "weight_decay": st.floats(0, 0.1),
            "momentum_decay": st.floats(0, 0.1),
        }
    ),
    "lion": st.fixed_dictionaries({"lr": scaled_rates, "betas": betas, "weight_decay": st.floats(0, 0.1)}),
    "adafactor": st.fixed_dictionaries(
        {
            "lr": rates,
            "beta2_decay": st.floats(-0.9, -0.5),
            "eps": st.tuples(st.sampled_from([None, 1e-8, 1e-3]), st.floats(1e-4, 1e-1)),
            "d": st.floats(1, 2),
            "weight_decay": st.floats(0, 0.1),
        }
    ),
    "muon": st.fixed_dictionaries(
        {
            "lr": rates,
            "weight_decay": st.floats(0, 0.1),
            "momentum": st.sampled_from([0.0, 0.5, 0.95]),
            "eps": st.floats(1e-8, 1e-3),
        }
    ),
}
COMMON = {
    "sgd": st.fixed_dictionaries({"nesterov": st.just(False)}),
    "adam": st.fixed_dictionaries({"amsgrad": st.booleans()}),
    "adamw": st.fixed_dictionaries({"amsgrad": st.booleans()}),
    "rmsprop": st.fixed_dictionaries({"centered": st.booleans()}),
    "adagrad": st.just({}),
    "adadelta": st.just({}),
    "nadam": st.fixed_dictionaries({"decoupled_weight_decay": st.booleans(), "maximize": st.booleans()}),
    "lion": st.fixed_dictionaries({"maximize": st.booleans()}),
    "adafactor": st.fixed_dictionaries({"maximize": st.booleans()}),
    "muon": st.fixed_dictionaries(
        {
            "nesterov": st.booleans(),
            "ns_steps": st.integers(1, 6),
            "ns_coefficients": st.sampled_from([(3.4445, -4.775, 2.0315), (2.0, -1.5, 0.5)]),
            "adjust_lr_fn": st.sampled_from([None, "original", "match_rms_adamw"]),
        }
    ),
}


def vectors(options):
    return {name: [one[name] for one in options] for name in options[0]}


@settings(max_examples=2)
@given(draw=st.data())
@pytest.mark.parametrize("kind", KINDS)
def test_twenty_steps_equal_those_of_torchs_optimizer(kind, draw):
    options = draw.draw(st.lists(OPTIONS[kind], min_size=TRIALS, max_size=TRIALS))
    common = draw.draw(COMMON[kind])
    clips = draw.draw(st.lists(st.floats(0.05, 5), min_size=TRIALS, max_size=TRIALS))
    models = make_models(lambda: small_for(kind))
    fused = fuse(models)
    train_fused(
        fused, FusedOptimizer(fused, kind, clip_norm=clips, **vectors(options), **common), batches(20)
    )
    for number, model in enumerate(models):
        lone = KINDS[kind](model.parameters(), **options[number], **common)
        train_alone(model, lone, batches(20), number, clips[number])
        assert_same_state(fused.trial(number), model)


def test_nesterov_and_dampening_are_those_of_torch():
    models = make_models(small)
    fused = fuse(models)
    momenta = [0.5, 0.9, 0.99]
    train_fused(fused, FusedOptimizer(fused, "sgd", lr=0.05, momentum=momenta, nesterov=True), batches(20))
    for number, model in enumerate(models):
        lone = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momenta[number], nesterov=True)
        train_alone(model, lone, batches(20), number)
        assert_same_state(fused.trial(number), model)
    models = make_models(small)
    fused = fuse(models)
    dampening = [0.0, 0.3, 0.6]
    train_fused(fused, FusedOptimizer(fused, "sgd", lr=0.05, momentum=0.9, dampening=dampening), batches(20))
    for number, model in enumerate(models):
        lone = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, dampening=dampening[number])
        train_alone(model, lone, batches(20), number)
        assert_same_state(fused.trial(number), model)


IMAGES = {"shape": (4, 1, 8, 8), "classes": 10}
TEXT = {"shape": (2, 5), "tokens": 64}
# (model, its data, steps): 50 steps of the smallest, fewer of the deep ones, to hold the budget of the tests.
WORKLOADS = {
    "mlp": (mlp.mlp_tiny, IMAGES, 50),
    "alexnet": (alexnet.alexnet_tiny, IMAGES, 20),
    "vgg": (vgg.vgg16_tiny, IMAGES, 20),
    "resnet18": (resnet.resnet18_tiny, IMAGES, 10),
    # Its norms over four images make rounding grow threefold a step.
    "resnet50": (resnet.resnet50_tiny, IMAGES, 6),
    "resnet56": (resnet.resnet56_tiny, IMAGES, 10),
    "mobilenet v2": (mobilenet.mobilenet_v2_tiny, IMAGES, 10),
    "mobilenet v3": (mobilenet.mobilenet_v3_large_tiny, IMAGES, 10),
    "lstm": (lambda: lstm.lstm_tiny(64, tied=True), TEXT, 20),
    "transformer": (lambda: transformer.transformer_tiny(64), TEXT, 20),
    "bert": (lambda: bert.bert_tiny(64), TEXT, 20),
    # In small batches its norms over a handful of clouds double the rounding at each step.
    "pointnet": (pointnet.pointnet_tiny, {"shape": (16, 3, 12), "classes": 10}, 10),
}


# Their layers are those of the deeper and the newer one that stay.
MORE = {"alexnet", "vgg", "resnet18", "resnet50", "resnet56", "mobilenet v2"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.extended] * (name in MORE)) for name in WORKLOADS]
)
def test_the_workloads_train_as_they_do_alone(name):
    make, shape, steps = WORKLOADS[name]
    models = make_models(make)
    fused = fuse(models)
    rates = [0.01, 0.03, 0.1]
    train_fused(fused, FusedOptimizer(fused, "sgd", lr=rates, momentum=0.9), batches(steps, **shape))
    for number, model in enumerate(models):
        lone = torch.optim.SGD(model.parameters(), lr=rates[number], momentum=0.9)
        train_alone(model, lone, batches(steps, **shape), number)
        assert_same_state(fused.trial(number), model)


DROPPING = {
    "alexnet": (lambda: alexnet.alexnet_tiny(dropout=0.3), IMAGES),
    "lstm": (lambda: lstm.lstm(64, 16, dropout=0.4), TEXT),
    "transformer": (lambda: transformer.transformer(64, 16, 1, 2, 16, dropout=0.2), TEXT),
}


# Dropout of images is what it is in a transformer; that between the layers of an LSTM is torch's own.
@pytest.mark.parametrize("name", but_further(DROPPING, "alexnet"))
def test_dropout_trains_each_trial_as_it_does_alone(name):
    make, shape = DROPPING[name]
    models = make_models(make)
    fused = fuse(models, seeds=[11, 12, 13])
    rates = [0.01, 0.02, 0.05]
    # A large epsilon: the gradient of an attention's key bias is truly zero, and what rounding makes of it
    # would be blown up to a whole step.
    options = {"eps": 1e-3}
    train_fused(fused, FusedOptimizer(fused, "adamw", lr=rates, **options), batches(20, **shape))
    for number, model in enumerate(models):
        lone = fuse([model], seeds=[11 + number])
        own = ((x[number : number + 1], y[number : number + 1]) for x, y in batches(20, **shape))
        train_fused(lone, FusedOptimizer(lone, "adamw", lr=rates[number], **options), own)
        assert_same_state(fused.trial(number), lone.trial(0))


def test_a_schedule_is_a_vector():
    models = make_models(small)
    fused = fuse(models)
    optimizer = FusedOptimizer(fused, "sgd", momentum=0.9)
    schedule = [lambda s: 0.1 * 0.9**s, lambda s: 0.05, lambda s: 0.01 * (s + 1)]
    for step, batch in enumerate(batches(20)):
        optimizer.set(lr=[rate(step) for rate in schedule])
        train_fused(fused, optimizer, [batch])
    for number, model in enumerate(models):
        lone = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
        for step, batch in enumerate(batches(20)):
            lone.param_groups[0]["lr"] = schedule[number](step)
            train_alone(model, lone, [batch], number)
        assert_same_state(fused.trial(number), model)


@pytest.mark.parametrize("kind", KINDS)
def test_a_trial_that_has_made_its_steps_stands_still(kind):
    models = make_models(lambda: small_for(kind))
    fused = fuse(models)
    optimizer = FusedOptimizer(fused, kind, lr=0.02, weight_decay=0.01, steps=[4, 10, 7])
    train_fused(fused, optimizer, batches(10))
    for number, (model, steps) in enumerate(zip(models, (4, 10, 7))):
        lone = KINDS[kind](model.parameters(), lr=0.02, weight_decay=0.01)
        train_alone(model, lone, batches(steps), number)
        assert_same_state(fused.trial(number), model)
    assert optimizer.steps.tolist() == [4, 10, 7]


def test_a_trial_that_is_no_number_any_more_leaves_the_others_alone():
    models = make_models(small)
    fused = fuse(models)
    optimizer = FusedOptimizer(fused, "adam", lr=[0.01, float("inf"), 0.01], clip_norm=1.0)
    train_fused(fused, optimizer, batches(10))
    assert fused.module[0].weight[1].isnan().any()
    for number in (0, 2):
        lone = torch.optim.Adam(models[number].parameters(), lr=0.01)
        train_alone(models[number], lone, batches(10), number, clip=1.0)
        assert_same_state(fused.trial(number), models[number])


@pytest.mark.parametrize("kind", KINDS)
def test_split_trials_go_on_in_plain_torch_and_come_back_at_other_ages(kind):
    models = make_models(lambda: small_for(kind))
    momentum = {"momentum": [0.9, 0.0, 0.5]} if kind in ("sgd", "rmsprop") else {}
    fused = fuse(models)
    optimizer = FusedOptimizer(fused, kind, lr=[0.01, 0.02, 0.05], **momentum)
    train_fused(fused, optimizer, batches(5))
    modules = fused.split()
    loaded = []
    for number, (module, split) in enumerate(zip(modules, split_optimizer(optimizer, modules))):
        fresh = KINDS[kind](module.parameters(), lr=1.0)
        fresh.load_state_dict(split.state_dict())
        train_alone(module, fresh, batches(number, seed=number), number)
        loaded.append(fresh)
    again = fuse(modules)
    train_fused(again, fuse_optimizers(again, loaded), batches(5, seed=9))
    for number, model in enumerate(models):
        options = {name: values[number] for name, values in momentum.items()}
        lone = KINDS[kind](model.parameters(), lr=[0.01, 0.02, 0.05][number], **options)
        for data in (batches(5), batches(number, seed=number), batches(5, seed=9)):
            train_alone(model, lone, data, number)
        # What torch has of NAdam's momentum in float32, it loads in the type of the weights.
        assert_same_state(
            again.trial(number), model, {"rtol": 1e-6, "atol": 1e-7} if kind == "nadam" else None
        )


def test_a_saved_array_goes_on_where_it_was(tmp_path):
    arrays = []
    for _ in range(2):
        fused = fuse(make_models(small))
        arrays.append((fused, FusedOptimizer(fused, "adamw", lr=[0.01, 0.02, 0.05], steps=[4, 9, 9])))
    train_fused(*arrays[0], batches(5))
    torch.save([arrays[0][0].state_dict(), arrays[0][1].state_dict()], tmp_path / "array.pt")
    weights, state = torch.load(tmp_path / "array.pt")
    arrays[1][0].load_state_dict(weights)
    arrays[1][1].load_state_dict(state)
    for fused, optimizer in arrays:
        train_fused(fused, optimizer, batches(5, seed=9))
    assert_same_state(arrays[1][0], arrays[0][0])


def test_float32_stays_within_rounding_and_bfloat16_keeps_float32_coefficients():
    models = [model.float() for model in make_models(small)]
    fused = fuse(models)
    data = [(x.float(), y) for x, y in batches(10)]
    train_fused(fused, FusedOptimizer(fused, "adam", lr=0.01), data)
    for number, model in enumerate(models):
        train_alone(model, torch.optim.Adam(model.parameters(), lr=0.01), data, number)
        assert_same_state(fused.trial(number), model, {"rtol": 1e-3, "atol": 1e-4})
    half = fuse([nn.Linear(4, 4).bfloat16() for _ in range(2)])
    optimizer = FusedOptimizer(half, "sgd", lr=[0.1, 0.001])
    before = half.module.weight.detach().clone().float()
    half(torch.ones(2, 3, 4, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    expected = (
        before - torch.tensor([0.1, 0.001]).view(2, 1, 1) * half.module.weight.grad.float()
    ).bfloat16()
    assert half.module.weight.dtype == torch.bfloat16
    torch.testing.assert_close(half.module.weight, expected)


def test_wrong_hyperparameters_are_refused_with_what_would_fit():
    fused = fuse(make_models(small))
    with pytest.raises(FusionError, match="lr has 2 values.*3 trials"):
        FusedOptimizer(fused, "sgd", lr=[0.1, 0.2])
    with pytest.raises(FusionError, match="'momentun'.*did you mean 'momentum'"):
        FusedOptimizer(fused, "sgd", momentun=0.9)
    with pytest.raises(FusionError, match="'adm'.*did you mean 'adam'"):
        FusedOptimizer(fused, "adm")
