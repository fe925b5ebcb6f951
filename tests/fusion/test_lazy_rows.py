"""What follows a dense layer waits for what comes next; torch's functions stand in for kernels."""

from __future__ import annotations

import copy
from operator import attrgetter

import pytest
import torch
import torch.nn.functional as F
from fused_checks import fuse
from torch import nn
from torch.utils.checkpoint import checkpoint

from plait.fusion.errors import FusionError
from plait.fusion.kernels import activation, sum_norm
from plait.fusion.rules import normalisation
from plait.fusion.speed import lazy_rows

WIDTH = 8


@pytest.fixture
def kernels(monkeypatch):
    """The kernels that were called; products are in float64, all else in float32."""
    called = []

    def biased(y, bias):
        called.append("biased")
        return y.add_(bias.unsqueeze(1))

    def activated(y, bias, kind):
        called.append(kind)
        return activation.ACTIVATIONS[kind](y + bias.unsqueeze(1))

    def summed(x, y, add, norm, weight=None, bias=None):
        kinds = () if norm is None else norm.kinds
        called.append("sum" * (y is not None) + " norm" * len(kinds))
        total = x if y is None else (x + y + add.unsqueeze(1)).to(x.dtype)
        made = []
        for kind in kinds:
            normed = F.layer_norm if norm.centred else F.rms_norm
            n = normed(total, total.shape[2:], eps=norm.eps) * weight.unsqueeze(1)
            made.append((n if bias is None else n + bias.unsqueeze(1)).to(kind))
        return tuple(made) if y is None else (total, *made)

    monkeypatch.setattr(activation, "biased", biased)
    monkeypatch.setattr(activation, "activated", activated)
    monkeypatch.setattr(sum_norm, "sum_norm", summed)
    monkeypatch.setattr(lazy_rows, "can_run_on", lambda x: True)
    monkeypatch.setattr(normalisation, "can_run_on", lambda x: True)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *kind: False)
    monkeypatch.setattr(lazy_rows, "_LEAST_ELEMENTS", 1)
    monkeypatch.setattr(lazy_rows, "cast_kind", lambda *x: torch.float64 if torch.is_grad_enabled() else None)
    rows_norm = normalisation._rows_norm
    monkeypatch.setattr(normalisation, "_rows_norm", lambda x, given, widens: rows_norm(x, given, True))
    return called


class Layers(nn.Module):
    """Two dense layers and two norms; subclasses say how they are connected."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.other = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)


class PreNorm(Layers):
    def forward(self, x):
        x = x + self.two(F.gelu(self.one(self.norm(x)), approximate="tanh"))
        return x + self.two(F.silu(self.one(self.other(x))))


class PostNorm(Layers):
    def forward(self, x):
        x = self.norm(self.one(x) + x)
        return self.other(x + self.two(F.gelu(self.one(x))))


class ReadTwice(Layers):
    """Of a layer's output the activation and the output, of a sum two norms and the sum."""

    def forward(self, x):
        y = self.one(x)
        total = x + y
        gated = y * F.relu(y, inplace=False)
        return self.norm(total) * self.other(total) + total + gated


class InPlace(Layers):
    def forward(self, x):
        y = F.relu(self.one(x), inplace=True)
        total = self.two(y) + y
        n = self.norm(total).clone()
        total = total + 0.5
        total += self.two(n)
        return total


class WithoutGradients(Layers):
    def forward(self, x):
        y = self.one(x)
        with torch.no_grad():
            scale = F.relu(y).mean() + (x + y).mean() + self.norm(x).mean()
        return self.norm(x + y) * scale + F.relu(y)


class ReadWithoutGradients(Layers):
    """What is read there first has gradients all the same."""

    mode = torch.no_grad

    def forward(self, x):
        y = self.one(x)
        total = x + y
        n = self.norm(total)
        with self.mode():
            y.mean(), total.mean(), n.mean()
        return n * total + y * self.two(n)


class ReadInInferenceMode(ReadWithoutGradients):
    mode = torch.inference_mode


class IntoCheckpoint(Layers):
    """A layer's output and a sum wait where a checkpoint that reads them begins, and are read after it."""

    def forward(self, x):
        y = self.one(x)
        total = x + y
        z = checkpoint(lambda own: self.two(F.gelu(y)) * self.norm(own), total, use_reentrant=False)
        return self.other(total) + z * y


class Recomputed(Layers):
    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant

    def block(self, x):
        x = x + self.two(F.relu(self.one(self.norm(x))))
        return self.norm(x) + self.one(self.norm(x))

    def forward(self, x):
        x = checkpoint(self.block, self.one(x), use_reentrant=self.reentrant)
        return self.two(checkpoint(self.block, x, use_reentrant=self.reentrant))


CALLS = {
    PreNorm: [" norm norm", "gelu tanh", "sum norm norm", "silu", "sum"],
    PostNorm: ["sum norm norm", "gelu", "sum norm"],
    ReadTwice: ["relu", "biased", "sum norm", " norm"],
    InPlace: ["relu", "sum", "biased"],
    WithoutGradients: ["biased", " norm"],
    ReadWithoutGradients: ["biased", "sum", " norm", "biased"],
    ReadInInferenceMode: ["biased", "sum", " norm", "biased"],
    IntoCheckpoint: ["sum", "biased", "biased", " norm", " norm", "biased", " norm"],
}


