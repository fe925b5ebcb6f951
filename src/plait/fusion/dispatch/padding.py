"""Batches of different sizes in one array: shorter ones are padded; what mixes rows ignores padding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from plait.fusion.errors import FusionError, user_line

# Whether any batch of this process was padded; if not, batch axes are not tracked.
used = False


class Rows:
    """How many of the `length` rows of each trial's batch are real; the rest is padding at the end."""

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

    def times(self, rows: int) -> int:
        """`rows` divided by the rows of the batch; raises if it does not divide."""
        if rows % self.length:
            raise FusionError(
                f"{user_line()}\n  mixes {rows} rows, which the batch's {self.length} rows do not divide, so "
                f"padding cannot be distinguished; give these trials batches of one size"
            )
        return rows // self.length

    def mask(self, rows: int, device: torch.device) -> Tensor:
        """A mask of real rows, of shape (trials, rows); the batch must be the outermost part of the rows."""
        key = (rows, device)
        if key not in self._masks:
            real = torch.tensor(self.counts, device=device) * self.times(rows)
            self._masks[key] = torch.arange(rows, device=device) < real.unsqueeze(1)
        return self._masks[key]

    def cut(self, x: Tensor, number: int) -> Tensor:
        """The real rows of a trial's slice `x`; a tensor without rows (a scalar) is returned whole."""
        if x.dim() == 0 or x.shape[0] % self.length:
            return x
        return x[: self.counts[number] * self.times(x.shape[0])]

    def can_fill(self, x: Tensor, number: int) -> bool:
        """Whether `x` can be computed from a trial's real rows."""
        return x.dim() > 0 and x.shape[0] % self.counts[number] == 0

    def fill(self, x: Tensor, number: int) -> Tensor:
        """`x`, computed from a trial's real rows, with padding after it."""
        return _padded(x, x.shape[0] // self.counts[number] * self.length)


def pad(batches: Sequence[Tensor], length: int) -> Tensor:
    """The trials' batches stacked to (trials, length, ...); shorter ones repeat their rows.

    Repeated rows give finite results wherever the data does; rows of zeros may not.
    """
    return torch.stack([_padded(batch, length) for batch in batches])


def _padded(batch: Tensor, length: int) -> Tensor:
    if len(batch) == length:
        return batch
    return batch[torch.arange(length, device=batch.device) % len(batch)]


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
    """Batch norm of (trials, batch, channels, ...) with statistics of the real rows of each trial.

    The other tensors are (trials, channels); running statistics are updated. `momentum` and `eps` have one
    value per trial.
    """
    shape = (x.shape[0], 1, x.shape[2]) + (1,) * (x.dim() - 3)
    real = rows.mask(x.shape[1], x.device).view(*x.shape[:2], *(1,) * (x.dim() - 2))
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    dims = [1, *range(3, x.dim())]
    count = real.sum(1).flatten().to(wide.dtype).unsqueeze(1) * wide[0, 0, 0].numel()
    average = torch.where(real, wide, 0.0).sum(dims) / count
    centred = wide - average.view(shape)
    spread = torch.where(real, centred, 0.0).square().sum(dims) / count
    if mean is not None and variance is not None:
        with torch.no_grad():
            share = momentum.to(mean.dtype).unsqueeze(1)
            mean.lerp_(average.to(mean.dtype), share)
            variance.lerp_((spread * (count / (count - 1).clamp(min=1))).to(mean.dtype), share)
    y = centred * (spread + eps.to(wide.dtype).unsqueeze(1)).rsqrt().view(shape)
    y = y if weight is None else y * weight.view(shape)
    return (y if bias is None else y + bias.view(shape)).to(x.dtype)
