"""Batch norm of all trials, with the ReLU and the maximum that may follow it, in few passes over memory.

Values lie as rows of channels, the trials' channels side by side: (batch, points, trials x channels).
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,import-not-found"

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

try:
    import triton
    import triton.language as tl
except ImportError:
    from plait.fusion.kernels import absent as triton

_ROWS, _CHANNELS = 32, 128
# Enough programs to fill a GPU several times over.
_PROGRAMS = 132 * 16


@triton.jit
def _sums(x_ptr, out_ptr, rows, channels, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """Sums of x and of its square, both less the first row, over this program's share of the rows."""
    offs_c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    real = offs_c < channels
    shift = tl.load(x_ptr + offs_c, mask=real, other=0.0).to(tl.float32)
    # Summed across rows once, at the end: threads need not meet in the loop.
    total = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.float32)
    square = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.float32)
    for start in range(tl.program_id(1) * BLOCK_R, rows, tl.num_programs(1) * BLOCK_R):
        offs_r = (start + tl.arange(0, BLOCK_R)).to(tl.int64)
        mask = (offs_r < rows)[:, None] & real[None, :]
        x = tl.load(x_ptr + offs_r[:, None] * channels + offs_c[None, :], mask=mask, other=0.0).to(tl.float32)
        x = tl.where(mask, x - shift[None, :], 0.0)
        total += x
        square += x * x
    to = out_ptr + tl.program_id(1) * 2 * channels + offs_c
    tl.store(to, tl.sum(total, 0), mask=real)
    tl.store(to + channels, tl.sum(square, 0), mask=real)


@triton.jit
def _normalise(
    x_ptr, a_ptr, b_ptr, y_ptr, rows, channels,
    RELU: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """y = a x + b, cut at zero where a ReLU follows."""
    offs_r = (tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)
    offs_c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    real = offs_c < channels
    mask = (offs_r < rows)[:, None] & real[None, :]
    at = offs_r[:, None] * channels + offs_c[None, :]
    a = tl.load(a_ptr + offs_c, mask=real, other=0.0)
    b = tl.load(b_ptr + offs_c, mask=real, other=0.0)
    y = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32) * a[None, :] + b[None, :]
    if RELU:
        y = tl.maximum(y, 0.0)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _gradient_sums(
    x_ptr, dy_ptr, a_ptr, b_ptr, mean_ptr, inverse_ptr, out_ptr, rows, channels,
    RELU: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Sums of dy and of dy times the normalised x, over this program's share of the rows."""
    offs_c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    real = offs_c < channels
    a = tl.load(a_ptr + offs_c, mask=real, other=0.0)
    b = tl.load(b_ptr + offs_c, mask=real, other=0.0)
    mean = tl.load(mean_ptr + offs_c, mask=real, other=0.0)
    inverse = tl.load(inverse_ptr + offs_c, mask=real, other=0.0)
    total = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.float32)
    product = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.float32)
    for start in range(tl.program_id(1) * BLOCK_R, rows, tl.num_programs(1) * BLOCK_R):
        offs_r = (start + tl.arange(0, BLOCK_R)).to(tl.int64)
        mask = (offs_r < rows)[:, None] & real[None, :]
        at = offs_r[:, None] * channels + offs_c[None, :]
        x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + at, mask=mask, other=0.0).to(tl.float32)
        if RELU:
            dy = tl.where(x * a[None, :] + b[None, :] > 0, dy, 0.0)
        total += dy
        product += dy * (x - mean[None, :]) * inverse[None, :]
    to = out_ptr + tl.program_id(1) * 2 * channels + offs_c
    tl.store(to, tl.sum(total, 0), mask=real)
    tl.store(to + channels, tl.sum(product, 0), mask=real)


