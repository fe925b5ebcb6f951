"""Small models that hold one difficulty each, and training of a model cut into stages in one process."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from plait.pipeline.cutting.cut import StageModule
from plait.profiler.trace import TracedModel, trace
from support.stages import cut_all


class Recurrent(nn.Module):
    """An LSTM whose output, hidden and cell state are all used."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.lstm = nn.LSTM(6, 5, num_layers=2, dropout=0.3, batch_first=True, bidirectional=True)
        self.gru = nn.GRU(10, 4, batch_first=True)
        self.head = nn.Linear(4 + 5 + 5, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        output, (hidden, cell) = self.lstm(self.embed(tokens))
        output, _ = self.gru(output)
        return self.head(torch.cat([output[:, -1], hidden[-1], cell[0]], dim=1))


class Cells(nn.Module):
    """A loop over time with a state made inside forward."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(4, 5)
        self.out = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(x.size(0), 5, dtype=x.dtype, device=x.device)
        c = h.clone()
        for t in range(x.size(1)):
            h, c = self.cell(x[:, t], (h, c))
        return self.out(h)


class Branches(nn.Module):
    """Branches that are concatenated, and a skip from the first layer to the last."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, padding=1)
        self.left = nn.Sequential(nn.Conv2d(4, 3, 1), nn.BatchNorm2d(3), nn.ReLU(inplace=True))
        self.right = nn.Sequential(nn.MaxPool2d(3, 1, 1), nn.Conv2d(4, 5, 3, padding=1))
        self.mix = nn.Conv2d(8, 4, 1)
        self.pool = nn.AdaptiveAvgPool2d(2)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        first = F.relu(self.stem(x))
        both = torch.cat([self.left(first), self.right(first)], 1)
        out = self.mix(both)
        out += first
        return self.head(self.pool(out).view(x.size(0), -1)) / x.size(0)


class CalledTwice(nn.Module):
    """One module called twice, one parameter used by two modules, one used by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.shared = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.scale = nn.Parameter(torch.full((6,), 0.7))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens).mean(1)
        x = torch.tanh(self.shared(x)) * self.scale
        x = self.norm(self.shared(x) - 1.5)
        return self.head(x)


class Masked(nn.Module):
    """Two inputs; integer and boolean tensors that pass between layers, a constant, a branch on a shape."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.position = nn.Embedding(20, 8)
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True, dropout=0.2)
        self.norm = nn.LayerNorm(8)
        self.table = torch.tensor([2.0, 0.5, 1.0], dtype=torch.float64)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens: Tensor, lengths: Tensor) -> dict[str, Tensor]:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        padding = places[None, :] >= lengths[:, None]
        x = self.embed(tokens) + self.position(places)
        attended, _ = self.attend(x, x, x, key_padding_mask=padding, need_weights=False)
        x = self.norm(x + attended).masked_fill(padding.unsqueeze(-1), 0.0)
        if x.shape[-1] > 4:
            x = F.dropout(x, 0.5, self.training)
        total = x.sum(1) / lengths.unsqueeze(1)
        return {"logits": self.head(total) * self.table, "lengths": lengths + 1}


class Doubled(torch.autograd.Function):
    """Identity whose gradient is doubled: only a trace that keeps the function gets it right."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


class InPlace(nn.Module):
    """Writes in place: into activations, slices, views and buffers; a region without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.relu = nn.ReLU(inplace=True)
        self.second = nn.Linear(6, 6)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("fixed", torch.linspace(0, 1, 6), persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        before = self.first(x)
        side = before.exp()
        x = self.relu(before)
        x = self.second(x).add_(1)
        x[:, 0] += 2
        x[:, 2:4].mul_(3)
        x = x.view(-1, 3)
        x.mul_(0.5)
        x = Doubled.apply(x.view(side.shape[0], 6))
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean(0) * 0.1)
            self.calls += 1
        return x * self.mean + self.fixed, side.sigmoid()


class Parametrized(nn.Module):
    """Weights computed by torch's parametrizations, and a list of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 5))
        self.gains = nn.ParameterList([nn.Parameter(torch.rand(5)) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.normed(x)
        for gain in self.gains:
            x = x * gain
        return 1 - x.T.softmax(0)


class Encoder(nn.Module):
    """torch's own transformer, with a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.embed = nn.Embedding(11, 8)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        x = self.embed(tokens)
        # Of the type of the inputs: torch's attention on CPUs misreads a float32 mask of float64 inputs.
        mask = x.new_full((length, length), float("-inf")).triu(1)
        return self.head(self.encoder(x, mask=mask))


def tokens(batch: int, length: int = 7, vocabulary: int = 11) -> Tensor:
    return torch.randint(0, vocabulary, (batch, length))


# Each: how to make the model, and its inputs for a batch of a given size.
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Any, ...]]]] = {
    "recurrent": (Recurrent, lambda batch: (tokens(batch),)),
    "cells": (Cells, lambda batch: (torch.randn(batch, 3, 4),)),
    "branches": (Branches, lambda batch: (torch.randn(batch, 2, 6, 6),)),
    "called-twice": (CalledTwice, lambda batch: (tokens(batch),)),
    "masked": (Masked, lambda batch: (tokens(batch), torch.randint(1, 7, (batch,)))),
    "in-place": (InPlace, lambda batch: (torch.randn(batch, 4),)),
    "parametrized": (Parametrized, lambda batch: (torch.randn(batch, 4),)),
    "encoder": (Encoder, lambda batch: (tokens(batch),)),
}


