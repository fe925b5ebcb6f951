"""Before an array takes its first step: its trials, fused, are compared with the same trials alone."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from plait.data.call_model import forward
from plait.data.loader import Batch, to_device
from plait.data.seeding import mix
from plait.fusion import FusedModule
from plait.fusion.verify import FEW_PHASES, TF32_EPS, Candidate, FusionReport, verify_fused
from plait.schema.settings import TrainSettings
from plait.training.batch_streams import next_batches, open_stream, order_of
from plait.training.components import Components, TrialInit
from plait.training.fused.fused_components import fused_loss, losses_alone, losses_of, together
from plait.training.fused.rounds import rounds_of
from plait.training.setup.precision import AUTOCAST
from plait.training.trial import Trial
from plait.verification import same_random_numbers


def verify_entries(
    entries: Sequence[TrialInit], share: tuple[int, int], known: FusionReport | None = None
) -> FusionReport:
    """What must run trial by trial for these trials to train together as they do alone.

    Two batches of each trial's own data are used, `share` of each: a worker's place and how many there are.
    """
    return verify_candidate(ArrayCandidate(entries, first_batches(entries, share)), known)


def verify_candidate(candidate: ArrayCandidate, known: FusionReport | None) -> FusionReport:
    """What must run trial by trial, beginning with what is `known` of trials of this kind.

    Of a kind that is known each trial takes one step and is evaluated once, else twice.
    """
    if known is None:
        return verify_fused(candidate)
    candidate.loss_alone = known.loss_alone
    verdict = verify_fused(candidate, known.unfused, FEW_PHASES)
    return replace(verdict, has_python_state=known.has_python_state or verdict.has_python_state)


def first_batches(entries: Sequence[TrialInit], share: tuple[int, int]) -> list[list[Batch]]:
    """Two batches of each trial; trials that read the same data in one order have the same.

    Where policies may change the batch size of single trials, the second batches have unlike sizes.
    """
    streams: dict[tuple[int, ...], list[Batch]] = {}
    with same_random_numbers(0):
        for entry in entries:
            for settings in map(_read_here, (entry.settings, _halved(entry.settings, share[1]))):
                trial = Trial(settings)
                if (key := order_of(trial)) not in streams:
                    stream = open_stream(entry.components.train_set, trial, share)
                    streams[key] = next_batches([stream]) + next_batches([stream])
    first = [entry.settings for entry in entries]
    second = [_halved(each, share[1]) if slot % 2 else each for slot, each in enumerate(first)]
    keys = [[order_of(Trial(each)) for each in row] for row in (first, second)]
    return [[streams[key][step] for key in row] for step, row in enumerate(keys)]


def _read_here(settings: TrainSettings) -> TrainSettings:
    return replace(settings, data=replace(settings.data, loaders=0))


def _halved(settings: TrainSettings, least: int) -> TrainSettings:
    """The settings with half the batch size, if it may change."""
    size = max(settings.data.batch_size // 2, least) if settings.adapt else settings.data.batch_size
    return replace(settings, data=replace(settings.data, batch_size=size))


class ArrayCandidate(Candidate):
    """The trials of an array on the first microbatches of two steps."""

    share = "parameters"

    def __init__(
        self, entries: Sequence[TrialInit], batches: Sequence[Sequence[Batch]], microbatches: int = 0
    ) -> None:
        self._entries = entries
        count = microbatches or entries[0].settings.accumulate
        self._microbatches = [rounds_of(step, [count] * len(step))[0][0] for step in batches]
        super().__init__(
            [entry.components.model for entry in entries],
            [mix(entry.settings.seed) for entry in entries],
            [entry.age for entry in entries],
            coarsest_rounding(entries[0]),
        )
        self.loss_alone = False

    def together(self, fused: FusedModule, trials: Sequence[int], batch: int) -> tuple[Any, Tensor]:
        contents, counts = self._contents(trials, batch)
        components = self._entries[0].components
        inputs, target = together(components, contents, max(counts))
        with padded_rows(fused, counts), components.autocast():
            outputs = forward(fused, inputs)
            losses = self._losses(fused, trials, outputs, target, counts)
        return self._comparable(outputs, batch), losses

    def _contents(self, trials: Sequence[int], batch: int) -> tuple[list[Any], list[int]]:
        """What each trial gets, and of how many rows."""
        microbatches = [self._microbatches[batch][trial] for trial in trials]
        return [content for content, _ in microbatches], [count for _, count in microbatches]

    def _losses(
        self, fused: FusedModule, trials: Sequence[int], outputs: Any, target: Any, counts: Sequence[int]
    ) -> Tensor:
        entries = [self._entries[trial] for trial in trials]
        if self.loss_alone:
            return losses_alone(entries, outputs, target, counts)
        loss = fused_loss([entry.settings for entry in entries])
        return losses_of(fused, entries, loss, outputs, target, counts)

    def alone(self, trial: int, batch: int) -> tuple[Any, Tensor]:
        components: Components = self._entries[trial].components
        inputs, target = to_device(self._microbatches[batch][trial][0], components.device, components.dtype)
        with components.autocast():
            outputs = forward(components.model, inputs)
            return self._comparable(outputs, batch), components.loss(outputs, target)

    def _comparable(self, outputs: Any, batch: int) -> Any:
        """Outputs with padding have no counterpart alone: there, only losses and gradients are compared."""
        return outputs if len({count for _, count in self._microbatches[batch]}) == 1 else None


def coarsest_rounding(entry: TrialInit) -> float:
    """The rounding of the coarsest numbers that a trial computes with; 0 where that is its weights' own."""
    precision = entry.settings.precision
    if precision in AUTOCAST:
        return torch.finfo(AUTOCAST[precision]).eps
    return TF32_EPS if entry.components.device.type == "cuda" and precision == "float32" else 0.0


def padded_rows(fused: FusedModule, counts: Sequence[int]) -> AbstractContextManager[None]:
    """A context in which trial i has `counts[i]` rows, followed by padding if the counts differ."""
    return fused.padded(counts) if len(set(counts)) > 1 else nullcontext()
