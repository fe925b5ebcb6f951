"""Batch norm of all trials, fused with a following ReLU and maximum, in few passes over memory.

Values have shape (trials, batch, channels, ...) and lie in memory as (batch, points, trials x channels). The
statistics of each channel of each trial are in one table with the rows `KNOWN`: the norm is a x + b, from a
mean and an inverse deviation. A ReLU is a `slope` of 0 below zero, a leaky one another slope, none a slope
of 1; smooth activations have names in place of one. Loops over tiles load three ahead of what they compute.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from plait.fusion.kernels import Slope, cdiv
from plait.fusion.kernels.images import in_memory
from plait.fusion.kernels.launch import launch, tl, triton
from plait.fusion.plain_function import PlainFunction, once_differentiable

_ROWS, _CHANNELS = 32, 128
# Of its channels a program reads the table once, and then this many tiles.
_TILES = 8
# Sums are over as many rows a program as fill a GPU about once, and over fewer channels.
_PROGRAMS, _SUMMED = 132 * 4, 64
# The activations with names.
SMOOTH = frozenset(("silu", "hardswish"))
# The rows of the table.
KNOWN = ("a", "b", "mean", "inverse")


@triton.jit
def _columns(channels, BLOCK_C: tl.constexpr):
    """The channels of this program, and a mask of those that exist."""
    offs_c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    return offs_c, offs_c < channels


@triton.jit
def _known(table_ptr, row, offs_c, channels):
    """One row of the table for these channels, to broadcast."""
    return tl.load(table_ptr + row * channels + offs_c, mask=offs_c < channels, other=0.0)[None, :]


@triton.jit
def _cut(y, SLOPE: tl.constexpr):
    if SLOPE == "silu":
        y = y * tl.sigmoid(y)
    elif SLOPE == "hardswish":
        y = y * tl.where(y < -3.0, 0.0, tl.where(y > 3.0, 1.0, y / 6.0 + 0.5))
    elif SLOPE == 0.0:
        y = tl.where(y <= 0.0, 0.0, y)  # a NaN stays one
    elif SLOPE != 1.0:
        y = tl.where(y > 0, y, y * SLOPE)
    return y


@triton.jit
def _before_cut(dy, y, SLOPE: tl.constexpr):
    """The gradient of the norm's output y from that of the activation."""
    if SLOPE == "silu":
        s = tl.sigmoid(y)
        dy = dy * s * (1.0 + y * (1.0 - s))
    elif SLOPE == "hardswish":
        dy = dy * tl.where(y < -3.0, 0.0, tl.where(y > 3.0, 1.0, y / 3.0 + 0.5))
    elif SLOPE == 0.0:
        dy = tl.where(y <= 0.0, 0.0, dy)
    elif SLOPE != 1.0:
        dy = tl.where(y > 0, dy, dy * SLOPE)
    return dy


@triton.jit
def _before_norm(table_ptr, totals_ptr, offs_c, channels, count):
    """The numbers of dx = a (dy - mean of dy - (x - shift) factor), the factor being the inverse deviation
    times the mean product of dy and the normalised x.
    """
    a = _known(table_ptr, 0, offs_c, channels)
    mean = _known(totals_ptr, 0, offs_c, channels) / count
    product = _known(totals_ptr, 1, offs_c, channels) / count
    shift = _known(table_ptr, 2, offs_c, channels)
    return a, mean, shift, _known(table_ptr, 3, offs_c, channels) * product


@triton.jit
def _store_sums(out_ptr, first, second, offs_c, channels):
    """Sum across rows once, at the end of a loop, which then needs no synchronization."""
    to = out_ptr + tl.program_id(1) * 2 * channels + offs_c
    tl.store(to, tl.sum(first, 0), mask=offs_c < channels)
    tl.store(to + channels, tl.sum(second, 0), mask=offs_c < channels)