@pytest.mark.parametrize(
    "make", [*CALLS, lambda: Recomputed(False), lambda: Recomputed(True)], ids=lambda make: make.__name__
)
def test_trials_train_as_alone_though_their_layers_wait(make, kernels):
    torch.manual_seed(0)
    models = [make() for _ in range(3)]
    for model in models:
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.5)
    fused = fuse(copy.deepcopy(models), verify=False)
    for step in range(3):
        x = torch.randn(3, 2, 5, WIDTH)
        kernels.clear()
        y = fused(x)
        fused.zero_grad()
        (y * x.sin()).sum().backward()
        if step == 0 and make in CALLS:
            assert kernels == CALLS[make]
        for number, model in enumerate(models):
            alone = model(x[number])
            model.zero_grad()
            (alone * x[number].sin()).sum().backward()
            torch.testing.assert_close(y[number].float(), alone, rtol=1e-4, atol=1e-5)
            for own, right in zip(fused.module.parameters(), model.parameters()):
                assert (own.grad is None) == (right.grad is None)
                if own.grad is not None:
                    torch.testing.assert_close(own.grad[number], right.grad, rtol=1e-4, atol=1e-4)


def test_a_norm_that_only_dense_layers_read_is_written_in_their_precision_alone(kernels):
    fused = fuse([PreNorm() for _ in range(2)], verify=False)
    for _ in range(2):
        kernels.clear()
        fused(torch.randn(2, 4, 5, WIDTH))
    assert kernels == [" norm", "gelu tanh", "sum norm", "silu", "sum"]


class Keeping(Layers):
    """Keeps what waits, and reads it in the next forward."""

    kept = None

    def forward(self, x):
        before, self.kept = self.kept, self.norm(x + self.one(x))
        return self.two(x) if before is None else self.two(x) * before.detach()


def test_what_a_model_keeps_is_computed_from_the_weights_of_its_forward(kernels):
    models = [Keeping() for _ in range(2)]
    fused = fuse(copy.deepcopy(models), verify=False)
    for step in range(3):
        x = torch.randn(2, 4, 5, WIDTH)
        y = fused(x)
        for own, right in zip(y, [model(own) for model, own in zip(models, x)]):
            torch.testing.assert_close(own.float(), right, rtol=1e-4, atol=1e-5)
        for module in (fused, *models):
            for parameter in module.parameters():
                parameter.data += 0.1 * (step + 1)


@pytest.mark.parametrize("ask", ["register_hook", "retain_grad", "grad"])
@pytest.mark.parametrize("after", ["activation", "sum", "norm", "layer"])
def test_the_gradient_of_what_was_passed_by_is_refused_and_that_of_a_clone_is_whole(after, ask, kernels):
    class Asking(Layers):
        clones = False

        def forward(self, x):
            y = self.one(x) + x if after == "norm" else self.norm(x) if after == "layer" else self.one(x)
            y = y.clone() if self.clones else y
            z = {"activation": F.relu, "sum": x.add, "norm": self.norm, "layer": self.two}[after](y)
            z = z * z
            if ask == "register_hook":
                y.register_hook(lambda gradient: gradient * 0.5)
            elif ask == "retain_grad":
                y.retain_grad()
            else:
                z = z * torch.autograd.grad(z.sum(), y, create_graph=True)[0]
            return z

    models = [Asking() for _ in range(2)]
    fused = fuse(copy.deepcopy(models), verify=False)
    x = torch.randn(2, 4, 5, WIDTH)
    with pytest.raises(FusionError, match=r"asks for the gradient of a tensor after it was used.*\.clone"):
        fused(x)
    Asking.clones = True
    fused(x).sum().backward()
    for number, model in enumerate(models):
        model(x[number]).sum().backward()
        for own, right in zip(fused.module.parameters(), model.parameters()):
            if right.grad is not None:
                torch.testing.assert_close(own.grad[number], right.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("ask", ["register_hook", "retain_grad"])
def test_a_hook_on_what_was_passed_by_is_refused_after_the_forward_too(ask, kernels):
    class Returning(Layers):
        def forward(self, x):
            total = self.one(x) + x
            return total, self.norm(total)

    total, n = fuse([Returning() for _ in range(2)], verify=False)(torch.randn(2, 4, 5, WIDTH))
    hook = [lambda gradient: gradient * 0.5] * (ask == "register_hook")
    getattr(n, ask)(*hook)
    with pytest.raises(FusionError, match="asks for the gradient of a tensor after it was used"):
        getattr(total, ask)(*hook)


def add_to(x):
    x.add_(1.0)


def add_to_data(x):
    x.data.add_(1.0)


@pytest.mark.parametrize("write", [add_to, add_to_data])
@pytest.mark.parametrize("waiting", ["sum", "norm", "norm of a sum"])
def test_a_tensor_that_is_written_while_what_reads_it_waits_is_refused(waiting, write, kernels):
    class Writing(Layers):
        def forward(self, x):
            x = x * 2.0
            y = x + self.one(x) if "sum" in waiting else x
            n = self.norm(y) if "norm" in waiting else y
            write(y if waiting == "norm of a sum" else x)
            return n * 1.0

    fused = fuse([Writing() for _ in range(2)], verify=False)
    with pytest.raises(FusionError, match="written in place after it was"):
        fused(torch.randn(2, 4, 5, WIDTH))


@pytest.mark.parametrize("write", [add_to, add_to_data])
@pytest.mark.parametrize("name", ["one.bias", "norm.weight", "norm.bias"])
def test_a_weight_that_is_written_before_it_was_read_is_refused(name, write, kernels):
    class Writing(Layers):
        def forward(self, x):
            z = self.norm(x) if name.startswith("norm") else self.one(x)
            with torch.no_grad():
                write(attrgetter(name)(self))
            return z * 1.0

    fused = fuse([Writing() for _ in range(2)], verify=False)
    with pytest.raises(FusionError, match="written in place after it was read by a"):
        fused(torch.randn(2, 4, 5, WIDTH))
