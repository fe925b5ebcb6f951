"""Gradient noise of each trial of an array, from norms along the trials axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from plait.adapt.monitors.gradient_noise import GradientNorms
from plait.adapt.monitors.squared_norms import trial_squared_norms


class NormSink(Protocol):
    """Takes the norms of a trial's steps."""

    def update(self, norms: GradientNorms) -> None: ...


Sink = TypeVar("Sink", bound=NormSink)


class TrialNorms(Generic[Sink]):
    """Compares gradient norms of the first microbatch and the batch of each trial, by slot.

    Gradients are those of all trials, the trials axis first; norms are given to `averages`.
    """

    def __init__(self, averages: Sequence[Sink]) -> None:
        self.averages = list(averages)
        self._part: tuple[Tensor, Sequence[float]] | None = None

    def reorder(self, slots: Sequence[int]) -> None:
        """Trials have moved: slot i now has the trial that was in slot `slots[i]`."""
        self.averages = [self.averages[slot] for slot in slots]

    def after_microbatch(self, gradients: Sequence[Tensor], weights: Sequence[float]) -> None:
        """Record the norms after the first microbatch, which has `weights` of each trial's batch."""
        if self._part is None:
            self._part = trial_squared_norms(gradients, len(self.averages)), weights

    def before_update(self, gradients: Sequence[Tensor], samples: Sequence[int], scales: Tensor) -> None:
        """Record the norms of whole batches; gradients are multiplied by the trials' loss `scales`."""
        if self._part is None:
            return
        parts, weights = self._part
        self._part = None
        whole = trial_squared_norms(gradients, len(self.averages))
        norms = torch.stack([parts, whole]).cpu() / scales.cpu().double().square()
        for average, count, weight, part, all_ in zip(self.averages, samples, weights, *norms.tolist()):
            if weight > 0:
                average.update(GradientNorms(part / weight, weight, 1.0, all_, count))