@triton.jit
def _store_moments(out_ptr, counts_ptr, total, square, shift, count, offs_c, channels):
    """Store the sum of some rows, that of the squares of what is left without their mean, and their number.

    Given are sums of what is left without a `shift`.
    """
    count = count.to(tl.float32)
    total_c = tl.sum(total, 0)
    to = out_ptr + tl.program_id(1) * 2 * channels + offs_c
    tl.store(to, total_c + count * tl.sum(shift, 0), mask=offs_c < channels)
    apart = tl.maximum(tl.sum(square, 0) - total_c * total_c / count, 0.0)
    tl.store(to + channels, apart, mask=offs_c < channels)
    tl.store(counts_ptr + tl.program_id(1), count, mask=tl.program_id(0) == 0)


@triton.jit(do_not_specialize=["rows"])
def _sums(x_ptr, out_ptr, counts_ptr, rows, channels, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """The sums of x over this program's rows, see `_store_moments`."""
    offs_c, real = _columns(channels, BLOCK_C)
    shift = _known(x_ptr, 0, offs_c, channels).to(tl.float32)
    total = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.float32)
    square = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.float32)
    first, apart = tl.program_id(1) * BLOCK_R, tl.num_programs(1) * BLOCK_R
    for start in tl.range(first, rows, apart, num_stages=3):
        offs_r = (start + tl.arange(0, BLOCK_R)).to(tl.int64)
        mask = (offs_r < rows)[:, None] & real[None, :]
        x = tl.load(x_ptr + offs_r[:, None] * channels + offs_c[None, :], mask=mask, other=0.0).to(tl.float32)
        x = tl.where(mask, x - shift, 0.0)
        total += x
        square += x * x
    # How many rows those of this program are: its last tile may have fewer.
    tiles = (rows - first + apart - 1) // apart
    count = (tiles - 1) * BLOCK_R + tl.minimum(rows - first - (tiles - 1) * apart, BLOCK_R)
    _store_moments(out_ptr, counts_ptr, total, square, shift, count, offs_c, channels)


@triton.jit(do_not_specialize=["tiles", "rows"])
def _finish(
    sums_ptr, counts_ptr, weight_ptr, bias_ptr, mean_ptr, variance_ptr, table_ptr,
    tiles, rows, channels, momentum, eps,
    HAS_RUNNING: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Compute the table from the sums of tiles, and update the running statistics."""
    offs_c, real = _columns(channels, BLOCK_C)
    total = tl.zeros((BLOCK_S, BLOCK_C), dtype=tl.float32)
    for start in range(0, tiles, BLOCK_S):
        offs_s = start + tl.arange(0, BLOCK_S)
        mask = (offs_s < tiles)[:, None] & real[None, :]
        at = sums_ptr + offs_s.to(tl.int64)[:, None] * 2 * channels + offs_c[None, :]
        total += tl.load(at, mask=mask, other=0.0)
    mean = tl.sum(total, 0) / rows
    # The squares within the tiles, and how far their means are from that of all.
    square = tl.zeros((BLOCK_S, BLOCK_C), dtype=tl.float32)
    for start in range(0, tiles, BLOCK_S):
        offs_s = start + tl.arange(0, BLOCK_S)
        mask = (offs_s < tiles)[:, None] & real[None, :]
        at = sums_ptr + offs_s.to(tl.int64)[:, None] * 2 * channels + offs_c[None, :]
        count = tl.load(counts_ptr + offs_s, mask=offs_s < tiles, other=0.0)[:, None]
        apart = tl.load(at, mask=mask, other=0.0) / tl.maximum(count, 1.0) - mean[None, :]
        square += tl.load(at + channels, mask=mask, other=0.0) + count * apart * apart
    variance = tl.sum(square, 0) / rows
    inverse = 1.0 / tl.sqrt(variance + eps)
    a = tl.load(weight_ptr + offs_c, mask=real, other=0.0) * inverse
    to = table_ptr + offs_c
    tl.store(to, a, mask=real)
    tl.store(to + channels, tl.load(bias_ptr + offs_c, mask=real, other=0.0) - mean * a, mask=real)
    tl.store(to + 2 * channels, mean, mask=real)
    tl.store(to + 3 * channels, inverse, mask=real)
    if HAS_RUNNING:
        old = tl.load(mean_ptr + offs_c, mask=real, other=0.0)
        tl.store(mean_ptr + offs_c, old + momentum * (mean - old), mask=real)
        old = tl.load(variance_ptr + offs_c, mask=real, other=0.0)
        unbiased = variance * (rows / (rows - 1.0))
        tl.store(variance_ptr + offs_c, old + momentum * (unbiased - old), mask=real)


@triton.jit(do_not_specialize=["rows"])
def _normalise(
    x_ptr, table_ptr, y_ptr, rows, channels,
    SLOPE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """y = a x + b, and its activation."""
    offs_c, real = _columns(channels, BLOCK_C)
    a = _known(table_ptr, 0, offs_c, channels)
    b = _known(table_ptr, 1, offs_c, channels)
    first, apart = tl.program_id(1) * BLOCK_R, tl.num_programs(1) * BLOCK_R
    for start in tl.range(first, rows, apart, num_stages=3):
        offs_r = (start + tl.arange(0, BLOCK_R)).to(tl.int64)
        mask = (offs_r < rows)[:, None] & real[None, :]
        at = offs_r[:, None] * channels + offs_c[None, :]
        x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(y_ptr + at, _cut(x * a + b, SLOPE).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _gradient_sums(
    x_ptr, dy_ptr, table_ptr, out_ptr, rows, channels,
    SLOPE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Sums of dy and of dy times the normalised x, over this program's rows."""
    offs_c, real = _columns(channels, BLOCK_C)
    a = _known(table_ptr, 0, offs_c, channels)
    b = _known(table_ptr, 1, offs_c, channels)
    mean = _known(table_ptr, 2, offs_c, channels)
    inverse = _known(table_ptr, 3, offs_c, channels)
    total = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.float32)
    product = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.float32)
    first, apart = tl.program_id(1) * BLOCK_R, tl.num_programs(1) * BLOCK_R
    for start in tl.range(first, rows, apart, num_stages=3):
        offs_r = (start + tl.arange(0, BLOCK_R)).to(tl.int64)
        mask = (offs_r < rows)[:, None] & real[None, :]
        at = offs_r[:, None] * channels + offs_c[None, :]
        x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + at, mask=mask, other=0.0).to(tl.float32)
        dy = _before_cut(dy, x * a + b, SLOPE)
        total += dy
        product += dy * (x - mean) * inverse
    _store_sums(out_ptr, total, product, offs_c, channels)


