"""Compares two observations, with tolerances from the measured rounding error of the plain model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from plait.verification.observe import BUFFER, Observation

# The tolerance as a multiple of the plain model's change under perturbed inputs.
FACTOR = 64.0
# The minimum tolerance in rounding steps of the largest value, for sums in another order.
STEPS = 64.0
# The same in roundings of a computation that is coarser than what it returns, as under autocast: a sum of
# constants is rounded there, which no perturbation shows.
ROUNDINGS = 4.0


@dataclass(frozen=True)
class Noise:
    """The tolerance for each name."""

    allowed: dict[str, float]

    def of(self, name: str, expected: Tensor) -> float:
        return self.allowed.get(name, _floor(expected))


@dataclass(frozen=True)
class Difference:
    """A difference of two observations, in words."""

    name: str
    why: str

    def __str__(self) -> str:
        return f"{self.name}: {self.why}"


def perturb(batch: Any, seed: int = 0, step: float = 0.0) -> Any:
    """The batch with every float perturbed by about one rounding step, or a larger `step`."""
    generator = torch.Generator().manual_seed(seed)

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
            return leaf
        signs = torch.randint(0, 2, leaf.shape, generator=generator).to(leaf.device, leaf.dtype) * 2 - 1
        return leaf * (1 + signs * max(step, torch.finfo(leaf.dtype).eps))

    return pytree.tree_map(move, batch)


def perturb_in_place(tensors: Iterable[Tensor], seed: int, step: float = 0.0) -> None:
    """Perturb weights; see `perturb`."""
    with torch.no_grad():
        for number, tensor in enumerate(tensors):
            tensor.copy_(perturb(tensor.data, 1000 * seed + number, step))


def measure_noise(expected: Observation, again: Callable[[int], Observation], rounding: float = 0.0) -> Noise:
    """Measure the rounding error; `again(seed)` observes the plain model, perturbed, with seeds 0 and 1.

    `rounding` is the precision of the computation, if coarser than that of the values.
    """
    moved = [again(seed) for seed in range(2)]
    allowed = {}
    for name, value in expected.items():
        if value is None:
            continue
        others = [other[name] for other in moved if other.get(name) is not None]
        amounts = [
            _apart(value, other) for other in others if other is not None and other.shape == value.shape
        ]
        # A buffer may be a counter, of which a step is less than such a rounding.
        coarse = 0.0 if name.startswith(BUFFER) else rounding
        allowed[name] = max([_floor(value, coarse), *(FACTOR * amount for amount in amounts)])
    return Noise(allowed)


def find_differences(expected: Observation, actual: Observation, noise: Noise) -> Sequence[Difference]:
    """The differences of `actual` to `expected` beyond `noise`, in the order of the names."""
    differences = []
    for name, value in expected.items():
        why = _why_unlike(name, value, actual[name], noise) if name in actual else "missing"
        if why is not None:
            differences.append(Difference(name, why))
    extra = [name for name in actual if name not in expected]
    return differences + [Difference(name, "the plain model has none") for name in extra]


def _why_unlike(name: str, value: Tensor | None, other: Tensor | None, noise: Noise) -> str | None:
    if value is None or other is None:
        if value is other:
            return None
        # A gradient of zeros instead of None also matters: weight decay and momentum are applied to it.
        return "there is one, but the plain model has none" if value is None else "none"
    if value.shape != other.shape or value.dtype != other.dtype:
        return f"{_kind(other)} instead of {_kind(value)}"
    amount = _apart(value, other)
    if amount == 0.0 or amount <= (allowed := noise.of(name, value)):
        return None
    return f"off by {amount:.3g}, where rounding explains {allowed:.1g}"


def _apart(one: Tensor, other: Tensor) -> float:
    """The largest difference; NaNs, and infinities of the same sign, are equal."""
    one, other = dense(one), dense(other)
    if one.numel() == 0:
        return 0.0
    if one.device == other.device:
        # Fast paths: bitwise equal, or finite differences.
        if torch.equal(one, other):
            return 0.0
        if one.is_floating_point():
            quick = (one.detach() - other.detach()).abs_().max().item()
            if math.isfinite(quick):
                return quick
    a, b = (_comparable(t) for t in (one, other))
    same = (a == b) | (a.isnan() & b.isnan())
    amount = torch.where(same, torch.zeros_like(a), (a - b).abs()).max().item()
    return amount if amount == amount else torch.inf


def dense(tensor: Tensor) -> Tensor:
    """The tensor as a dense one, as a gradient may be sparse on one side only."""
    return tensor if tensor.layout == torch.strided else tensor.detach().to_dense()


def _comparable(tensor: Tensor) -> Tensor:
    plain = tensor.detach().cpu()
    return torch.view_as_real(plain).double() if plain.is_complex() else plain.double()


def _floor(value: Tensor, rounding: float = 0.0) -> float:
    value = dense(value)
    if not (value.is_floating_point() or value.is_complex()) or value.numel() == 0:
        return 0.0
    finite = value.detach().abs().max().item()
    if not math.isfinite(finite):
        finite = _comparable(value).abs().nan_to_num(0.0, 0.0, 0.0).max().item()
    return max(STEPS * torch.finfo(value.dtype).eps, ROUNDINGS * rounding) * finite


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
