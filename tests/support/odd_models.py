"""Models that a sweep can easily train wrongly: what they do is out of sight of fused tensors."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 16), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self.first(x.flatten(1))))

    def between(self, h: Tensor) -> Tensor:
        return h


class Activated(Net):
    def __init__(self, act: str = "relu") -> None:
        super().__init__()
        self.act = {"relu": functional.relu, "tanh": torch.tanh}[act]

    def between(self, h: Tensor) -> Tensor:
        return self.act(h)


class Configured(Net):
    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.config = {"scale": scale}

    def between(self, h: Tensor) -> Tensor:
        return h.relu() * self.config["scale"]


@dataclass(slots=True)
class Options:
    scale: float


class SlottedScale(Net):
    """Keeps its number where nobody looks."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.options = Options(scale)

    def between(self, h: Tensor) -> Tensor:
        return h.relu() * self.options.scale


def ClassOfItsOwn(scale: float = 1.0) -> nn.Module:
    """A class for each number, all under one name."""

    class Scaled(Net):
        def between(self, h: Tensor) -> Tensor:
            return h.relu() * scale

    return Scaled()


def WrappedForward(scale: float = 1.0) -> nn.Module:
    """A layer whose forward was replaced by a function that calls it."""
    net = Net()

    def scaled(forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda h: forward(h).relu() * scale

    net.first.forward = scaled(net.first.forward)  # type: ignore[method-assign]
    return net


def AfterAccumulation(scale: float = 1.0) -> nn.Module:
    """A gradient that is changed once it is there."""
    net = Net()

    def change(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(scale)

    net.last.weight.register_post_accumulate_grad_hook(change)
    return net


class FrozenNorm(Net):
    """A batch norm that stays in evaluation in some of the trials."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)
        self.norm.train(scale < 1.0)

    def between(self, h: Tensor) -> Tensor:
        return self.norm(h).relu()


@functools.cache
def _table(size: int) -> Tensor:
    return torch.arange(size).float() / size


class CachesTensors(Net):
    """Tensors that a function keeps: one made with the model, one when it first runs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", _table(16).clone())

    def between(self, h: Tensor) -> Tensor:
        return (h + self.table).relu() * _table(h.shape[1])


class FailsWhenMade(Net):
    """Refuses some of its arguments."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        if scale > 1.5:
            raise ValueError(f"scale {scale} is too large")
        self.scale = scale

    def between(self, h: Tensor) -> Tensor:
        return h.relu() * self.scale


class FailsInTraining(Net):
    """Takes `good` steps, and then no more where its scale is large."""

    def __init__(self, scale: float = 1.0, good: int = 0) -> None:
        super().__init__()
        self.scale, self.good = scale, good
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def between(self, h: Tensor) -> Tensor:
        self.steps += self.training
        if self.scale > 1.5 and int(self.steps) > self.good:
            raise ValueError("one step too many")
        return h.relu() * self.scale


class ScalesInput(Net):
    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first((x * self.scale).flatten(1)).relu())


class Tempered(Net):
    def __init__(self, temperature: float = 1.0) -> None:
        super().__init__()
        self.temperature = temperature

    def between(self, h: Tensor) -> Tensor:
        return h / math.sqrt(self.temperature)


class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.sign()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class StraightThrough(Net):
    def between(self, h: Tensor) -> Tensor:
        return Sign.apply(h)


class Looks(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return h / (1.0 + h.abs().mean().item())


class LooksInside(Net):
    def __init__(self) -> None:
        super().__init__()
        self.look = Looks()

    def between(self, h: Tensor) -> Tensor:
        return self.look(h).relu()


class Counts(Net):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def between(self, h: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return h.relu() * min(1.0, 0.2 + 0.1 * self.calls)


class DrawsInPython(Net):
    """Draws from a generator of its own."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.generator = random.Random(scale)

    def between(self, h: Tensor) -> Tensor:
        return h.relu() * (0.5 + self.generator.random())


class Keeps(Net):
    def __init__(self) -> None:
        super().__init__()
        self.maps: list[Tensor] = []

    def between(self, h: Tensor) -> Tensor:
        self.maps = [h.relu()]
        return self.maps[0]


def smooth_loss(output: Tensor, target: Tensor) -> Tensor:
    """A loss that looks at a value."""
    loss = functional.cross_entropy(output, target)
    return loss if loss.item() < 1.0 else loss * 1.5


class ThroughSign(nn.Module):
    """A layer whose outcome passes a function of autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return Sign.apply(self.layer(x))


class Scaled(nn.Module):
    """A layer with a number of its own, which meets what all trials share."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale, self.layer = scale, nn.Linear(16, 16)

    def forward(self, h: Tensor) -> Tensor:
        return self.layer(h) * (torch.ones(16, dtype=h.dtype) * self.scale)


class Blocks(nn.Module):
    """A function of autograd in one block, a value of Python in another, dropout and a norm between."""

    def __init__(self, scale: float = 1.0, dropout: float = 0.2) -> None:
        super().__init__()
        self.flat = nn.Flatten()
        self.first = ThroughSign()
        self.middle = nn.Sequential(nn.BatchNorm1d(16), nn.Dropout(dropout))
        self.scaled = Scaled(scale)
        self.act = nn.ReLU()
        self.last = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.act(self.scaled(self.middle(self.first(self.flat(x))))))


class MindsSize(Net):
    """A model whose own code does something else with few rows."""

    def between(self, h: Tensor) -> Tensor:
        return h.relu() if h.shape[0] > 3 else h


class Sometimes(nn.Module):
    """Trains its layer where its number says so, which each trial has its own of; evaluates it always."""

    def __init__(self, uses: float) -> None:
        super().__init__()
        self.layer, self.uses = nn.Linear(16, 16), uses

    def forward(self, h: Tensor) -> Tensor:
        return self.layer(h).relu() if float(self.uses) > 0.5 or not self.training else h


class SometimesUsed(Net):
    """A layer that some trials train through and some do not."""

    def __init__(self, uses: float = 1.0) -> None:
        super().__init__()
        self.sometimes = Sometimes(uses)

    def between(self, h: Tensor) -> Tensor:
        return self.sometimes(h)
