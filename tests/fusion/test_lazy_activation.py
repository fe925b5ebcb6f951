"""A convolution that waits for its activation is that of the moment when it was called."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from fused_checks import fuse
from torch import nn

from plait.fusion.errors import FusionError
from plait.fusion.rules import convolution


@pytest.fixture(autouse=True)
def casts(monkeypatch):
    """Convolutions wait on a CPU, too; whether autocast, in float64, is enabled, and the inputs' types."""
    state = {"enabled": False, "kinds": []}

    def gathered(function, x, weight, bias, options, slope=1.0):
        state["kinds"].append(x.dtype)
        kinds = (part.to(x.dtype) for part in (x, weight, bias))
        return F.leaky_relu(convolution._grouped(function, *kinds, options), slope)

    monkeypatch.setattr(convolution, "_can_wait", lambda x, weight: torch.is_grad_enabled())
    monkeypatch.setattr(convolution, "chosen", lambda *how: "gathered")
    monkeypatch.setattr(convolution, "_gathered", gathered)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *kind: state["enabled"])
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda kind: torch.float64)
    return state


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)


def compare(make):
    models = [make() for _ in range(2)]
    fused = fuse(copy.deepcopy(models))
    x = torch.randn(2, 2, 3, 5, 5)
    y = fused(x)
    y.sin().sum().backward()
    for number, model in enumerate(models):
        alone = model(x[number])
        alone.sin().sum().backward()
        torch.testing.assert_close(y[number].float(), alone.float(), rtol=1e-4, atol=1e-5)
        for own, right in zip(fused.module.parameters(), model.parameters()):
            torch.testing.assert_close(own.grad[number], right.grad, rtol=1e-4, atol=1e-4)


def test_the_cast_is_that_of_the_call_though_autocast_is_disabled_after_it(casts):
    class Region(Images):
        def forward(self, x):
            casts["enabled"] = True
            y = self.conv(x)
            casts["enabled"] = False
            return F.relu(y) + y.float()

    compare(Region)
    assert set(casts["kinds"]) == {torch.float64}


def test_what_is_read_in_inference_mode_first_has_gradients():
    class Read(Images):
        def forward(self, x):
            y = self.conv(x)
            with torch.inference_mode():
                y.mean()
            return y * y

    compare(Read)


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_weight_that_is_written_while_the_convolution_waits_is_refused(name):
    class Writing(Images):
        def forward(self, x):
            y = self.conv(x)
            getattr(self.conv, name).data.mul_(0.5)
            return F.relu(y)

    with pytest.raises(FusionError, match="written in place after it was convolved"):
        fuse([Writing() for _ in range(2)])(torch.randn(2, 2, 3, 5, 5))


def test_the_gradient_of_a_convolution_whose_activation_was_joined_is_refused():
    class Hooked(Images):
        def forward(self, x):
            y = self.conv(x)
            z = F.relu(y)
            y.register_hook(lambda gradient: gradient * 0.5)
            return z

    with pytest.raises(FusionError, match="asks for the gradient of a tensor after it was used"):
        fuse([Hooked() for _ in range(2)])(torch.randn(2, 2, 3, 5, 5))
