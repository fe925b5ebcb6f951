"""The numbers of fused trials that workers average only when they synchronize: counts and loss scales."""

from __future__ import annotations

import torch
from torch import Tensor

from plait.fusion import FusedModule, FusedOptimizer, LossScales
from plait.fusion.optim.param_groups import FusedGroup
from plait.fusion.optim.step_clock import ROWS


class TrialCounters:
    """The numbers of `optimizer_state.Counters`, for each trial, and the optimizer's step counts.

    Workers take their mean; integers are rounded. A fused optimizer has its step counts outside of `state`.
    """

    def __init__(self, fused: FusedModule, optimizer: FusedOptimizer, scales: LossScales) -> None:
        self._fused = fused
        self._optimizer = optimizer
        self._scales = scales
        self._numbers = torch.zeros(0, dtype=torch.float64)

    def prepare(self) -> None:
        """Read the numbers, of which each has one per trial."""
        clocks = [group.counts(parameter) for group, parameter in self._counted()]
        counts = [count for clock in clocks for count in clock.rows]
        self._numbers = torch.stack([row.double().cpu() for row in [*self._rows(), *counts]])

    def __call__(self) -> list[Tensor]:
        return [self._numbers]

    def finish(self) -> None:
        rows = self._rows()
        for row, mean in zip(rows, self._numbers):
            row.copy_(mean if row.is_floating_point() else mean.round())
        means = iter(self._numbers[len(rows) :].tolist())
        counts = {parameter: [next(means) for _ in ROWS] for _, parameter in self._counted()}
        for group in self._optimizer.groups:
            group.set_counts({parameter: counts[parameter] for parameter in group["params"]})

    def _rows(self) -> list[Tensor]:
        """The loss scales, and the integer buffers that are one number of each trial."""
        buffers = [b for b in self._fused.module.buffers() if b.dim() == 1 and not b.is_floating_point()]
        return [self._scales.scales, self._scales.good_steps, *buffers]

    def _counted(self) -> list[tuple[FusedGroup, Tensor]]:
        return [(group, parameter) for group in self._optimizer.groups for parameter in group["params"]]
