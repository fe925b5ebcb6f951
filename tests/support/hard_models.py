"""Models that a careless pipeline trains wrong, each with one difficulty, and batches for them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class StraightThrough(torch.autograd.Function):
    """Rounds; its gradient passes as if it did not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x * 4).round() / 4

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


straight_through = StraightThrough.apply


class AliasedFunction(nn.Module):
    """Calls a torch.autograd.Function by another name, made before any trace."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(straight_through(self.a(x)))


class DropPath(nn.Module):
    """Leaves samples out in training only, by a branch on its mode."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        return x * x.new_empty((x.shape[0], 1)).bernoulli_(0.5).div_(0.5)


class Residual(nn.Module):
    """A dropped path and an attention whose dropout follows the module's mode."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.drop, self.head = nn.Linear(4, 4), DropPath(), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.a(x))
        y = F.scaled_dot_product_attention(
            x[:, None], x[:, None], x[:, None], dropout_p=0.5 if self.training else 0.0
        )
        return self.head(x + y[:, 0])


class AuxiliaryHead(nn.Module):
    """Returns another structure in training than in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.head, self.side = nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Any:
        y = self.a(x).tanh()
        return (self.head(y), self.side(y)) if self.training else self.head(y)


class FrozenPart(nn.Module):
    """Functional dropout in a part that is kept in evaluation mode, and one that is never off."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.part = _Dropping(self.b)
        self.part.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.c(F.dropout(self.part(self.a(x)), 0.5))


class _Dropping(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.inner(x), 0.5, training=self.training).tanh()


class TiedByMemory(nn.Module):
    """Two weights in one memory, which copies hold apart."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.weight = nn.Parameter(self.a.weight.detach())

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.b(torch.relu(self.a(x)))
        return made


class ViewedBuffer(nn.Module):
    """A buffer that forward writes, and a view of it that is registered, too."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("means", torch.zeros(2, 4))
        self.register_buffer("first", self.means[0])

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.a(x))
        self.means += x.detach().mean(0)
        made: Tensor = self.b(x) + self.first
        return made


class SharedBuffer(nn.Module):
    """Keeps the mean of its inputs, and uses it again at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(1))
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.5).add_(x.mean() * 0.5)
        return self.c(torch.relu(self.b(torch.relu(self.a(x - self.mean))))) + self.mean


class ReadsItsStatistics(nn.Module):
    """Statistics kept by hand in training only: an evaluation must not change them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return self.b(x - self.mean)


class Stateful(nn.Module):
    """Adds what the last forward left in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)
        self.h: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        if self.h is not None:
            y = y + self.h
        self.h = y.detach().mean(0)
        return self.b(y)


class CountsCalls(nn.Module):
    """Divides by the number of its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.b(self.a(x) / self.calls)


class WarmsUp(CountsCalls):
    """Goes another way once it was called a thousand times."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.a(x)
        return self.b(x if self.calls < 1000 else x.tanh())


class LayerDrop(nn.Module):
    """Leaves layers out by Python's random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if random.random() < 0.5:
                x = layer(x)
        return x


class BranchesOnSize(nn.Module):
    """Computes something else for small batches."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        return self.b(x.tanh() if x.shape[0] > 2 else x)


class ReadsLength(nn.Module):
    """Divides by a length that may change from batch to batch."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).sum(1) / x.shape[1])


def _quantise(levels: int) -> Any:
    class Quantise(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return (x * levels).round() / levels

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad / levels

    return Quantise


class TwoOfOneName(nn.Module):
    """Two autograd functions whose classes have the same name."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.coarse, self.fine = _quantise(2), _quantise(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.fine.apply(self.b(self.coarse.apply(self.a(x)))))


class ZeroBranch(nn.Module):
    """A normalised branch that starts at zero: its first mean is the mean of before."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
        nn.init.zeros_(self.a.weight)
        nn.init.zeros_(self.a.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.norm(self.a(x)) + x)


class SharedState(nn.Module):
    """One module leaves a tensor for another, past their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.writer = _Writes()
        self.middle = nn.Linear(4, 4)
        self.reader = _Reads(self.writer)

    def forward(self, x: Tensor) -> Tensor:
        return self.reader(self.middle(self.writer(x)))


class _Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        self.left = y.sin()
        return y.tanh()


class _Reads(nn.Module):
    def __init__(self, writer: nn.Module) -> None:
        super().__init__()
        self.b = nn.Linear(4, 2)
        self.others = [writer]

    def forward(self, x: Tensor) -> Tensor:
        return self.b(x + self.others[0].left)


