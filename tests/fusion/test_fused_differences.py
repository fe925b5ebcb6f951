"""Models that look alike and act differently: fused as one of them, all would train as that one."""

from __future__ import annotations

import dataclasses
import functools
import operator
import random
import types

import numpy
import pytest
import torch
from fused_checks import fuse
from torch import nn

from plait.fusion import FusionError, group_by_shape
from support.hard_models import TiedByMemory, ViewedBuffer


@dataclasses.dataclass(slots=True)
class Options:
    scale: float


class Slotted:
    __slots__ = ("scale",)

    def __init__(self, scale):
        self.scale = scale


class Holder:
    def __init__(self, scale):
        self.scale = scale

    def times(self, x):
        return x * self.scale


def class_of(scale):
    class Local:
        def times(self, x):
            return x * scale

    return Local


# A value in an attribute of a model, by a number of its own.
KEPT = {
    "a dataclass with slots": Options,
    "an object with slots": Slotted,
    "a scalar of numpy": numpy.float32,
    "an integer of numpy": numpy.int64,
    "a generator of numpy": numpy.random.default_rng,
    "an old generator of numpy": numpy.random.RandomState,
    "a generator of Python": random.Random,
    "an itemgetter": operator.itemgetter,
    "a class of the same name": class_of,
    "an object of such a class": lambda k: class_of(k)(),
    "a method of an object": lambda k: Holder(k).times,
    "a cached function": lambda k: functools.lru_cache(lambda x: x * k),
    "a module in a list": lambda k: [nn.Dropout(k / 10)],
    "weights in a list": lambda k: [nn.Linear(k, 2)],
    "a sparse tensor in a list": lambda k: [torch.eye(2).to_sparse() * k],
    "a namespace in a dictionary": lambda k: {"options": types.SimpleNamespace(scale=k)},
}


class Keeping(nn.Module):
    def __init__(self, kept):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.kept = kept

    def forward(self, x):
        return self.layer(x)


@pytest.mark.parametrize("name", KEPT)
def test_a_value_that_differs_is_refused_by_name_and_equal_ones_are_fused(name):
    def made(k):
        torch.manual_seed(k)
        return Keeping(KEPT[name](k))

    with pytest.raises(FusionError, match=r"the model\.kept is .* in model 0 and .* in model 2"):
        fuse([made(1), made(1), made(2)])
    fuse([made(1), made(1)])
    assert [len(group) for group in group_by_shape([made(1), made(2), made(1)], lambda m: m)] == [2, 1]


def test_what_cannot_be_compared_is_refused_and_shared_between_models_it_is_fused():
    opened = [(x for x in range(3)) for _ in range(2)]
    with pytest.raises(FusionError, match="other values must be comparable"):
        fuse([Keeping(one) for one in opened])
    fuse([nn.Sequential(nn.Linear(2, 2), nn.Tanh()) for _ in range(2)])
    fuse([Keeping(torch.nn.functional.relu), Keeping(torch.nn.functional.relu)])


def scale_layer(scale):
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x):
            return x * self.weight * scale

    return Scale()


def test_modules_of_classes_with_one_name_are_the_same_where_they_define_the_same():
    with pytest.raises(FusionError, match=r"differ in their modules: '' is .*Scale \(made at run time\)"):
        fuse([scale_layer(1.0), scale_layer(2.0)])
    fuse([scale_layer(2.0), scale_layer(2.0)])


def test_a_forward_of_ones_own_that_differs_is_refused():
    models = [nn.Linear(3, 3) for _ in range(2)]
    models[1].forward = lambda x: x * 2
    with pytest.raises(FusionError, match=r"the model\.forward is None in model 0 and <function"):
        fuse(models)


def test_modes_that_differ_are_refused_as_a_whole_and_module_by_module():
    models = [nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)) for _ in range(2)]
    models[1][1].eval()
    with pytest.raises(FusionError, match="'1' is in the model's mode in model 0 and kept in evaluation"):
        fuse(models)
    models[0].eval()
    models[1].train()
    with pytest.raises(FusionError, match="model 0 is in evaluation and model 1 in training"):
        fuse(models)


def test_hooks_after_a_gradient_is_accumulated_are_refused():
    models = [nn.Linear(3, 3) for _ in range(2)]
    models[1].weight.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(2))
    with pytest.raises(FusionError, match=r"'weight' of model 1 .*use register_hook"):
        fuse(models)


@pytest.mark.parametrize(
    ("make", "names"), [(TiedByMemory, "'a.weight' and 'b.weight'"), (ViewedBuffer, "'means' and 'first'")]
)
def test_tensors_that_share_memory_but_are_not_one_are_refused(make, names):
    with pytest.raises(FusionError, match=f"{names} of model 0 share memory but are not one tensor"):
        fuse([make() for _ in range(2)])


def doubled(forward):
    return lambda x: 2 * forward(x)


def wrapped(model):
    model[0].forward = doubled(model[0].forward)


def wrapped_by_autocast(model):
    model[2].forward = torch.autocast("cpu", dtype=torch.bfloat16)(model[2].forward)


def wrapped_by_partial(model):
    model[0].forward = functools.partial(lambda layer, x: type(layer).forward(layer, x) * 3, model[0])


def hooked(model):
    model[1].register_forward_hook(lambda module, args, output: output + model[0].bias)


def counted(model):
    calls = []

    def forward(x):
        calls.append(model)
        return type(model[0]).forward(model[0], x) * len(calls)

    model[0].forward = forward


@pytest.mark.parametrize("wrap", [wrapped, wrapped_by_autocast, wrapped_by_partial, hooked, counted])
@pytest.mark.parametrize("unfused", [[], ["0"], [""]], ids=str)
def test_functions_that_hold_their_model_hold_the_fused_one_in_it(wrap, unfused):
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)) for _ in range(3)]
    for model in models:
        wrap(model)
    fused = fuse(models, unfused=unfused)
    x = torch.randn(3, 4, 3)
    outputs = fused(x)
    outputs.square().sum().backward()
    for number, model in enumerate(models):
        output = model(x[number])
        output.square().sum().backward()
        torch.testing.assert_close(outputs[number], output, rtol=1e-2, atol=1e-2)
        for found, wanted in zip(fused.module.parameters(), model.parameters()):
            torch.testing.assert_close(found.grad[number], wanted.grad, rtol=1e-2, atol=1e-2)
    trial = fused.trial(1)
    assert not {id(p) for p in trial.parameters()} & {id(p) for p in models[1].parameters()}
    if wrap is not counted:
        torch.testing.assert_close(trial(x[1]), models[1](x[1]), rtol=1e-2, atol=1e-2)
