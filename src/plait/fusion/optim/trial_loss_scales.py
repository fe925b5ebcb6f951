"""Loss scaling for float16 with one scale per trial, so that an overflow skips the step of one trial only."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from plait.fusion.optim.optimizer import FusedOptimizer
from plait.fusion.optim.trial_gradients import unscale_gradients

# The factors of torch.amp.GradScaler, after many finite steps and after an overflow.
_GROWTH, _BACKOFF = 2.0, 0.5


class LossScales:
    """A loss scale per trial that grows while its gradients are finite, and backs off when they are not.

    The rules and defaults are those of torch.amp.GradScaler, for each trial separately.
    """

    def __init__(
        self,
        trials: int,
        device: torch.device | str = "cpu",
        initial: float = 2.0**16,
        growth_interval: int = 2000,
    ) -> None:
        self.scales = torch.full((trials,), initial, dtype=torch.float32, device=device)
        self.good_steps = torch.zeros(trials, dtype=torch.int32, device=device)
        self.growth_interval = growth_interval

    def scale(self, losses: Tensor) -> Tensor:
        """The losses, one per trial, times their scales; call backward on the sum."""
        return losses * self.scales

    @torch.no_grad()
    def step(self, optimizer: FusedOptimizer, skip: Tensor | None = None) -> Tensor:
        """Unscale the gradients, step every trial whose gradients are finite, and update the scales.

        `skip` marks trials that have none in this step. Returns which trials overflowed.
        """
        gradients = [parameter.grad for parameter in optimizer.parameters if parameter.grad is not None]
        overflowed = self.unscale(gradients)
        optimizer.step(skip=overflowed if skip is None else overflowed | skip)
        self.update(overflowed, skip)
        return overflowed

    @torch.no_grad()
    def unscale(self, gradients: Sequence[Tensor]) -> Tensor:
        """Divide the gradients by the scales; returns which trials have an overflow."""
        return unscale_gradients(gradients, 1.0 / self.scales, len(self.scales))

    def update(self, overflowed: Tensor, skip: Tensor | None = None) -> None:
        """Update the scales after a step in which these trials overflowed; those of `skip` had none."""
        # In place, as a captured step would otherwise keep using the old tensors.
        self.good_steps.copy_(torch.where(overflowed, 0, self.good_steps + (1 if skip is None else ~skip)))
        grown = self.good_steps >= self.growth_interval
        factor = torch.where(overflowed, _BACKOFF, torch.where(grown, _GROWTH, 1.0))
        self.scales.mul_(factor)
        self.good_steps.masked_fill_(grown, 0)