@triton.jit(do_not_specialize=["rows"])
def _gradient(
    x_ptr, dy_ptr, table_ptr, totals_ptr, dx_ptr, rows, channels,
    SLOPE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The gradient of x from that of the activation, and from the sums over it."""
    offs_c, real = _columns(channels, BLOCK_C)
    a, mean, shift, factor = _before_norm(table_ptr, totals_ptr, offs_c, channels, rows)
    b = _known(table_ptr, 1, offs_c, channels)
    first, apart = tl.program_id(1) * BLOCK_R, tl.num_programs(1) * BLOCK_R
    for start in tl.range(first, rows, apart, num_stages=3):
        offs_r = (start + tl.arange(0, BLOCK_R)).to(tl.int64)
        mask = (offs_r < rows)[:, None] & real[None, :]
        at = offs_r[:, None] * channels + offs_c[None, :]
        x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + at, mask=mask, other=0.0).to(tl.float32)
        dx = a * (_before_cut(dy, x * a + b, SLOPE) - mean - (x - shift) * factor)
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _largest(
    x_ptr, weight_ptr, value_ptr, index_ptr, out_ptr, counts_ptr, points, channels,
    HAS_SUMS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The x with the largest norm over the points of one sample, and its index; also the sums of x.

    The norm grows with x where the weight, or the number `a` of the table, is positive.
    """
    offs_c, real = _columns(channels, BLOCK_C)
    sign = tl.where(_known(weight_ptr, 0, offs_c, channels) >= 0, 1.0, -1.0)
    sample = tl.program_id(1).to(tl.int64)
    shift = tl.zeros((1, BLOCK_C), dtype=tl.float32)
    total = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.float32)
    square = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.float32)
    if HAS_SUMS:
        shift = _known(x_ptr, sample * points, offs_c, channels).to(tl.float32)
    best = tl.full((BLOCK_R, BLOCK_C), float("-inf"), dtype=tl.float32)
    first = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.int32)
    for start in tl.range(0, points, BLOCK_R, num_stages=3):
        offs_r = start + tl.arange(0, BLOCK_R)
        mask = (offs_r < points)[:, None] & real[None, :]
        at = (sample * points + offs_r)[:, None] * channels + offs_c[None, :]
        x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
        if HAS_SUMS:
            apart = tl.where(mask, x - shift, 0.0)
            total += apart
            square += apart * apart
        x = tl.where(mask, x * sign, float("-inf"))
        first = tl.where(x > best, start, first)
        best = tl.maximum(best, x)
    largest = tl.max(best, 0)
    rows = first + tl.arange(0, BLOCK_R)[:, None]
    index = tl.min(tl.where(best == largest[None, :], rows, points), 0)
    to = sample * channels + offs_c
    tl.store(value_ptr + to, largest * tl.sum(sign, 0), mask=real)
    tl.store(index_ptr + to, index, mask=real)
    if HAS_SUMS:
        _store_moments(out_ptr, counts_ptr, total, square, shift, points, offs_c, channels)


