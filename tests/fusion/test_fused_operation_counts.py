"""How many operations a step of the fused optimizer asks for: what a GPU's kernels cost, counted on a CPU."""

from __future__ import annotations

import cProfile
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from fused_checks import fuse
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from plait.fusion import FusedOptimizer
from plait.fusion.dispatch import alias_links, padding
from plait.fusion.kernels import update
from plait.fusion.optim import matrix_kinds
from plait.fusion.optim import update as updates
from plait.fusion.optim.matrix_kinds import orthogonalized
from plait.fusion.optim.optimizer_kinds import KINDS
from plait.fusion.speed import autotune

# Calls in Python of a training step of one dense layer, and of each further layer: a little above today's.
OF_A_STEP, OF_A_LAYER = 621, 75

# A view and a number on the host launch no kernel.
FREE = ("aten::detach", "aten::scalar_tensor")


class Count(TorchDispatchMode):
    """Counts the operations that would launch a kernel on a GPU."""

    def __init__(self):
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operations += not (func.is_view or func._schema.name in FREE)
        return func(*args, **(kwargs or {}))


def operations(kind, parameters, trials, dtype=torch.float32, **options):
    """The operations of the second step of `trials` fused chains of `parameters` weights."""
    layers = [[nn.Linear(2, 2, bias=False, dtype=dtype) for _ in range(parameters)] for _ in range(trials)]
    fused = fuse([nn.Sequential(*one) for one in layers])
    optimizer = FusedOptimizer(fused, kind, lr=[0.1 * (1 + n) for n in range(trials)], **options)
    for parameter in fused.module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with Count() as count:
        optimizer.step()
    return count.operations


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_no_step_takes_operations_for_every_parameter_of_every_trial(kind, dtype, monkeypatch):
    # As on a GPU.
    monkeypatch.setattr(matrix_kinds, "orthogonalized", partial(orthogonalized, batched=True))
    few, more_trials, more_parameters, both = (
        operations(kind, p, t, dtype) for p, t in ((4, 2), (4, 6), (12, 2), (12, 6))
    )
    assert both - more_parameters == more_trials - few  # a trial costs the same at any number of parameters
    assert more_parameters == few  # small ones of one shape are updated together


@pytest.mark.parametrize("options", [{}, {"steps": [1, 9]}], ids=["all move", "one stands still"])
def test_coefficients_of_a_step_are_computed_once_however_many_parameters_there_are(monkeypatch, options):
    """On a GPU one kernel updates a parameter; all other kernels of a step are the coefficients'."""
    monkeypatch.setattr(updates, "can_run_on", lambda x: True)
    monkeypatch.setattr(update, "adam", lambda moments, *others: list(moments))
    few, many = (operations("adam", parameters, 2, **options) for parameters in (2, 20))
    assert many - few == (18 if options else 0)  # a gradient of a trial that stands still is left out
    assert few < 40


def python_calls(layers):
    """The Python calls of a training step of eight fused perceptrons with `layers` layers."""
    fused = fuse([nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers))) for _ in range(8)])
    optimizer = FusedOptimizer(fused, "adam", lr=[0.1 * (1 + n) for n in range(8)])
    x, y = torch.randn(8, 3, 4), torch.randint(4, (8, 3))

    def step():
        fused.map(F.cross_entropy, fused(x), y).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step(), step()  # in which Python's generators are looked at
    profile = cProfile.Profile()
    profile.runcall(step)
    # Not pstats: of two comprehensions in one line it keeps either.
    return sum(entry.callcount - entry.reccallcount for entry in profile.getstats())


def test_a_fused_step_takes_few_calls_in_python(monkeypatch):
    """What a step of a small model takes on a CPU is mostly these calls, whose number no timing decides."""
    monkeypatch.setattr(autotune, "_CHOSEN", {})
    monkeypatch.setattr(autotune, "measure", lambda ways, operands: next(iter(ways)))
    # Another test may have used what is looked for from then on.
    monkeypatch.setattr(alias_links, "made", False)
    monkeypatch.setattr(padding, "used", False)
    one, many = python_calls(1), python_calls(11)
    assert one < OF_A_STEP
    assert many - one < 10 * OF_A_LAYER


@pytest.mark.parametrize("order", [(1, 3, 4, 0, 2), (1, 0, 2, 3, 4)], ids=["channels last", "folded"])
@pytest.mark.parametrize("dim", [1, -3])
def test_channels_of_several_layers_are_joined_without_a_copy_for_the_next_one(order, dim):
    back = sorted(range(5), key=order.__getitem__)
    sizes = [(3, 2, channels, 4, 5) for channels in (2, 3, 1)]
    lying = [torch.randn([size[axis] for axis in order]).permute(back).requires_grad_() for size in sizes]
    fused = fuse([nn.Linear(2, 2) for _ in range(3)])
    joined = fused.call(lambda m, *images: F.relu(torch.cat(images, dim), inplace=True), *lying)
    assert joined.permute(order).is_contiguous()
    alone = torch.cat(lying, 2).relu()
    assert torch.equal(joined, alone)
    weights = torch.randn_like(alone)
    found, wanted = (torch.autograd.grad((weights * each**2).sum(), lying) for each in (joined, alone))
    assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("order", [(1, 3, 4, 0, 2), (1, 0, 2, 3, 4)], ids=["channels last", "folded"])
def test_features_of_a_whole_image_are_joined_to_those_of_its_pixels_in_the_order_of_these(order):
    back = sorted(range(5), key=order.__getitem__)
    size = (3, 2, 8, 4, 5)
    local = torch.randn([size[axis] for axis in order]).permute(back).requires_grad_()
    whole = torch.randn(3, 2, 4).requires_grad_()

    def both(local, whole):
        return torch.cat([whole[..., None, None].expand(-1, -1, 4, 5), local], 1)

    fused = fuse([nn.Linear(2, 2) for _ in range(3)])
    joined = fused.call(lambda m, *parts: both(*parts), local, whole)
    assert joined.permute(order).is_contiguous()
    alone = torch.stack([both(*parts) for parts in zip(local, whole)])
    assert torch.equal(joined, alone)
    weights = torch.randn_like(alone)
    found, wanted = (
        torch.autograd.grad((weights * each**2).sum(), (local, whole)) for each in (joined, alone)
    )
    assert all(map(torch.allclose, found, wanted))


def test_images_of_unlike_sizes_are_not_joined_though_their_memory_could_be():
    # As rows of a matrix, as many as the first has, those of the second would be cut off.
    lying = [torch.randn(2, size, size, 3, 4).permute(3, 0, 4, 1, 2) for size in (5, 6)]
    fused = fuse([nn.Linear(2, 2) for _ in range(3)])
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        fused.call(lambda m, *images: torch.cat(images, 1), *lying)
