"""A frozen linear layer with a low-rank adapter for each trial: y = x W^T + b + scale (drop(x) A^T) B^T.

Products with the adapter read and write the wide tensors once, in 16 bits, and sum in float32: float32
factors are multiplied as three bfloat16 parts, or as two of tf32, so that little of them is lost.
Dropout is a hash of each element's index, computed where the element is read, and never stored.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,misc"

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.fusion.dispatch.random import is_kept
from plait.fusion.kernels import cdiv, power_of_2_from
from plait.fusion.kernels.dropout import keeps
from plait.fusion.kernels.launch import launch, tl, triton
from plait.fusion.plain_function import PlainFunction

# The narrowest product of Tensor Cores, and the widest adapter whose tiles fit into registers.
_LEAST_RANK, MOST_RANK = 16, 128


@triton.jit
def _times(wide, narrow, total):
    """`total` plus the product of a tile of 16 bits with one that may have 32."""
    if wide.dtype == narrow.dtype:
        total = tl.dot(wide, narrow, total)
    elif wide.dtype == tl.bfloat16:
        high = narrow.to(tl.bfloat16)
        rest = narrow - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        total = tl.dot(wide, high, tl.dot(wide, middle, tl.dot(wide, low, total)))
    else:
        total = tl.dot(wide.to(tl.float32), narrow.to(tl.float32), total, input_precision="tf32x3")
    return total


@triton.jit
def _dropped(values, keys_ptr, trial, element):
    """`values` with zeros where a trial's dropout keeps none, by `is_kept` of the index of each."""
    keys_at = keys_ptr + trial * 3
    kept = keeps(element, tl.load(keys_at), tl.load(keys_at + 1), tl.load(keys_at + 2))
    return tl.where(kept, values, 0.0).to(values.dtype)


@triton.jit
def _to_rank(
    x_ptr, w_ptr, scale_ptr, keys_ptr, out_ptr, rows, channels, rank, w_trial, w_rank, w_channel,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, RANK: tl.constexpr, SCALED: tl.constexpr,
    DROPS: tl.constexpr,
):  # fmt: skip
    """out[row, r] = scale * sum over channels of x[row, channel] w[r, channel], of one trial."""
    trial = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    r = tl.arange(0, RANK)
    lane = tl.arange(0, CHANNELS)
    x_at = x_ptr + (trial * rows + row)[:, None] * channels + lane[None, :]
    w_at = w_ptr + trial * w_trial + r[None, :] * w_rank + lane[:, None] * w_channel
    total = tl.zeros((ROWS, RANK), tl.float32)
    for start in range(0, channels, CHANNELS):
        inside = start + lane < channels
        x = tl.load(x_at, mask=(row < rows)[:, None] & inside[None, :], other=0.0)
        if DROPS:
            x = _dropped(x, keys_ptr, trial, row[:, None] * channels + (start + lane)[None, :])
        w = tl.load(w_at, mask=(r < rank)[None, :] & inside[:, None], other=0.0)
        total = _times(x, w, total)
        x_at += CHANNELS
        w_at += CHANNELS * w_channel
    if SCALED:
        total *= tl.load(scale_ptr + trial)
    mask = (row < rows)[:, None] & (r < rank)[None, :]
    tl.store(out_ptr + (trial * rows + row)[:, None] * rank + r[None, :], total, mask=mask)


@triton.jit
def _from_rank(
    t_ptr, w_ptr, scale_ptr, keys_ptr, y_ptr, rows, channels, rank, w_trial, w_rank, w_channel,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, RANK: tl.constexpr, SCALED: tl.constexpr,
    DROPS: tl.constexpr,
):  # fmt: skip
    """y[row, channel] += scale * sum over r of t[row, r] w[r, channel], of one trial."""
    trial = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    lane = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    r = tl.arange(0, RANK)
    t_mask = (row < rows)[:, None] & (r < rank)[None, :]
    t = tl.load(t_ptr + (trial * rows + row)[:, None] * rank + r[None, :], mask=t_mask, other=0.0)
    w_at = w_ptr + trial * w_trial + r[:, None] * w_rank + lane[None, :] * w_channel
    w = tl.load(w_at, mask=(r < rank)[:, None] & (lane < channels)[None, :], other=0.0)
    if SCALED:
        t *= tl.load(scale_ptr + trial)
    zero = tl.zeros((ROWS, CHANNELS), tl.float32)
    added = tl.dot(t, w.to(tl.float32), zero, input_precision="tf32x3")
    if DROPS:
        added = _dropped(added, keys_ptr, trial, row[:, None] * channels + lane[None, :])
    y_at = y_ptr + (trial * rows + row)[:, None] * channels + lane[None, :]
    mask = (row < rows)[:, None] & (lane < channels)[None, :]
    y = tl.load(y_at, mask=mask, other=0.0)
    tl.store(y_at, (y.to(tl.float32) + added).to(y.dtype), mask=mask)


