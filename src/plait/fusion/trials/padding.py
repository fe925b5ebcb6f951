"""Batches of unlike sizes in one array: the shorter are padded, and what mixes rows leaves padding out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from plait.fusion.errors import FusionError, user_line

# Whether any batch of this process was padded: elsewhere nobody follows where rows lie.
used = False


class Rows:
    """How many of the batch's rows are a trial's own; the rest of the `length` rows is padding at the end."""

    def __init__(self, counts: Sequence[int], length: int) -> None:
        if not counts or min(counts) < 1 or max(counts) > length:
            raise FusionError(
                f"padded: found {list(counts)} rows for a batch of {length}, expected 1 to {length} a trial"
            )
        global used
        used = True
        self.counts = tuple(counts)
        self.length = length
        self._masks: dict[tuple[int, torch.device], Tensor] = {}

    def of_trial(self, number: int) -> Rows:
        return Rows(self.counts[number : number + 1], self.length)

    def times(self, rows: int) -> int:
        """How many of `rows` each row of the batch became; a tensor that was cut otherwise is refused."""
        if rows % self.length:
            raise FusionError(
                f"{user_line()}\n  mixes {rows} rows, which the batch's {self.length} rows do not divide, so "
                f"padding cannot be distinguished; give these trials batches of one size"
            )
        return rows // self.length

    def mask(self, rows: int, device: torch.device) -> Tensor:
        """Which of `rows` rows are a trial's own: (trials, rows); the batch is taken to lie outermost."""
        key = (rows, device)
        if key not in self._masks:
            own = torch.tensor(self.counts, device=device) * self.times(rows)
            self._masks[key] = torch.arange(rows, device=device) < own.unsqueeze(1)
        return self._masks[key]

    def cut(self, x: Tensor, number: int) -> Tensor:
        """A trial's own rows of its slice `x`; what has no rows, a scalar or a class weight, stays whole."""
        if x.dim() == 0 or x.shape[0] % self.length:
            return x
        return x[: self.counts[number] * self.times(x.shape[0])]

    def can_fill(self, x: Tensor, number: int) -> bool:
        """Whether `x` can be what became of a trial's own rows."""
        return x.dim() > 0 and x.shape[0] % self.counts[number] == 0

    def fill(self, x: Tensor, number: int) -> Tensor:
        """What became of a trial's own rows, with padding after it."""
        return _padded(x, x.shape[0] // self.counts[number] * self.length)


def pad(pieces: Sequence[Tensor], length: int) -> Tensor:
    """Trials' batches stacked: (trials, length, ...); the shorter ones repeat their own rows.

    Rows that occur in the data give finite numbers wherever real ones do; zeros may not.
    """
    return torch.stack([_padded(piece, length) for piece in pieces])


def _padded(piece: Tensor, length: int) -> Tensor:
    if len(piece) == length:
        return piece
    return piece[torch.arange(length, device=piece.device) % len(piece)]


def masked_norm(
    x: Tensor,
    rows: Rows,
    mean: Tensor | None,
    variance: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    momentum: Tensor,
    eps: Tensor,
) -> Tensor:
    """Batch norm of (trials, batch, channels, ...) by the statistics of each trial's own rows.

    The other tensors are (trials, channels); running statistics are written. `momentum` and `eps` hold one
    number a trial.
    """
    shape = (x.shape[0], 1, x.shape[2]) + (1,) * (x.dim() - 3)
    own = rows.mask(x.shape[1], x.device).view(*x.shape[:2], *(1,) * (x.dim() - 2))
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    dims = [1, *range(3, x.dim())]
    count = own.sum(1).flatten().to(wide.dtype).unsqueeze(1) * wide[0, 0, 0].numel()
    average = torch.where(own, wide, 0.0).sum(dims) / count
    centred = wide - average.view(shape)
    spread = torch.where(own, centred, 0.0).square().sum(dims) / count
    if mean is not None and variance is not None:
        with torch.no_grad():
            share = momentum.to(mean.dtype).unsqueeze(1)
            mean.lerp_(average.to(mean.dtype), share)
            variance.lerp_((spread * (count / (count - 1).clamp(min=1))).to(mean.dtype), share)
    y = centred * (spread + eps.to(wide.dtype).unsqueeze(1)).rsqrt().view(shape)
    y = y if weight is None else y * weight.view(shape)
    return (y if bias is None else y + bias.view(shape)).to(x.dtype)


def numbers(value: Any, trials: int, device: torch.device) -> Tensor:
    """One number a trial, from one for all or a `PerTrial`."""
    values = getattr(value, "values", None) or [float(value)] * trials
    return torch.tensor(values, dtype=torch.float64, device=device)
