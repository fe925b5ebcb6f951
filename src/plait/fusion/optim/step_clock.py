"""How often each trial of a parameter was updated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass
class StepClock:
    """The step counts, one per trial, of parameters that were always updated together.

    A parameter without a gradient is not updated, so its bias correction starts later. `pushes` counts the
    steps with momentum, the first of which fills the buffer. `mu_product` is the product of NAdam's momentum
    over the steps, in the precision in which torch has it.
    """

    steps: Tensor
    pushes: Tensor
    mu_product: Tensor

    @classmethod
    def new(cls, trials: int, device: torch.device) -> StepClock:
        return cls.of([0.0] * trials, [0.0] * trials, [1.0] * trials, device=device)

    @classmethod
    def of(cls, *counts: list[float], device: torch.device) -> StepClock:
        """A clock with these counts, in the order of `rows`."""
        precise = torch.promote_types(torch.float32, torch.get_default_dtype())
        dtypes = (torch.float32, torch.float32, precise)
        return cls(*(torch.tensor(c, dtype=dtype).to(device) for c, dtype in zip(counts, dtypes)))

    @property
    def rows(self) -> tuple[Tensor, ...]:
        return self.steps, self.pushes, self.mu_product

    def mapped(self, change: Callable[[Tensor], Tensor]) -> StepClock:
        return StepClock(*map(change, self.rows))

    def advance(self, moving: Tensor | None, vectors: Mapping[str, Tensor]) -> None:
        """Count a step of the trials that are `moving` (None: all), with these hyperparameters."""
        if "momentum_decay" in vectors:
            mu = nadam_momentum(vectors, self.steps.double() + 1).to(self.mu_product.dtype)
            self.mu_product *= mu if moving is None else torch.where(moving, mu, 1.0)
        self.steps += 1.0 if moving is None else moving
        if "momentum" in vectors:
            pushed = vectors["momentum"] != 0
            self.pushes += pushed if moving is None else pushed & moving


# The names of a clock's rows in a saved state.
ROWS = ("step", "pushes", "mu_product")
assert len(ROWS) == len(fields(StepClock))


def nadam_momentum(vectors: Mapping[str, Tensor], step: Tensor) -> Tensor:
    """NAdam's momentum at a step, counted from 1, of each trial."""
    momentum: Tensor = vectors["beta1"] * (1 - 0.5 * 0.96 ** (step * vectors["momentum_decay"]))
    return momentum


def distinct(clocks: Iterable[StepClock]) -> list[StepClock]:
    """Each clock once."""
    every = list(clocks)
    return list(dict(zip(map(id, every), every)).values())