class Divided(nn.Module):
    """A block whose own code keeps state, between plain layers: it can be kept in one stage."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.block = Stateful()
        self.last = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.block(self.first(x)))


class Digits(nn.Module):
    """A classifier of digits whose first forwards are scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 16), nn.Linear(16, 10)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.b(torch.relu(self.a(x.flatten(1)))) * min(1.0, self.calls / 100)


class DigitsByCount(nn.Module):
    """A classifier of digits that computes something else for batches of three."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 16), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x.flatten(1))
        return self.b(h.tanh() if x.shape[0] == 3 else h)


def digits_around_state() -> nn.Module:
    """A classifier of digits with a module inside that no trace can repeat."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), Digits(), nn.Linear(10, 10))


class TakesDict(nn.Module):
    """Takes its tensors in one dict, by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.b(self.a(batch["one"]).tanh() + 2 * batch["two"])


def dicts_in_two_orders() -> Any:
    one, other = torch.randn(2, 4, 4).unbind(), torch.randn(2, 3, 4).unbind()
    return ({"one": one[0], "two": one[1]},), ({"two": other[0], "one": other[1]},)


class Branches(nn.Module):
    """Two branches that drop elements in turns."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.left_drop, self.right_drop = nn.Dropout(0.5), nn.Dropout(0.5)
        self.left_last, self.right_last = nn.Dropout(0.3), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.left(x), self.right(x)
        left, right = self.left_drop(left), self.right_drop(right)
        left, right = self.left_last(left), self.right_last(right)
        return self.head(left + right)


class WritesReshaped(nn.Module):
    """Writes into what reshape gives: a view for one memory layout, a copy for another."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = x * 1.0
        y.reshape(y.shape[0], -1).mul_(3.0)
        return self.b(self.a(x) + y)


def batches_in_two_layouts() -> Any:
    return (torch.randn(4, 3, 4),), (torch.randn(3, 4, 3).transpose(1, 2),)


class HiddenBuffer(nn.Module):
    """Changes a buffer in a way that a trace does not see, and has a normalisation under two names."""

    def __init__(self, hidden: bool = True) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.twin, self.hidden = self.norm, hidden
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.hidden:
            self._buffers["count"] = self._buffers["count"] + 1
        return self.b(self.twin(self.a(x)).tanh())


class ReturnsNumber(nn.Module):
    """Returns a number beside its tensor: always the same, or how often it was called."""

    def __init__(self, counts: bool = False) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)
        self.counts, self.calls = counts, 0

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        self.calls += self.counts
        return self.b(self.a(x).tanh()), 3 + self.calls


def rows(*sizes: int) -> Callable[[], Any]:
    return lambda: tuple((torch.randn(size, 4),) for size in sizes)


def sequences(*lengths: int) -> Callable[[], Any]:
    return lambda: tuple((torch.randn(4, length, 4),) for length in lengths)


# Each: the model, two batches, and the layer in front of which it is cut.
HARD: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], str]] = {
    "aliased function": (AliasedFunction, rows(4, 3), "b"),
    "dropped path": (Residual, rows(4, 3), "scaled_dot_product_attention"),
    "auxiliary head": (AuxiliaryHead, rows(4, 3), "head"),
    "frozen part": (FrozenPart, rows(4, 3), "part.dropout"),
    "shared buffer": (SharedBuffer, rows(4, 3), "b"),
    "own statistics": (ReadsItsStatistics, rows(4, 3), "b"),
    "state": (Stateful, rows(4, 3), "b"),
    "counter": (CountsCalls, rows(4, 3), "b"),
    "warm-up": (WarmsUp, rows(4, 3), "b"),
    "layer drop": (LayerDrop, rows(4, 3), ""),
    "branch on size": (BranchesOnSize, rows(4, 2), "b"),
    "length": (ReadsLength, sequences(7, 6), "b"),
    "two of one name": (TwoOfOneName, rows(4, 3), "c"),
    "zero branch": (ZeroBranch, rows(4, 3), "b"),
    "shared state": (SharedState, rows(4, 3), "middle"),
    "number": (ReturnsNumber, rows(4, 3), "b"),
    "counted number": (lambda: ReturnsNumber(counts=True), rows(4, 3), "b"),
    "dict": (TakesDict, dicts_in_two_orders, "b"),
    "branches": (Branches, rows(4, 3), "right_drop"),
    "reshaped": (WritesReshaped, batches_in_two_layouts, "b"),
    "hidden buffer": (HiddenBuffer, rows(4, 3), "b"),
    "two names": (lambda: HiddenBuffer(hidden=False), rows(4, 3), "b"),
    "divided block": (Divided, rows(4, 3), "block.b"),
}
