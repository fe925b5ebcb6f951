"""Gradient norms in the stages of one worker of a pipeline: the first microbatch's against the batch's.

Moments of stages add up to those of the whole model. Weights that stages share are left out: no worker sees
their whole gradient after one microbatch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from plait.adapt.monitors.gradient_noise import GradientNorms, estimate
from plait.adapt.monitors.squared_norms import gradients, trial_squared_norms
from plait.pipeline.executor import PipelineExecutor
from plait.pipeline.microbatches import MicrobatchSource
from plait.planner.schedules.operations import Backward, BackwardWeight, Op


class StageNorms:
    """Measures the batches of a pipeline of `trials` trials, under a schedule that drains."""

    def __init__(self, pipeline: PipelineExecutor, trials: int) -> None:
        self._pipeline = pipeline
        self._counted = pipeline.counted_parameters()
        pipeline.on_backward, pipeline.on_gradients = self._after_backward, self._before_update
        # In the current batch: the microbatch to measure in each stage, and the measurements.
        self._first: dict[int, int] = {}
        self._parts: dict[int, tuple[Tensor, list[float]]] = {}
        self._work: MicrobatchSource | None = None
        self._samples: Sequence[int] = ()
        # The variance and the squared norm of each trial's gradient, and in how many stages they are unknown.
        self.moments = torch.zeros(trials, 3, dtype=torch.float64)

    def begin_batch(self, ops: Iterable[Op], work: MicrobatchSource, samples: Sequence[int]) -> None:
        """Called before the operations of a step, which has these samples of each trial."""
        backward = [op for op in ops if isinstance(op, (Backward, BackwardWeight))]
        counts = Counter(op.stage for op in backward)
        self._first = {op.stage: op.microbatch for op in reversed(backward) if counts[op.stage] > 1}
        self._parts, self._work, self._samples = {}, work, samples
        missing = [stage for stage in self._counted if stage not in self._first]
        self.moments = torch.zeros_like(self.moments)
        self.moments[:, 2] = len(missing)

    def _after_backward(self, stage: int, microbatch: int) -> None:
        if stage in self._counted and self._first.get(stage) == microbatch:
            assert self._work is not None
            rows = self._work.samples(microbatch)
            # A share of a batch may have no samples of some trials.
            weights = [count / max(1, samples) for count, samples in zip(rows, self._samples)]
            self._parts[stage] = self._squares(stage), weights

    def _squares(self, stage: int) -> Tensor:
        """The squared norm of each trial's present gradient in a stage."""
        return trial_squared_norms(gradients(self._counted[stage]), len(self.moments))

    def whole_squares(self) -> Tensor:
        """The squared norm of each trial's present gradient in this worker's stages."""
        each = [self._squares(stage).cpu() for stage in self._counted]
        return torch.stack(each).sum(0) if each else torch.zeros(len(self.moments), dtype=torch.float64)

    def _before_update(self) -> None:
        """Estimate from this worker's stages; the gradients are those of the whole batch."""
        if not self._parts:
            return
        scales = self._pipeline.loss_scales.square()
        for stage, (parts, weights) in self._parts.items():
            norms = (torch.stack([parts.cpu(), self._squares(stage).cpu()]) / scales).tolist()
            for moments, weight, samples, part, whole in zip(self.moments, weights, self._samples, *norms):
                noise = (
                    estimate(GradientNorms(part / weight, weight, 1.0, whole, samples)) if weight else None
                )
                known = (0.0, 0.0, 1.0) if noise is None else (noise.variance, whole, 0.0)
                moments += torch.tensor(known, dtype=torch.float64)