@triton.jit
def _over_rows(
    y_ptr, t_ptr, scale_ptr, keys_ptr, out_ptr, rows, channels, rank, out_trial, out_rank, out_channel,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, RANK: tl.constexpr, SCALED: tl.constexpr,
    DROPS: tl.constexpr,
):  # fmt: skip
    """out[r, channel] = scale * sum over rows of y[row, channel] t[row, r], of one trial."""
    trial = tl.program_id(1).to(tl.int64)
    lane = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    r = tl.arange(0, RANK)
    row = tl.arange(0, ROWS)
    y_at = y_ptr + (trial * rows + row)[:, None] * channels + lane[None, :]
    t_at = t_ptr + (trial * rows + row)[:, None] * rank + r[None, :]
    total = tl.zeros((CHANNELS, RANK), tl.float32)
    for start in range(0, rows, ROWS):
        inside = (start + row < rows)[:, None]
        y = tl.load(y_at, mask=inside & (lane < channels)[None, :], other=0.0)
        if DROPS:
            y = _dropped(y, keys_ptr, trial, (start + row)[:, None] * channels + lane[None, :])
        t = tl.load(t_at, mask=inside & (r < rank)[None, :], other=0.0)
        total = _times(tl.trans(y), t, total)
        y_at += ROWS * channels
        t_at += ROWS * rank
    if SCALED:
        total *= tl.load(scale_ptr + trial)
    at = out_ptr + trial * out_trial + r[None, :] * out_rank + lane[:, None] * out_channel
    mask = (lane < channels)[:, None] & (r < rank)[None, :]
    tl.store(at, total.to(out_ptr.dtype.element_ty), mask=mask)


class _Tile(NamedTuple):
    """How a kernel goes over memory: rows and channels at a time."""

    rows: int
    channels: int
    warps: int
    stages: int


# The fastest of a dozen on an H200, for the layers of a model of 0.5e9 weights.
_TO_RANK, _OVER_ROWS = _Tile(128, 64, 8, 4), _Tile(32, 256, 4, 3)
# For weights whose channels lie next to each other, and whose ranks do.
_FROM_RANK = {True: _Tile(32, 128, 2, 4), False: _Tile(64, 128, 4, 3)}


def _options(tile: _Tile, rank: int, scaled: bool, keys: Tensor | None) -> dict[str, Any]:
    padded = max(_LEAST_RANK, power_of_2_from(rank))
    is_narrow = padded == _LEAST_RANK
    return {"ROWS": tile.rows, "CHANNELS": tile.channels if is_narrow else 64, "RANK": padded,
            "SCALED": scaled, "DROPS": keys is not None,
            "num_warps": tile.warps if is_narrow else max(4, tile.warps),
            "num_stages": tile.stages if is_narrow else 2}  # fmt: skip


def _sizes(wide: Tensor, rank: int) -> tuple[int, int, int, int]:
    assert wide.is_contiguous()
    return len(wide), wide.shape[1], wide.shape[2], rank


# In each of these, `keys` drop elements of the wide tensor.


def _narrow(x: Tensor, w_trc: Tensor, scale: Tensor, scaled: bool, keys: Tensor | None = None) -> Tensor:
    """(trials, rows, rank), in float32, of (trials, rows, channels) and weights (trials, rank, channels)."""
    trials, rows, channels, rank = _sizes(x, w_trc.shape[1])
    out = torch.empty(trials, rows, rank, device=x.device, dtype=torch.float32)
    options = _options(_TO_RANK, rank, scaled, keys)
    grid = (cdiv(rows, options["ROWS"]), trials)
    launch(_to_rank, grid, (x, w_trc, scale, keys, out), (rows, channels, rank, *w_trc.stride()), **options)
    return out