@triton.jit
def _gradient(
    x_ptr, dy_ptr, a_ptr, b_ptr, mean_ptr, inverse_ptr, c1_ptr, c2_ptr, dx_ptr, rows, channels,
    RELU: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """dx = a (dy - mean of dy - normalised x times the mean of its product with dy)."""
    offs_r = (tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)
    offs_c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    real = offs_c < channels
    mask = (offs_r < rows)[:, None] & real[None, :]
    at = offs_r[:, None] * channels + offs_c[None, :]
    a = tl.load(a_ptr + offs_c, mask=real, other=0.0)
    b = tl.load(b_ptr + offs_c, mask=real, other=0.0)
    mean = tl.load(mean_ptr + offs_c, mask=real, other=0.0)
    inverse = tl.load(inverse_ptr + offs_c, mask=real, other=0.0)
    c1 = tl.load(c1_ptr + offs_c, mask=real, other=0.0)
    c2 = tl.load(c2_ptr + offs_c, mask=real, other=0.0)
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if RELU:
        dy = tl.where(x * a[None, :] + b[None, :] > 0, dy, 0.0)
    normal = (x - mean[None, :]) * inverse[None, :]
    dx = a[None, :] * (dy - c1[None, :] - normal * c2[None, :])
    tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _largest(
    x_ptr, a_ptr, value_ptr, place_ptr, points, channels, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr
):
    """The x that a x + b is largest at, over the points of one sample, and where it is."""
    offs_c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    real = offs_c < channels
    sign = tl.where(tl.load(a_ptr + offs_c, mask=real, other=0.0) >= 0, 1.0, -1.0)
    sample = tl.program_id(1).to(tl.int64)
    best = tl.full((BLOCK_R, BLOCK_C), float("-inf"), dtype=tl.float32)
    first = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.int32)
    for start in range(0, points, BLOCK_R):
        offs_r = start + tl.arange(0, BLOCK_R)
        mask = (offs_r < points)[:, None] & real[None, :]
        at = (sample * points + offs_r)[:, None] * channels + offs_c[None, :]
        x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32) * sign[None, :]
        x = tl.where(mask, x, float("-inf"))
        first = tl.where(x > best, start, first)
        best = tl.maximum(best, x)
    largest = tl.max(best, 0)
    rows = first + tl.arange(0, BLOCK_R)[:, None]
    place = tl.min(tl.where(best == largest[None, :], rows, points), 0)
    to = sample * channels + offs_c
    tl.store(value_ptr + to, largest * sign, mask=real)
    tl.store(place_ptr + to, place, mask=real)


@triton.jit
def _gradient_of_largest(
    x_ptr, dy_ptr, place_ptr, a_ptr, mean_ptr, inverse_ptr, c1_ptr, c2_ptr, dx_ptr, points, channels,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """As `_gradient`, where dy is not zero at one point of each sample and channel only."""
    offs_r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    offs_c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    sample = tl.program_id(2).to(tl.int64)
    real = offs_c < channels
    mask = (offs_r < points)[:, None] & real[None, :]
    at = (sample * points + offs_r)[:, None] * channels + offs_c[None, :]
    a = tl.load(a_ptr + offs_c, mask=real, other=0.0)
    mean = tl.load(mean_ptr + offs_c, mask=real, other=0.0)
    inverse = tl.load(inverse_ptr + offs_c, mask=real, other=0.0)
    c1 = tl.load(c1_ptr + offs_c, mask=real, other=0.0)
    c2 = tl.load(c2_ptr + offs_c, mask=real, other=0.0)
    place = tl.load(place_ptr + sample * channels + offs_c, mask=real, other=0)
    dy = tl.load(dy_ptr + sample * channels + offs_c, mask=real, other=0.0)
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    here = tl.where(offs_r[:, None] == place[None, :], dy[None, :], 0.0)
    dx = a[None, :] * (here - c1[None, :] - (x - mean[None, :]) * inverse[None, :] * c2[None, :])
    tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=mask)


def statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """The mean and the (biased) variance of each channel of (batch, points, channels)."""
    channels = x.shape[-1]
    rows = x.numel() // channels
    sums = _partial(rows, channels, x.device)
    _sums[_shares(sums)](x, sums, rows, channels, _ROWS, _CHANNELS)
    offset, square = sums.sum(0).div_(rows)
    variance = (square - offset * offset).clamp_(min=0.0)
    return offset + x.view(-1, channels)[0].to(torch.float32), variance