def make(name: str, batch: int) -> tuple[nn.Module, tuple[Any, ...]]:
    """The model named, in float64, and inputs for it; the same at every call."""
    torch.manual_seed(0)
    model, inputs = MODELS[name]
    return model().double(), as_double(inputs(batch))


def as_double(inputs: Any) -> Any:
    def convert(leaf: Any) -> Any:
        return leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return pytree.tree_map(convert, inputs)


def some_stages(traced: TracedModel, count: int, seed: int = 0) -> list[list[str]]:
    """The layers in order, cut at random places."""
    ids = [layer.id for layer in traced.layers]
    places = sorted(random.Random(seed).sample(range(1, len(ids)), min(count, len(ids)) - 1))
    return [ids[a:b] for a, b in zip([0, *places], [*places, len(ids)])]


@dataclass
class Step:
    """What one forward and backward pass left behind."""

    outputs: list[Tensor]
    grads: dict[str, Tensor]
    buffers: dict[str, Tensor]

    def assert_equals(self, other: Step) -> None:
        assert len(self.outputs) == len(other.outputs)
        for ours, theirs in zip(self.outputs, other.outputs):
            torch.testing.assert_close(ours, theirs)
        torch.testing.assert_close(self.grads, other.grads)
        torch.testing.assert_close(self.buffers, other.buffers)


def whole_step(model: nn.Module, inputs: Any, seed: int = 1) -> Step:
    """One step of a copy of `model`, as anyone would run it."""
    model = copy.deepcopy(model)
    torch.manual_seed(seed)
    args, kwargs = arguments(inputs)
    outputs = tensors_of(model(*args, **kwargs))
    loss_of(outputs).backward()
    return _left_behind(model, outputs)


def staged_step(model: nn.Module, inputs: Any, example: Any, count: int, seed: int = 1) -> Step:
    """One step of a copy of `model`, traced on `example`, in `count` stages that share no graph."""
    model = copy.deepcopy(model)
    traced = trace(model, example)
    stages = cut_all(traced, some_stages(traced, count))
    torch.manual_seed(seed)
    values = dict(zip(traced.inputs, tensors_of(arguments(inputs))))
    passes: list[tuple[StageModule, list[Tensor], tuple[Tensor, ...]]] = []
    for stage in stages:
        received = [values[v.name].detach().requires_grad_(v.requires_grad) for v in stage.inputs]
        given = stage.module(*received)
        values |= {value.name: tensor for value, tensor in zip(stage.outputs, given)}
        passes.append((stage, received, given))
    finals = {n: values[n].detach().requires_grad_(values[n].requires_grad) for n in traced.outputs}
    outputs = tensors_of(traced.rebuild_output(finals))
    loss_of(outputs).backward()
    grads = {name: tensor.grad for name, tensor in finals.items() if tensor.grad is not None}
    for stage, received, given in reversed(passes):
        _backward(stage, received, given, grads)
    return _left_behind(model, outputs)


def _backward(
    stage: StageModule, received: list[Tensor], given: tuple[Tensor, ...], grads: dict[str, Tensor]
) -> None:
    pairs = [(t, grads[v.name]) for v, t in zip(stage.outputs, given) if v.name in grads and t.requires_grad]
    if pairs:
        torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
    for value, tensor in zip(stage.inputs, received):
        if tensor.grad is not None:
            grads[value.name] = grads[value.name] + tensor.grad if value.name in grads else tensor.grad


def arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return ((), dict(inputs)) if isinstance(inputs, Mapping) else (tuple(inputs), {})


def tensors_of(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def loss_of(outputs: list[Tensor]) -> Tensor:
    return sum((t.double() ** 2).mean() for t in outputs if t.requires_grad)  # type: ignore[return-value]


def _left_behind(model: nn.Module, outputs: list[Tensor]) -> Step:
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return Step([t.detach() for t in outputs], grads, {n: b.detach() for n, b in model.named_buffers()})


class MadeWeights(nn.Module):
    """Linear layers whose weight or bias is computed: one in an earlier stage than it is used in."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.maker = nn.Linear(4, 12)
        self.c = nn.Linear(4, 4)
        self.d = nn.Linear(3, 3)
        self.bias = nn.Parameter(torch.randn(3))
        self.scale = nn.Parameter(torch.full((1,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        made = self.maker(h.mean((0, 1))).view(3, 4)
        return self.d(nn.functional.linear(self.c(h), made, self.bias * self.scale)).mean(1)


class Reshaped(nn.Module):
    """A parameter only reshaped and added behind a linear layer: both gradients are one piece of memory."""

    def __init__(self) -> None:
        super().__init__()
        self.begin = nn.Sequential(nn.Flatten(), nn.Linear(20, 8), nn.Tanh())
        self.a = nn.Linear(8, 8)
        self.shift = nn.Parameter(torch.randn(8))
        self.b = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.b(self.a(self.begin(x)) + self.shift.view(1, 8))
        return y


class Positions(nn.Module):
    """A parameter added at the cut and only reshaped before it: its gradient is what came from the peer."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(1, 5, 4))
        self.b = nn.Linear(20, 8)
        self.c = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.c(self.b((x + self.positions).flatten(1)))
        return y


class NormedRows(nn.Sequential):
    """Batch normalisation of vectors, which needs more than one of them."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))


class BiasBehind(nn.Sequential):
    """Its first half has no vector among its parameters."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 8, bias=False), nn.ReLU(), nn.Linear(8, 10))
