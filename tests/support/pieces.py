"""Models for workers that hold pieces of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary


class MostBytes(TorchDispatchMode):
    """Counts the most memory that tensors made within it held at once."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._alive: Any = WeakIdKeyDictionary()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        outcome = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(outcome):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().device.type != "meta":
                self._alive[tensor.untyped_storage()] = True
        self.peak = max(self.peak, sum(storage.nbytes() for storage in self._alive))
        return outcome


class Mixed(nn.Module):
    """Tied weights, a parameter computed from random numbers, several ways to begin, an unused weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.scale = nn.Parameter(torch.randn(64, 64) * 0.02)
        self.norm = nn.BatchNorm1d(64)
        self.second = nn.Linear(64, 64)
        self.second.weight = self.first.weight
        self.unused = nn.Linear(20, 20)
        self.register_buffer("steps", torch.arange(640.0).reshape(10, 64), persistent=False)
        self.last = nn.Linear(64, 10)
        nn.init.orthogonal_(self.first.weight)
        nn.init.trunc_normal_(self.scale, std=0.1)
        self.apply(lambda part: nn.init.normal_(part.weight) if isinstance(part, nn.BatchNorm1d) else None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x.flatten(1)).relu() @ self.scale
        x = self.second(self.norm(x)).relu()
        return self.last(x) + self.steps.mean(1)


WIDE, LAYERS = 512, 16


def wide() -> nn.Module:
    """17 MB of weights, of which a fourth is a quarter of the layers."""
    inner = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDE, WIDE, bias=False), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), nn.AvgPool1d(1), Widen(), *inner, Narrow())


class Widen(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.repeat(1, WIDE // 64)


class Narrow(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :10]