def _partial(rows: int, channels: int, device: torch.device) -> Tensor:
    tiles = triton.cdiv(channels, _CHANNELS)
    shares = max(1, min(_PROGRAMS // tiles, triton.cdiv(rows, _ROWS)))
    return torch.empty((shares, 2, channels), dtype=torch.float32, device=device)


def _shares(sums: Tensor) -> tuple[int, int]:
    return triton.cdiv(sums.shape[2], _CHANNELS), sums.shape[0]


class _Norm(torch.autograd.Function):
    """Batch norm, and a ReLU where asked, of (batch, points, channels), given its statistics."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, inverse: Tensor, relu: bool
    ) -> Tensor:
        a = weight * inverse
        b = bias - mean * a
        y = torch.empty_like(x)
        channels = x.shape[-1]
        rows = x.numel() // channels
        grid = (triton.cdiv(channels, _CHANNELS), triton.cdiv(rows, _ROWS))
        _normalise[grid](x, a, b, y, rows, channels, relu, _ROWS, _CHANNELS)
        ctx.save_for_backward(x, a, b, mean, inverse)
        ctx.relu = relu
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, a, b, mean, inverse = ctx.saved_tensors
        dy = dy.contiguous()
        channels = x.shape[-1]
        rows = x.numel() // channels
        sums = _partial(rows, channels, x.device)
        _gradient_sums[_shares(sums)](
            x, dy, a, b, mean, inverse, sums, rows, channels, ctx.relu, _ROWS, _CHANNELS
        )
        d_bias, d_weight = sums.sum(0)
        c1, c2 = d_bias / rows, d_weight / rows
        dx = torch.empty_like(x)
        grid = (triton.cdiv(channels, _CHANNELS), triton.cdiv(rows, _ROWS))
        _gradient[grid](x, dy, a, b, mean, inverse, c1, c2, dx, rows, channels, ctx.relu, _ROWS, _CHANNELS)
        return dx, d_weight, d_bias, None, None, None


class _NormLargest(torch.autograd.Function):
    """The largest over a sample's points of what `_Norm` computes, which is never written down."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, inverse: Tensor, relu: bool
    ) -> tuple[Tensor, Tensor]:
        batch, points, channels = x.shape
        a = weight * inverse
        at = torch.empty((batch, channels), dtype=torch.float32, device=x.device)
        place = torch.empty((batch, channels), dtype=torch.int32, device=x.device)
        _largest[(triton.cdiv(channels, _CHANNELS), batch)](
            x, a, at, place, points, channels, _ROWS, _CHANNELS
        )
        value = (at - mean) * a + bias
        value = value.clamp(min=0.0) if relu else value
        ctx.save_for_backward(x, a, mean, inverse, at, place, value)
        ctx.relu = relu
        places = place.to(torch.int64)
        ctx.mark_non_differentiable(places)
        return value.to(x.dtype), places

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, _: Any) -> tuple[Any, ...]:
        x, a, mean, inverse, at, place, value = ctx.saved_tensors
        dy = dy.to(torch.float32)
        dy = torch.where(value > 0, dy, 0.0) if ctx.relu else dy.contiguous()
        batch, points, channels = x.shape
        d_bias, d_weight = dy.sum(0), (dy * (at - mean) * inverse).sum(0)
        c1, c2 = d_bias / (batch * points), d_weight / (batch * points)
        dx = torch.empty_like(x)
        grid = (triton.cdiv(channels, _CHANNELS), triton.cdiv(points, _ROWS), batch)
        _gradient_of_largest[grid](
            x, dy, place, a, mean, inverse, c1, c2, dx, points, channels, _ROWS, _CHANNELS
        )
        return dx, d_weight, d_bias, None, None, None


def trial_norm(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, inverse: Tensor, relu: bool) -> Tensor:
    """Batch norm of (batch, points, channels) by its own statistics, then a ReLU where asked."""
    outcome: Tensor = _Norm.apply(x, weight, bias, mean, inverse, relu)
    return outcome


def trial_norm_largest(
    x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, inverse: Tensor, relu: bool
) -> tuple[Tensor, Tensor]:
    """The largest value of `trial_norm` over the points of each sample, and its place: (batch, channels)."""
    value, place = _NormLargest.apply(x, weight, bias, mean, inverse, relu)
    return value, place
