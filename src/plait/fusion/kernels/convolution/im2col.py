"""Convolutions of images with few channels by im2col: all taps of a pixel form one row of a matrix product.

A separate product per tap would reduce over, say, three channels, where Tensor Cores need sixteen.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.fusion.kernels import cdiv, power_of_2_from
from plait.fusion.kernels.images import Pad, Size, small_size
from plait.fusion.kernels.launch import launch, tl, triton

FEW = 4
_ROWS = 128
# The rows of a weight gradient are split into enough programs to hide memory latency.
_PROGRAMS = 132 * 8


@triton.jit
def _spread(
    x_ptr, y_ptr, size, trials, in_h, in_w, high, wide, channels,
    of_trial, of_image, of_channel, of_line, of_pixel,
    PAD_H: tl.constexpr, PAD_W: tl.constexpr, FEW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Separate each trial's images, padded with zeros on all sides and to `FEW` channels.

    The trials of the same pixels are neighbours in the grid, as they are in memory.
    """
    trial = (tl.program_id(0) % trials).to(tl.int64)
    pixel = tl.program_id(0) // trials * BLOCK + tl.arange(0, BLOCK)
    channel = tl.arange(0, FEW)
    x_at = pixel % wide - PAD_W
    line = pixel // wide
    y_at = (line % high - PAD_H).to(tl.int64)
    image = (line // high).to(tl.int64)
    inside = (x_at >= 0) & (x_at < in_w) & (y_at >= 0) & (y_at < in_h) & (pixel < size)
    at = trial * of_trial + image * of_image + y_at * of_line + x_at * of_pixel
    mask = inside[:, None] & (channel < channels)[None, :]
    x = tl.load(x_ptr + at[:, None] + (channel * of_channel)[None, :], mask=mask, other=0.0)
    to = (trial * size + pixel)[:, None] * FEW + channel[None, :]
    tl.store(y_ptr + to, x, mask=(pixel < size)[:, None])


@triton.jit
def _patches(
    x_ptr, offs_m, offs_k, rows, out_h, out_w, high, across, trial, batch,
    REDUCED: tl.constexpr, RUN: tl.constexpr, STRIDE: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """Load the patches at these pixels, of shape (pixels, taps x channels)."""
    image = trial * batch + offs_m // (out_w * out_h)
    line = (image * high + offs_m // out_w % out_h * STRIDE).to(tl.int64)
    # Written so that the compiler sees the alignment of addresses, and uses wide loads.
    corner = (line * across + offs_m % out_w) * (STRIDE * FEW)
    offsets = (offs_k // RUN) * (across * (STRIDE * FEW)) + offs_k % RUN
    mask = (offs_m < rows)[:, None] & (offs_k < REDUCED)[None, :]
    return tl.load(x_ptr + corner[:, None] + offsets[None, :], mask=mask, other=0.0)


@triton.jit
def _patch_product(
    x_ptr, w_ptr, bias_ptr, y_ptr, rows, outs, out_h, out_w, high, across, batch, y_row,
    REDUCED: tl.constexpr, RUN: tl.constexpr, STRIDE: tl.constexpr, FEW: tl.constexpr,
    HAS_BIAS: tl.constexpr, SLOPE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """y[pixel, out] = sum over taps and channels of the patch at that pixel times the weights."""
    trial = tl.program_id(1)
    tiles_n = tl.cdiv(outs, BLOCK_N)
    offs_m = (tl.program_id(0) // tiles_n) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = (tl.program_id(0) % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, REDUCED, BLOCK_K):
        offs_k = k + tl.arange(0, BLOCK_K)
        x = _patches(
            x_ptr, offs_m, offs_k, rows, out_h, out_w, high, across, trial, batch, REDUCED, RUN, STRIDE, FEW
        )
        w_at = (trial * outs + offs_n)[None, :] * REDUCED + offs_k[:, None]
        w = tl.load(w_ptr + w_at, mask=(offs_k < REDUCED)[:, None] & (offs_n < outs)[None, :], other=0.0)
        acc = tl.dot(x, w, acc)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + trial * outs + offs_n, mask=offs_n < outs, other=0.0)
        acc += bias.to(tl.float32)[None, :]
    if SLOPE != 1.0:
        acc = tl.where(acc > 0.0, acc, acc * SLOPE)
    to = offs_m.to(tl.int64)[:, None] * y_row + (trial * outs + offs_n)[None, :]
    mask = (offs_m < rows)[:, None] & (offs_n < outs)[None, :]
    tl.store(y_ptr + to, acc.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _patch_gradient(
    x_ptr, dy_ptr, y_ptr, dw_ptr, rows, outs, out_h, out_w, high, across, batch, dy_row,
    REDUCED: tl.constexpr, RUN: tl.constexpr, STRIDE: tl.constexpr, FEW: tl.constexpr, SLOPE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """dw[out, tap and channel] = sum over this program's pixels of dy times the patch."""
    trial = tl.program_id(1)
    tiles_k = tl.cdiv(REDUCED, BLOCK_K)
    offs_o = (tl.program_id(0) // tiles_k) * BLOCK_O + tl.arange(0, BLOCK_O)
    offs_k = (tl.program_id(0) % tiles_k) * BLOCK_K + tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_O, BLOCK_K), dtype=tl.float32)
    for start in range(tl.program_id(2) * BLOCK_M, rows, tl.num_programs(2) * BLOCK_M):
        offs_m = start + tl.arange(0, BLOCK_M)
        x = _patches(
            x_ptr, offs_m, offs_k, rows, out_h, out_w, high, across, trial, batch, REDUCED, RUN, STRIDE, FEW
        )
        dy_at = offs_m.to(tl.int64)[:, None] * dy_row + (trial * outs + offs_o)[None, :]
        mask = (offs_m < rows)[:, None] & (offs_o < outs)[None, :]
        dy = tl.load(dy_ptr + dy_at, mask=mask, other=0.0)
        if SLOPE != 1.0:
            # The activation has the sign of its input.
            y = tl.load(y_ptr + dy_at, mask=mask, other=0.0)
            dy = tl.where(y > 0, dy, (dy * SLOPE).to(dy.dtype))
        acc = tl.dot(tl.trans(dy), x, acc)
    share = (tl.program_id(2).to(tl.int64) * tl.num_programs(1) + trial) * outs * REDUCED
    to = share + offs_o[:, None] * REDUCED + offs_k[None, :]
    tl.store(dw_ptr + to, acc, mask=(offs_o < outs)[:, None] & (offs_k < REDUCED)[None, :])


@triton.jit
def _fold(
    p_ptr, bias_ptr, y_ptr, size, wide, channels, in_h, in_w, out_h, out_w, p_row,
    KERNEL_H: tl.constexpr, KERNEL_W: tl.constexpr, STRIDE: tl.constexpr,
    PAD_H: tl.constexpr, PAD_W: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y[pixel, channel] = sum over the columns of the small image whose taps reach the pixel (col2im)."""
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column = (offs % wide).to(tl.int32)
    pixel = (offs // wide).to(tl.int32)
    image = pixel // (out_h * out_w)
    y_at = pixel // out_w % out_h + PAD_H
    x_at = pixel % out_w + PAD_W
    from_trial = (column // channels) * (KERNEL_H * KERNEL_W * channels) + column % channels
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for step_y in tl.static_range((KERNEL_H + STRIDE - 1) // STRIDE):
        for step_x in tl.static_range((KERNEL_W + STRIDE - 1) // STRIDE):
            tap_y = y_at % STRIDE + STRIDE * step_y
            tap_x = x_at % STRIDE + STRIDE * step_x
            in_y = y_at // STRIDE - step_y
            in_x = x_at // STRIDE - step_x
            mask = (tap_y < KERNEL_H) & (tap_x < KERNEL_W) & (in_y >= 0) & (in_x >= 0)
            mask = mask & (in_y < in_h) & (in_x < in_w) & (offs < size)
            row = ((image * in_h + in_y) * in_w + in_x).to(tl.int64) * p_row
            at = p_ptr + row + from_trial + (tap_y * KERNEL_W + tap_x) * channels
            total += tl.load(at, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        total += tl.load(bias_ptr + column, mask=offs < size, other=0.0).to(tl.float32)
    tl.store(y_ptr + offs, total.to(y_ptr.dtype.element_ty), mask=offs < size)


def fits(taps: Tensor) -> bool:
    """Whether the large image has few enough channels for im2col."""
    return taps.shape[-1] <= FEW


def _width(size: int) -> int:
    """The block size for this many columns: at least the minimum of Tensor Cores, at most what is fast."""
    return min(64, max(16, power_of_2_from(size)))


def spread_out(large: Tensor, taps: Tensor, stride: int, pad: Pad) -> Tensor:
    """`large`, in any order of axes, as (trials, batch, height, width, few), padded for all taps."""
    trials, _, kernel_h, _, channels = taps.shape
    size, taps_across = small_size(large, taps, stride, pad), _taps_across(taps)
    high = (size[0] - 1) * stride + kernel_h
    wide = stride * cdiv((size[1] - 1) * stride + taps_across, stride)
    shape = (trials, large.shape[1], high, wide, FEW)
    spread = torch.empty(shape, dtype=large.dtype, device=large.device)
    pixels = large.shape[1] * high * wide
    numbers = (pixels, trials, *large.shape[3:], high, wide, channels, *large.stride(), *pad, FEW, 512)
    launch(_spread, (trials * cdiv(pixels, 512),), (large, spread), numbers)
    return spread


def _taps_across(taps: Tensor) -> int:
    """The taps of a row of the kernel, with those that are zero."""
    return power_of_2_from(taps.shape[3])


def _geometry(spread: Tensor, size: Size, stride: int) -> tuple[int, ...]:
    return (*size, spread.shape[2], spread.shape[3] // stride, spread.shape[1])


def down(
    spread: Tensor,
    taps: Tensor,
    bias: Tensor | None,
    stride: int,
    small: Tensor,
    slope: float = 1.0,
) -> None:
    """A convolution to `small` (trials, batch, out, h, w) with taps (trials, out, kernel h and w, channels).

    `spread` is what `spread_out` makes of the images; what is negative is multiplied by the `slope`.
    """
    count, outs, kernel_h, kernel_w, channels = taps.shape
    size, taps_across = small.shape[3:], _taps_across(taps)
    weights = F.pad(taps, (0, FEW - channels, 0, taps_across - kernel_w)).contiguous()
    rows, columns = small.shape[1] * size[0] * size[1], _width(outs)
    run = taps_across * FEW
    numbers = (
        rows, outs, *_geometry(spread, size, stride), count * outs,
        kernel_h * run, run, stride, FEW, bias is not None, slope, _ROWS, columns, _width(kernel_h * run),
    )  # fmt: skip
    tensors = spread, weights, bias if bias is not None else spread, small
    launch(_patch_product, (cdiv(rows, _ROWS) * cdiv(outs, columns), count), tensors, numbers)


def taps_gradient(
    spread: Tensor,
    small: Tensor,
    taps: Tensor,
    stride: int,
    activated: Tensor | None = None,
    slope: float = 1.0,
) -> Tensor:
    """The gradient of the taps, in float32, from the large image, spread out, and the small one.

    With a `slope` the small one is the gradient of what was `activated` with it.
    """
    count, outs, kernel_h, kernel_w, channels = taps.shape
    size, taps_across = small.shape[3:], _taps_across(taps)
    rows, run = small.shape[1] * size[0] * size[1], taps_across * FEW
    block_o, block_k = _width(outs), _width(kernel_h * run)
    tiles = cdiv(outs, block_o) * cdiv(kernel_h * run, block_k)
    shares = max(1, min(_PROGRAMS // (tiles * count), rows // (4 * _ROWS)))
    shape = (shares, count, outs, kernel_h, taps_across, FEW)
    parts = torch.empty(shape, dtype=torch.float32, device=small.device)
    numbers = (
        rows, outs, *_geometry(spread, size, stride), count * outs,
        kernel_h * run, run, stride, FEW, slope, _ROWS, block_o, block_k,
    )  # fmt: skip
    tensors = spread, small, small if activated is None else activated, parts
    launch(_patch_gradient, (tiles, count, shares), tensors, numbers)
    return parts.sum(0)[..., :kernel_w, :channels].contiguous()


def as_points(taps: Tensor) -> Tensor:
    """The weights of a transposed convolution as a 1x1 convolution that computes the columns of all taps."""
    return taps.flatten(2).mT.contiguous()[:, :, None, None, :]


def fold_columns(
    columns: Tensor, taps: Tensor, bias: Tensor | None, stride: int, pad: Pad, large: Tensor
) -> None:
    """Sum `large` from the columns of each pixel of the small image (col2im)."""
    count, _, kernel_h, kernel_w, channels = taps.shape
    block = 1024
    numbers = (
        large.numel(), count * channels, channels,
        *columns.shape[3:], *large.shape[3:], count * columns.shape[2],
        kernel_h, kernel_w, stride, *pad, bias is not None, block,
    )  # fmt: skip
    tensors = columns, bias if bias is not None else columns, large
    launch(_fold, (cdiv(large.numel(), block),), tensors, numbers)
