"""The first call of a fused module compares its trials with the models that it was made of."""

from __future__ import annotations

import copy
import gc
import logging
import weakref
from contextlib import nullcontext

import pytest
import torch
from fused_checks import CLOSE, make_models
from test_fused_verification import BATCHES, Block, Looks, Resets, Shapes
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from plait.fusion import FusedOptimizer, FusionError, Shared, add_trials, fuse, keep_trials
from plait.fusion.verify.verifier import _Verifier

X = torch.stack([BATCHES[0], BATCHES[1], BATCHES[0] + BATCHES[1]])


def norm_net():
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 2))


def trained(fused, steps=3, **options):
    optimizer = FusedOptimizer(fused, "sgd", lr=0.1, **options)
    for _ in range(steps):
        optimizer.zero_grad()
        fused(X).square().mean((1, 2)).sum().backward()
        optimizer.step()
    return fused


def test_a_module_that_cannot_be_fused_runs_trial_by_trial_from_the_first_call_on(caplog):
    caplog.set_level(logging.INFO, "plait.fusion.fusing")
    models = make_models(lambda: Block(Looks()))
    fused = trained(fuse(models))
    assert list(fused.unfused) == ["part"]
    assert caplog.text.count("compared 3 fused trials with the single models in") == 1
    assert "part runs trial by trial" in caplog.text
    for number, model in enumerate(models):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(X[number]).square().mean().backward()
            optimizer.step()
        for found, wanted in zip(fused.trial(number).parameters(), model.parameters()):
            torch.testing.assert_close(found, wanted, **CLOSE)


def test_nothing_is_left_of_it_in_the_fused_module_the_models_or_random_numbers():
    models = make_models(lambda: nn.Sequential(norm_net(), Resets()))
    before = copy.deepcopy(models)
    unverified = trained(fuse(copy.deepcopy(models), range(3), unfused=["1"], verify=False))
    torch.manual_seed(3)
    fused = trained(fuse(models, range(3)))
    assert list(fused.unfused) == ["1"]
    drawn = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(1))
    for found, wanted in zip(fused.state_dict().values(), unverified.state_dict().values()):
        torch.testing.assert_close(found, wanted, **CLOSE)
    for model, own in zip(models, before):
        assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), own.state_dict().values()))
        assert all(parameter.grad is None for parameter in model.parameters())
        assert model[1].before == 1.0
        assert model.training


def test_models_that_cannot_run_together_are_refused_at_the_first_call_and_nothing_compares_on_request():
    fused = fuse(make_models(Shapes))
    with pytest.raises(FusionError, match="cannot be fused: .*train each alone"):
        fused(X)
    with pytest.raises(FusionError, match="selects elements by a mask"):
        fuse(make_models(Shapes), verify=False)(X)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, nullcontext])
@pytest.mark.parametrize("training", [True, False])
def test_calls_without_gradients_and_in_evaluation_compare_training_too(context, training):
    fused = fuse(make_models(lambda: Block(Looks()))).train(training)
    with context():
        fused(X.clone()) if training else fused(Shared(X[0].clone()))
    assert list(fused.unfused) == ["part"]
    assert fused.training is training


def test_weights_modes_and_types_are_those_of_the_call_not_those_of_the_models():
    models = make_models(norm_net)
    fused = fuse(models).float()
    other = fuse(make_models(norm_net, seed=5), verify=False).float()
    fused.load_state_dict(other.state_dict())
    fused.module[1].eval()
    fused.module[0].requires_grad_(False)
    fused(X.float())
    assert fused.unfused == {}
    assert models[0][0].weight.dtype == torch.float64
    assert models[0][1].training
    assert models[0][0].weight.requires_grad


def test_trials_may_come_and_go_before_it():
    models = make_models(lambda: Block(Looks()), 3)
    fused = fuse(models)
    optimizer = FusedOptimizer(fused, "sgd", lr=0.1)
    keep_trials(fused, optimizer, [2, 0])
    add_trials(fused, optimizer, make_models(lambda: Block(Looks()), 1, seed=9), [7])
    fused(X)
    assert list(fused.unfused) == ["part"]


def test_it_waits_for_a_call_that_can_be_repeated_and_then_lets_go_of_the_models():
    models = make_models(norm_net)
    fused = fuse(models)
    last = weakref.ref(models[2])
    with FakeTensorMode(allow_non_fake_inputs=True):
        fused(X)
    assert fused.first_call is not None
    with fused.padded([2, 4, 4]):
        fused(X)
    assert fused.first_call is not None
    fused(X)
    assert fused.first_call is None
    del models
    gc.collect()
    assert last() is None


def test_a_call_of_ones_own_is_compared_as_it_is_called():
    fused = fuse(make_models(lambda: Block(Looks())))
    fused.call(lambda model, x: model.part(model.first(x)), X)
    assert list(fused.unfused) == ["part"]


def test_what_shows_no_numbers_is_not_compared_and_said_so(caplog):
    class Box:
        def __init__(self, value):
            self.value = value

    class Boxed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 2)

        def forward(self, x):
            return Box(self.layer(x))

    fused = fuse(make_models(Boxed))
    assert fused.map(lambda box: box.value.sum(), fused(X)).shape == (3,)
    assert "not verified: verify: the model returns a Box" in caplog.text


def test_one_model_several_times_is_compared_like_several():
    model = make_models(norm_net, 1)[0]
    fused = fuse([model] * 3)
    fused(X)
    assert fused.unfused == {}


def test_every_trial_is_compared(monkeypatch):
    monkeypatch.setattr("plait.fusion.check.different_attributes", lambda first, other: [])
    models = make_models(lambda: Block(Scaled(1)), 5)
    models[1].part.scale = 2
    fused = fuse(models)
    fused(torch.cat([X, X[:2]]))
    assert list(fused.unfused) == ["part"]


class Scaled(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def forward(self, x):
        return x * self.scale


def test_the_models_themselves_are_run_not_copies_of_them(monkeypatch):
    """Where copies of wrapped functions call into what was copied, both sides would be wrong alike."""
    monkeypatch.setattr("plait.fusion.copies.copied_closures", lambda module: nullcontext())
    models = make_models(lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh()))
    for model in models:
        model[0].forward = (lambda forward: lambda x: 2 * forward(x))(model[0].forward)
    fused = fuse(models)
    with pytest.raises(FusionError, match="cannot be fused"):
        fused(X)


def test_where_memory_is_short_trials_are_compared_a_few_at_a_time(monkeypatch, caplog):
    caplog.set_level(logging.INFO, "plait.fusion.fusing")
    widths = []

    def short(check, fused, phase, trace=None):
        widths.append(fused.trials)
        if fused.trials > 2:
            raise torch.OutOfMemoryError("no memory")
        return together(check, fused, phase, trace)

    together = _Verifier._together
    monkeypatch.setattr(_Verifier, "_together", short)
    fused = fuse(make_models(lambda: Block(Looks())))
    fused(X)
    assert max(widths) == 3
    assert set(widths[1:]) == {1, 2}
    assert list(fused.unfused) == ["part"]
    assert "compared 3 fused trials" in caplog.text
