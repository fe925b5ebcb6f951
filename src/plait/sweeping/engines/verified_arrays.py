"""Before an array takes its first step: its trials, fused, are compared with the same trials alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from plait.data.calling import forward
from plait.data.loader import Batch, to_device
from plait.data.sampler import Position, mix
from plait.fusion import FusedModule, fuse
from plait.fusion.verify import FEW_SCENES, TF32_EPS, Verdict, verify_fused
from plait.training.batch_streams import next_batches, open_stream
from plait.training.components import AUTOCAST, Components
from plait.training.fused.fused_components import TrialInit, fused_loss, losses_alone, losses_of, together
from plait.training.fused.rounds import Piece, rounds_of
from plait.verification import same_random_numbers


def verify_entries(
    entries: Sequence[TrialInit], share: tuple[int, int], known: Verdict | None = None
) -> Verdict:
    """What must run trial by trial for these trials to train together as they do alone.

    Two batches of each trial's own data are used, `share` of each: a worker's place and how many there are.
    """
    return verify_rehearsed(ArrayRehearsal(entries, first_batches(entries, share)), known)


def verify_rehearsed(rehearsal: ArrayRehearsal, known: Verdict | None) -> Verdict:
    """What must run trial by trial, beginning with what is `known` of trials of this kind.

    Of a kind that is known each trial takes one step and is evaluated once, else twice.
    """
    if known is None:
        return verify_fused(rehearsal)
    rehearsal.loss_alone = known.loss_alone
    verdict = verify_fused(rehearsal, known.unfused, FEW_SCENES)
    return replace(verdict, has_python_state=known.has_python_state or verdict.has_python_state)


def first_batches(entries: Sequence[TrialInit], share: tuple[int, int]) -> list[list[Batch]]:
    """Two batches of each trial; trials that read the same data in one order have the same."""
    streams: dict[tuple[int, int], list[Batch]] = {}
    with same_random_numbers(0):
        for entry in entries:
            settings = replace(entry.settings, data=replace(entry.settings.data, loaders=0))
            key = (settings.seed, settings.data.batch_size)
            if key not in streams:
                stream = open_stream(entry.parts.train_set, settings, Position(), share)
                streams[key] = next_batches([stream]) + next_batches([stream])
    keys = [(entry.settings.seed, entry.settings.data.batch_size) for entry in entries]
    return [[streams[key][number] for key in keys] for number in range(2)]


class ArrayRehearsal:
    """The trials of an array on the first microbatches of two steps."""

    in_stages = False

    def __init__(
        self, entries: Sequence[TrialInit], batches: Sequence[Sequence[Batch]], microbatches: int = 0
    ) -> None:
        self._entries = entries
        self._batches = batches
        self._loss = fused_loss([entry.settings for entry in entries])
        self._count = microbatches or entries[0].settings.accumulate
        self._pieces = [_first_pieces(step, self._count) for step in batches]
        self.models = [entry.parts.model for entry in entries]
        self.seeds = [mix(entry.settings.seed) for entry in entries]
        self.ages = [entry.age for entry in entries]
        self.loss_alone = False

    def some(self, trials: Sequence[int]) -> ArrayRehearsal:
        """The same for some of the trials."""
        if len(trials) == len(self._entries):
            return self
        entries = [self._entries[trial] for trial in trials]
        return self._like(entries, [[step[trial] for trial in trials] for step in self._batches])

    def _like(self, entries: Sequence[TrialInit], batches: Sequence[Sequence[Batch]]) -> ArrayRehearsal:
        made = ArrayRehearsal(entries, batches, self._count)
        made.loss_alone = self.loss_alone
        return made

    def prepare(self, trial: int) -> None:
        """A model begins with the weights it has."""

    @property
    def step(self) -> float:
        """The rounding of the coarsest numbers that are computed with."""
        return coarsest_rounding(self._entries[0])

    def fuse(self, models: Sequence[nn.Module], unfused: Mapping[str, str]) -> Sequence[FusedModule]:
        """The trials in one module."""
        return [fuse(models, self.seeds, self.ages, unfused, verify=False)]

    def together(self, fused: Sequence[FusedModule], batch: int) -> tuple[Any, Tensor]:
        """The outputs of all trials, trials first, and their losses."""
        (whole,) = fused
        contents, counts = self._contents(batch)
        parts = self._entries[0].parts
        inputs, target = together(parts, contents, max(counts))
        with padded_rows(whole, counts), parts.autocast():
            outputs = forward(whole, inputs)
            losses = self._losses(whole, outputs, target, counts)
        return self._comparable(outputs, batch), losses

    def _contents(self, batch: int) -> tuple[list[Any], list[int]]:
        """What each trial gets, and of how many rows."""
        pieces = self._pieces[batch]
        return [content for content, _ in pieces], [count for _, count in pieces]

    def _losses(self, fused: FusedModule, outputs: Any, target: Any, counts: Sequence[int]) -> Tensor:
        if self.loss_alone:
            return losses_alone(self._entries, outputs, target, counts)
        return losses_of(fused, self._entries, self._loss, outputs, target, counts)

    def alone(self, model: nn.Module, trial: int, batch: int) -> tuple[Any, Tensor]:
        """What one trial's plain model gives for its own batch, and its loss."""
        parts: Components = self._entries[trial].parts
        inputs, target = to_device(self._pieces[batch][trial][0], parts.device, parts.dtype)
        with parts.autocast():
            outputs = forward(model, inputs)
            return self._comparable(outputs, batch), parts.loss(outputs, target)

    def _comparable(self, outputs: Any, batch: int) -> Any:
        """Outputs with padding have no counterpart alone: there, only losses and gradients are compared."""
        return outputs if len({count for _, count in self._pieces[batch]}) == 1 else None


def coarsest_rounding(entry: TrialInit) -> float:
    """The rounding of the coarsest numbers that a trial computes with; 0 where that is its weights' own."""
    precision = entry.settings.precision
    if precision in AUTOCAST:
        return torch.finfo(AUTOCAST[precision]).eps
    return TF32_EPS if entry.parts.device.type == "cuda" and precision == "float32" else 0.0


def padded_rows(fused: FusedModule, counts: Sequence[int]) -> AbstractContextManager[None]:
    """Within, each trial has so many rows of its own; padding after them where they differ."""
    return fused.padded(counts) if len(set(counts)) > 1 else nullcontext()


def _first_pieces(batches: Sequence[Batch], accumulate: int) -> list[Piece]:
    return rounds_of(batches, accumulate)[0][0]
