"""A step of fused trials in the stages of a worker: rows, random numbers and loss scales of each trial."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plait.fusion.module import FusedModule
from plait.profiler.build import ModelSlice
from plait.training.fused.fused_components import FusedComponents
from plait.training.fused.rounds import Round

# The draws of a forward that stages begin apart, where they do not know what those before have drawn.
DRAWS_OF_STAGE = 1 << 20


@dataclass(frozen=True)
class Draws:
    """How many random numbers the trials have drawn in a forward, up to the end of a stage.

    They pass between workers as the shape of an empty tensor, which is read without waiting for a device.
    """

    step: StepOfStages
    counts: int | tuple[int, ...]

    def packed(self) -> Tensor:
        counts = (self.counts,) if isinstance(self.counts, int) else self.counts
        return torch.empty((0, *counts), device=self.step.device)

    @staticmethod
    def unpacked(step: StepOfStages, packed: Tensor) -> Draws:
        counts = tuple(packed.shape[1:])
        return Draws(step, counts[0] if len(counts) == 1 else counts)

    def restore(self) -> None:
        self.step.draws = self.counts


class StepOfStages:
    """A step of fused trials on a worker: how many rows each trial has in the current microbatch.

    The random numbers of a microbatch depend on its index in the step and on the `draws` of the stages before
    (None: not known, or none), not on which worker computes it.
    """

    def __init__(self, fused: FusedModule) -> None:
        self._fused = fused
        self._rounds: Sequence[Round] = ()
        self._index = 0
        self.draws: int | tuple[int, ...] | None = None
        # The forwards of each trial before the step, and in it.
        self._ages = self._forwards = fused.ages

    @property
    def device(self) -> torch.device:
        return self._fused.ages.device

    def begin_step(self, rounds: Sequence[Round]) -> None:
        """Expect microbatches of a step."""
        self._rounds = rounds
        forwards = [sum(weight > 0.0 for weight in weights) for weights in zip(*(w for _, w in rounds))]
        self._ages = self._fused.ages.clone()
        self._forwards = torch.tensor(forwards, device=self._ages.device)
        self._fused.ages.add_(self._forwards)

    def begin(self, index: int) -> None:
        """Expect the microbatch `index` of the step."""
        self._index, self.draws = index, None

    @property
    def counts(self) -> list[int]:
        """The rows of each trial in the current microbatch."""
        return [count for _, count in self._rounds[self._index][0]]

    @property
    def weights(self) -> list[float]:
        """Each trial's share of its batch in it."""
        return self._rounds[self._index][1]

    def padded(self) -> AbstractContextManager[None]:
        """A context in which padded rows are excluded from losses and norms."""
        return self._fused.padded(self.counts) if len(set(self.counts)) > 1 else nullcontext()

    @contextmanager
    def _forward_of_microbatch(self, after: int = 0) -> Iterator[None]:
        """A context in which trials are at the forward of the current microbatch, or `after` it."""
        fused, ages = self._fused, self._fused.ages.clone()
        fused.ages.copy_(self._ages + self._forwards.clamp(max=self._index) + after)
        try:
            with self.padded():
                yield
        finally:
            fused.ages.copy_(ages)

    @contextmanager
    def in_loss(self) -> Iterator[None]:
        """A context for the losses of the current microbatch, with the random numbers of the whole model."""
        self._fused.draws_before = 0
        with self._forward_of_microbatch(after=1):
            yield

    def train(self, stage: int, inputs: Sequence[Tensor]) -> Any:
        """The output values of a stage for the current microbatch."""
        fused = self._fused
        without = [slot for slot, weight in enumerate(self.weights) if weight == 0.0]
        with self._forward_of_microbatch():
            if without:
                fused.freeze(without)
            outputs = self._run(stage, inputs, training=True)
            if without:
                fused.freeze([])
        return outputs

    def evaluate(self, stage: int, inputs: Sequence[Tensor]) -> Any:
        """The output values of a stage in evaluation mode."""
        return self._run(stage, inputs, training=False)

    def _run(self, stage: int, inputs: Sequence[Tensor], training: bool) -> Any:
        fused = self._fused
        # The modules of a stage are in its mode.
        fused.training = fused.module.training = training
        fused.draws_before = stage * DRAWS_OF_STAGE if self.draws is None else self.draws
        return fused(stage, *inputs)


class FusedStage(ModelSlice):
    """The tensors of one stage of fused trials, by the names of a single model."""

    def __init__(self, step: StepOfStages, number: int, attributes: Sequence[tuple[str, Any, bool]]) -> None:
        super().__init__(attributes)
        self._step = step
        self._number = number

    def forward(self, *inputs: Tensor) -> Any:
        run = self._step.train if self.training else self._step.evaluate
        return run(self._number, inputs)


class StageLossScales:
    """The loss scales of fused trials on one worker of a pipeline; a trial skips its own updates only."""

    def __init__(self, components: FusedComponents) -> None:
        self._components = components

    @property
    def value(self) -> Tensor:
        return self._components.scales.scales

    def unscale(
        self, grads: Sequence[Tensor], device: torch.device, everyone: dist.ProcessGroup | None = None
    ) -> bool:
        """See `LossScaling`; the next step skips trials with an overflow in any stage."""
        scales, optimizer = self._components.scales, self._components.optimizer
        overflows = scales.unscale(grads).to(torch.float32)
        dist.all_reduce(overflows, dist.ReduceOp.MAX, group=everyone)
        optimizer.skip = overflows > 0
        scales.update(optimizer.skip)
        return True
