"""Before an array takes its first step: its trials, fused, are compared with the same trials alone."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from plait.fusion import FusedModule
from plait.fusion.verify import Verdict, verify_fused
from plait.runtime.build import AUTOCAST, Parts
from plait.runtime.evaluate import forward
from plait.runtime.loading import Batch, to_device
from plait.runtime.sampling import Position, mix
from plait.runtime.sweep.array import Entry, fused_loss, losses_alone, losses_of, together
from plait.runtime.sweep.feeds import Feed
from plait.runtime.sweep.rounds import Piece, rounds_of
from plait.verification import same_random_numbers

# What matrix products on a GPU round float32 to.
TF32_EPS = 2.0**-10


def verify_entries(entries: Sequence[Entry], share: tuple[int, int], known: Verdict | None = None) -> Verdict:
    """What must run trial by trial for these trials to train together as they do alone.

    Two batches of each trial's own data are used, `share` of each: a worker's place and how many there are.
    """
    with same_random_numbers(0):
        batches = _first_batches(entries, share)
    rehearsal = ArrayRehearsal(entries, batches)
    rehearsal.loss_alone = known is not None and known.loss_alone
    return verify_fused(rehearsal, known.unfused if known is not None else None)


def _first_batches(entries: Sequence[Entry], share: tuple[int, int]) -> list[list[Batch]]:
    """Two batches of each trial; trials that read the same data in one order have the same."""
    feeds: dict[tuple[int, int], list[Batch]] = {}
    for entry in entries:
        settings = replace(entry.settings, data=replace(entry.settings.data, loaders=0))
        key = (settings.seed, settings.data.batch_size)
        if key not in feeds:
            feed = Feed(entry.parts.train_set, settings, Position(), False, *share)
            feeds[key] = [feed.next(), feed.next()]
    keys = [(entry.settings.seed, entry.settings.data.batch_size) for entry in entries]
    return [[feeds[key][number] for key in keys] for number in range(2)]


class ArrayRehearsal:
    """The trials of an array on the first microbatches of two steps."""

    def __init__(self, entries: Sequence[Entry], batches: Sequence[Sequence[Batch]]) -> None:
        self._entries = entries
        self._loss = fused_loss([entry.settings for entry in entries])
        self._pieces = [_first_pieces(step, entries[0].settings.accumulate) for step in batches]
        self.models = [entry.parts.model for entry in entries]
        self.seeds = [mix(entry.settings.seed) for entry in entries]
        self.ages = [entry.age for entry in entries]
        self.loss_alone = False

    @property
    def step(self) -> float:
        """The rounding of the coarsest numbers that are computed with."""
        settings, parts = self._entries[0].settings, self._entries[0].parts
        if settings.precision in AUTOCAST:
            return torch.finfo(AUTOCAST[settings.precision]).eps
        return TF32_EPS if parts.device.type == "cuda" and settings.precision == "float32" else 0.0

    def together(self, fused: FusedModule, batch: int) -> tuple[Any, Tensor]:
        """The outputs of all trials, trials first, and their losses."""
        pieces = self._pieces[batch]
        counts = [count for _, count in pieces]
        parts = self._entries[0].parts
        padding = fused.padded(counts) if len(set(counts)) > 1 else nullcontext()
        inputs, target = together(parts, [content for content, _ in pieces], max(counts))
        with padding, parts.autocast():
            outputs = forward(fused, inputs)
            if self.loss_alone:
                losses = losses_alone(self._entries, outputs, target, counts)
            else:
                losses = losses_of(fused, self._entries, self._loss, outputs, target, counts)
        return self._comparable(outputs, batch), losses

    def alone(self, model: nn.Module, trial: int, batch: int) -> tuple[Any, Tensor]:
        """What one trial's plain model gives for its own batch, and its loss."""
        parts: Parts = self._entries[trial].parts
        inputs, target = to_device(self._pieces[batch][trial][0], parts.device, parts.dtype)
        with parts.autocast():
            outputs = forward(model, inputs)
            return self._comparable(outputs, batch), parts.loss(outputs, target)

    def _comparable(self, outputs: Any, batch: int) -> Any:
        """Outputs with padding have no counterpart alone: there, only losses and gradients are compared."""
        return outputs if len({count for _, count in self._pieces[batch]}) == 1 else None


def _first_pieces(batches: Sequence[Batch], accumulate: int) -> list[Piece]:
    return rounds_of(batches, accumulate)[0][0]