@triton.jit
def _gradient_of_largest(
    x_ptr, dy_ptr, index_ptr, table_ptr, totals_ptr, dx_ptr, points, channels, count,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Same as `_gradient`, with dy nonzero at only one point of each sample and channel."""
    offs_c, real = _columns(channels, BLOCK_C)
    sample = tl.program_id(2).to(tl.int64)
    a, mean, shift, factor = _before_norm(table_ptr, totals_ptr, offs_c, channels, count)
    index = _known(index_ptr, sample, offs_c, channels)
    of_largest = _known(dy_ptr, sample, offs_c, channels)
    first, apart = tl.program_id(1) * BLOCK_R, tl.num_programs(1) * BLOCK_R
    for start in tl.range(first, points, apart, num_stages=3):
        offs_r = start + tl.arange(0, BLOCK_R)
        mask = (offs_r < points)[:, None] & real[None, :]
        at = (sample * points + offs_r)[:, None] * channels + offs_c[None, :]
        x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
        dy = tl.where(offs_r[:, None] == index, of_largest, 0.0)
        dx = a * (dy - mean - (x - shift) * factor)
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=mask)


def _sizes(x: Tensor) -> tuple[int, int, int]:
    """The images, the points of each, and the channels of all trials."""
    trials, batch, channels, *points = x.shape
    return batch, prod(points), trials * channels


class Statistics(NamedTuple):
    """The table `KNOWN` of a norm's input and, if asked for, the largest x of each sample with its index."""

    table: Tensor
    largest: tuple[Tensor, Tensor] | None


def statistics(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    running: tuple[Tensor, Tensor] | None,
    momentum: float,
    eps: float,
    has_largest: bool,
) -> Statistics:
    """Statistics of x, for weights and biases (trials, channels); updates the running statistics, if any.

    With `has_largest` the largest x are found in the same pass over memory.
    """
    batch, points, channels = _sizes(x)
    rows = batch * points
    largest = None
    if has_largest:
        sums = torch.empty((batch, 2, channels), dtype=torch.float32, device=x.device)
        counts = sums.new_empty(batch)
        largest = _find_largest(x, weight, sums, counts)
    else:
        sums = _partial(rows, channels, x.device)
        counts = sums.new_empty(len(sums))
        grid = cdiv(channels, _SUMMED), len(sums)
        launch(_sums, grid, (x, sums, counts), (rows, channels, _ROWS, _SUMMED))
    table = torch.empty((len(KNOWN), channels), dtype=torch.float32, device=x.device)
    mean, variance = running or (table, table)
    tensors = sums, counts, weight, bias, mean, variance, table
    numbers = len(sums), rows, channels, float(momentum), float(eps), running is not None, 32, 32
    launch(_finish, (cdiv(channels, 32),), tensors, numbers)
    return Statistics(table, largest)


def _find_largest(
    x: Tensor, weight: Tensor, sums: Tensor | None, counts: Tensor | None
) -> tuple[Tensor, Tensor]:
    batch, points, channels = _sizes(x)
    value = torch.empty((batch, channels), dtype=torch.float32, device=x.device)
    index = torch.empty((batch, channels), dtype=torch.int64, device=x.device)
    has_sums = sums is not None
    tensors = x, weight, value, index, sums if has_sums else value, counts if has_sums else value
    numbers = points, channels, has_sums, _ROWS, _CHANNELS
    launch(_largest, (cdiv(channels, _CHANNELS), batch), tensors, numbers)
    return value, index


def _partial(rows: int, channels: int, device: torch.device) -> Tensor:
    """Room for two sums of each channel, for as many programs as there are rows for."""
    shares = max(1, min(_PROGRAMS // cdiv(channels, _SUMMED), cdiv(rows, _ROWS)))
    return torch.empty(shares, 2, channels, dtype=torch.float32, device=device)


class _Norm(PlainFunction):
    """Batch norm and activation, given the statistics."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, table: Tensor, slope: Slope) -> Tensor:
        y = torch.empty_like(x)
        batch, points, channels = _sizes(x)
        rows = batch * points
        grid = (cdiv(channels, _CHANNELS), cdiv(rows, _ROWS * _TILES))
        launch(_normalise, grid, (x, table, y), (rows, channels, slope, _ROWS, _CHANNELS))
        ctx.save_for_backward(x, table)
        ctx.slope = slope
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, table = ctx.saved_tensors
        dy = in_memory(dy).contiguous()
        batch, points, channels = _sizes(x)
        rows = batch * points
        sums = _partial(rows, channels, x.device)
        grid = cdiv(channels, _SUMMED), len(sums)
        launch(_gradient_sums, grid, (x, dy, table, sums), (rows, channels, ctx.slope, _ROWS, _SUMMED))
        totals = sums[0] if len(sums) == 1 else sums.sum(0)
        dx = torch.empty_like(x)
        grid = (cdiv(channels, _CHANNELS), cdiv(rows, _ROWS * _TILES))
        numbers = rows, channels, ctx.slope, _ROWS, _CHANNELS
        launch(_gradient, grid, (x, dy, table, totals, dx), numbers)
        return dx, *_of_trials(totals, x), None, None


class _NormLargest(PlainFunction):
    """The maximum of `_Norm` over the points of a sample, without storing the norm's output."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, known: Statistics, slope: float
    ) -> tuple[Tensor, Tensor]:
        table = known.table
        # The numbers `a` have the signs that the weights had when the statistics were made.
        at, index = known.largest or _find_largest(x, table, None, None)
        value = at * table[0] + table[1]
        is_kept = value > 0
        ctx.save_for_backward(x, table, at, index, is_kept)
        ctx.slope = slope
        # A ReLU makes zeros of all that is not kept, and torch's function finds the first.
        indices = index * is_kept if slope == 0.0 else index
        ctx.mark_non_differentiable(indices)
        return torch.where(is_kept, value, value * slope).to(x.dtype), indices

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, _: Any) -> tuple[Any, ...]:
        x, table, at, index, is_kept = ctx.saved_tensors
        dy = dy.to(torch.float32)
        dy = torch.where(is_kept, dy, dy * ctx.slope)
        batch, points, channels = _sizes(x)
        totals = torch.stack((dy.sum(0), (dy * (at - table[2]) * table[3]).sum(0)))
        dx = torch.empty_like(x)
        grid = (cdiv(channels, _CHANNELS), cdiv(points, _ROWS * _TILES), batch)
        numbers = points, channels, batch * points, _ROWS, _CHANNELS
        launch(_gradient_of_largest, grid, (x, dy, index, table, totals, dx), numbers)
        return dx, *_of_trials(totals, x), None, None


def _of_trials(totals: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of the weights and biases from their sums in the order of the kernels."""
    of_bias, of_weight = totals.view(2, x.shape[0], -1)
    return of_weight, of_bias


def trial_norm(x: Tensor, weight: Tensor, bias: Tensor, known: Statistics, slope: Slope) -> Tensor:
    """Batch norm by its statistics, with the activation's slope."""
    outcome: Tensor = _Norm.apply(x, weight, bias, known.table, slope)
    return outcome


def trial_norm_largest(
    x: Tensor, weight: Tensor, bias: Tensor, known: Statistics, slope: float
) -> tuple[Tensor, Tensor]:
    """The maximum of `trial_norm` over the points of each sample, and its index: (batch, channels)."""
    value, index = _NormLargest.apply(x, weight, bias, known, slope)
    return value, index