def _widen(
    t: Tensor, w_trc: Tensor, scale: Tensor, scaled: bool, y: Tensor, keys: Tensor | None = None
) -> None:
    """Add the product of (trials, rows, rank) with weights (trials, rank, channels) to y."""
    trials, rows, channels, rank = _sizes(y, t.shape[2])
    options = _options(_FROM_RANK[w_trc.stride(2) == 1], rank, scaled, keys)
    grid = (cdiv(rows, options["ROWS"]), cdiv(channels, options["CHANNELS"]), trials)
    launch(_from_rank, grid, (t, w_trc, scale, keys, y), (rows, channels, rank, *w_trc.stride()), **options)


def _gradient(
    y: Tensor, t: Tensor, scale: Tensor, scaled: bool, like_trc: Tensor, keys: Tensor | None = None
) -> None:
    """Write the gradient of weights (trials, rank, channels) to `like_trc`."""
    trials, rows, channels, rank = _sizes(y, t.shape[2])
    options = _options(_OVER_ROWS, rank, scaled, keys)
    grid = (cdiv(channels, options["CHANNELS"]), trials)
    numbers = rows, channels, rank, *like_trc.stride()
    launch(_over_rows, grid, (y, t, scale, keys, like_trc), numbers, **options)


class _AdaptedLinear(PlainFunction):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        a: Tensor,
        b: Tensor,
        scale: Tensor,
        keys: Tensor | None,
    ) -> Tensor:
        y: Tensor = F.linear(x.flatten(0, 1), weight, bias).unflatten(0, x.shape[:2])
        t = _narrow(x, a, scale, False, keys)
        _widen(t, b.mT, scale, True, y)
        ctx.save_for_backward(x, weight, a, b, scale, t, keys)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight, a, b, scale, t, keys = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _differentiable(ctx.needs_input_grad, x, weight, a, b, scale, keys, gradient)
        gradient = gradient.contiguous()
        dt = _narrow(gradient, b.mT, scale, True)
        dx = da = db = None
        if ctx.needs_input_grad[0]:
            dx = (gradient.flatten(0, 1) @ weight).unflatten(0, gradient.shape[:2])
            _widen(dt, a, scale, False, dx, keys)
        if ctx.needs_input_grad[3]:
            da = torch.empty_like(a)
            _gradient(x, dt, scale, False, da, keys)
        if ctx.needs_input_grad[4]:
            db = torch.empty_like(b)
            _gradient(gradient, t, scale, True, db.mT)
        return dx, None, None, da, db, None, None


def _differentiable(
    needed: tuple[bool, ...],
    x: Tensor,
    weight: Tensor,
    a: Tensor,
    b: Tensor,
    scale: Tensor,
    keys: Tensor | None,
    gradient: Tensor,
) -> tuple[Tensor | None, ...]:
    """The gradients, of operations that can be differentiated again."""
    wide, down, up, own = x.float(), a.float(), b.float(), gradient.float() * scale.view(-1, 1, 1)
    kept = 1.0 if keys is None else is_kept(keys, tuple(x.shape[1:])).float()
    wide = wide * kept
    inputs = (
        (gradient @ weight).float() + own @ up @ down * kept,
        (own @ up).mT @ wide,
        own.mT @ (wide @ down.mT),
    )
    dx, da, db = (
        each.to(like.dtype) if need else None
        for each, like, need in zip(inputs, (x, a, b), (needed[0], needed[3], needed[4]))
    )
    return dx, None, None, da, db, None, None


def adapted_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    a: Tensor,
    b: Tensor,
    scale: Tensor,
    keys: Tensor | None = None,
) -> Tensor:
    """The output for x (trials, ..., in), weight (out, in), a (trials, rank, in) and b (trials, out, rank).

    `scale` has a float32 for each trial, and `keys` say which elements of x the adapters get
    (`Streams.dropout_keys`); None: all. The weight and the bias get no gradients.
    """
    rows = x.reshape(len(x), -1, x.shape[-1]).contiguous()
    y: Tensor = _AdaptedLinear.apply(rows, weight, bias, a, b, scale, keys)
    return y.view(*x.shape[:-1], len(weight))
