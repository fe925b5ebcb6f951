"""Convolutions of all trials in one launch, as matrix products whose rows are gathered while loading.

Supports any channels and strides, on any GPU that Triton supports; slower than TMA and im2col where those
apply.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from plait.fusion.kernels import cdiv
from plait.fusion.kernels.images import Pad
from plait.fusion.kernels.launch import launch, tl, triton

_PRODUCT_BLOCKS = [
    (128, 64, 64, 4, 3),
    (128, 128, 64, 8, 3),
    (128, 16, 64, 4, 3),
    (128, 64, 16, 4, 4),
    (128, 16, 16, 4, 4),
]
_WEIGHT_BLOCKS = [
    (64, 64, 64, 4, 3),
    (128, 128, 64, 8, 3),
    (64, 16, 64, 4, 3),
    (16, 64, 64, 4, 3),
]
# Up to this many channels, tiles are narrow.
_NARROW = 16
# A weight gradient with fewer programs than this is split over its rows.
_PROGRAMS = 132 * 4


def _configs(blocks: list[tuple[int, int, int, int, int]], names: tuple[str, str, str]) -> list[Any]:
    return [
        triton.Config(dict(zip(names, sizes[:3])), num_warps=sizes[3], num_stages=sizes[4])
        for sizes in blocks
    ]


def _fits(size: int, block: int) -> bool:
    return (block == _NARROW) == (size <= _NARROW)


def _fitting_products(configs: list[Any], arguments: Any, **_: Any) -> list[Any]:
    outs, reduced = arguments["outs"], arguments["reduced"]
    return [c for c in configs if _fits(outs, c.kwargs["BLOCK_N"]) and _fits(reduced, c.kwargs["BLOCK_K"])]


def _fitting_weights(configs: list[Any], arguments: Any, **_: Any) -> list[Any]:
    outs, channels = arguments["outs"], arguments["channels"]
    fitting = [
        c for c in configs if _fits(outs, c.kwargs["BLOCK_O"]) and _fits(channels, c.kwargs["BLOCK_C"])
    ]
    return fitting or configs[:1]


@triton.autotune(
    _configs(_PRODUCT_BLOCKS, ("BLOCK_M", "BLOCK_N", "BLOCK_K")),
    key=["rows", "reduced", "outs", "KERNEL_W", "STRIDE", "UP"],
    prune_configs_by={"early_config_prune": _fitting_products},
    warmup=3,
    rep=12,
    cache_results=True,
)
@triton.jit
def _gather_product(
    a_ptr, b_ptr, bias_ptr, y_ptr, rows, reduced, outs, in_h, in_w, out_h, out_w, sub_h, sub_w,
    a_row, a_trial, b_trial, b_reduced, b_out, b_tap, y_row, y_trial,
    KERNEL_H: tl.constexpr, KERNEL_W: tl.constexpr, STRIDE: tl.constexpr,
    PAD_H: tl.constexpr, PAD_W: tl.constexpr, UP: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """y[row, out] = sum over taps and channels of a[gathered row, channel] * b[channel, out].

    A convolution computes a small image from a large one (down), a transposed one the reverse (up). Up, the
    pixels of each phase of the stride use the same taps and are computed together, so that no factor is zero.
    """
    trial = tl.program_id(1).to(tl.int64)
    tiles_n = tl.cdiv(outs, BLOCK_N)
    offs_m = (tl.program_id(0) // tiles_n) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = (tl.program_id(0) % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    image = offs_m // (sub_h * sub_w)
    y_at = (offs_m // sub_w) % sub_h
    x_at = offs_m % sub_w
    blocks = tl.cdiv(reduced, BLOCK_K)
    if UP:
        phase_y = tl.program_id(2) // STRIDE
        phase_x = tl.program_id(2) % STRIDE
        y_at = y_at * STRIDE + phase_y
        x_at = x_at * STRIDE + phase_x
        first_y = (phase_y + PAD_H) % STRIDE
        first_x = (phase_x + PAD_W) % STRIDE
        taps_y = (KERNEL_H - first_y + STRIDE - 1) // STRIDE
        taps_x = (KERNEL_W - first_x + STRIDE - 1) // STRIDE
    else:
        first_y = 0
        first_x = 0
        taps_y = KERNEL_H
        taps_x = KERNEL_W
    real = (offs_m < rows) & (y_at < out_h) & (x_at < out_w)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for step in range(taps_y * taps_x * blocks):
        number = step // blocks
        offs_k = (step % blocks) * BLOCK_K + tl.arange(0, BLOCK_K)
        if UP:
            tap_y = first_y + STRIDE * (number // taps_x)
            tap_x = first_x + STRIDE * (number % taps_x)
            in_y = (y_at + PAD_H - tap_y) // STRIDE
            in_x = (x_at + PAD_W - tap_x) // STRIDE
            # Integer division rounds towards zero, so check for pixels outside before it.
            inside = (y_at + PAD_H >= tap_y) & (x_at + PAD_W >= tap_x)
        else:
            tap_y = number // taps_x
            tap_x = number % taps_x
            in_y = y_at * STRIDE - PAD_H + tap_y
            in_x = x_at * STRIDE - PAD_W + tap_x
            inside = (in_y >= 0) & (in_x >= 0)
        inside = inside & (in_y < in_h) & (in_x < in_w) & real
        a_at = ((image * in_h + in_y) * in_w + in_x).to(tl.int64) * a_row + trial * a_trial
        a = tl.load(
            a_ptr + a_at[:, None] + offs_k[None, :],
            mask=inside[:, None] & (offs_k < reduced)[None, :],
            other=0.0,
        )
        tap = tap_y * KERNEL_W + tap_x
        b_at = trial * b_trial + tap * b_tap + offs_k[:, None] * b_reduced + offs_n[None, :] * b_out
        b = tl.load(b_ptr + b_at, mask=(offs_k < reduced)[:, None] & (offs_n < outs)[None, :], other=0.0)
        acc = tl.dot(a, b, acc)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + trial * outs + offs_n, mask=offs_n < outs, other=0.0).to(tl.float32)[
            None, :
        ]
    row = (image * out_h + y_at) * out_w + x_at
    y_to = row.to(tl.int64)[:, None] * y_row + trial * y_trial + offs_n[None, :]
    tl.store(y_ptr + y_to, acc.to(y_ptr.dtype.element_ty), mask=real[:, None] & (offs_n < outs)[None, :])


@triton.autotune(
    _configs(_WEIGHT_BLOCKS, ("BLOCK_O", "BLOCK_C", "BLOCK_M")),
    key=["rows", "outs", "channels", "KERNEL_W", "STRIDE"],
    prune_configs_by={"early_config_prune": _fitting_weights},
    warmup=3,
    rep=12,
    cache_results=True,
)
@triton.jit
def _weight_gradient(
    x_ptr, dy_ptr, dw_ptr, rows, channels, outs, in_h, in_w, out_h, out_w,
    x_row, x_trial, dy_row, dy_trial, dw_trial,
    KERNEL_H: tl.constexpr, KERNEL_W: tl.constexpr, STRIDE: tl.constexpr,
    PAD_H: tl.constexpr, PAD_W: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """dw[out, tap, channel] = sum over rows of dy[row, out] * x[gathered row, channel]."""
    trial = tl.program_id(1).to(tl.int64)
    tiles_c = tl.cdiv(channels, BLOCK_C)
    tap = tl.program_id(0) % (KERNEL_H * KERNEL_W)
    tile = tl.program_id(0) // (KERNEL_H * KERNEL_W)
    offs_o = (tile // tiles_c) * BLOCK_O + tl.arange(0, BLOCK_O)
    offs_c = (tile % tiles_c) * BLOCK_C + tl.arange(0, BLOCK_C)
    acc = tl.zeros((BLOCK_O, BLOCK_C), dtype=tl.float32)
    for start in range(tl.program_id(2) * BLOCK_M, rows, tl.num_programs(2) * BLOCK_M):
        offs_m = start + tl.arange(0, BLOCK_M)
        image = offs_m // (out_h * out_w)
        in_y = ((offs_m // out_w) % out_h) * STRIDE - PAD_H + tap // KERNEL_W
        in_x = (offs_m % out_w) * STRIDE - PAD_W + tap % KERNEL_W
        inside = (in_y >= 0) & (in_x >= 0) & (in_y < in_h) & (in_x < in_w) & (offs_m < rows)
        x_at = ((image * in_h + in_y) * in_w + in_x).to(tl.int64) * x_row + trial * x_trial
        x = tl.load(
            x_ptr + x_at[:, None] + offs_c[None, :],
            mask=inside[:, None] & (offs_c < channels)[None, :],
            other=0.0,
        )
        dy_at = offs_m.to(tl.int64)[:, None] * dy_row + trial * dy_trial + offs_o[None, :]
        dy = tl.load(dy_ptr + dy_at, mask=(offs_m < rows)[:, None] & (offs_o < outs)[None, :], other=0.0)
        acc = tl.dot(tl.trans(dy), x, acc)
    taps = KERNEL_H * KERNEL_W
    part = tl.program_id(2).to(tl.int64) * tl.num_programs(1) * dw_trial
    to = part + trial * dw_trial + (offs_o[:, None] * taps + tap) * channels + offs_c[None, :]
    tl.store(dw_ptr + to, acc, mask=(offs_o < outs)[:, None] & (offs_c < channels)[None, :])


def down(large: Tensor, taps: Tensor, bias: Tensor | None, stride: int, pad: Pad, small: Tensor) -> None:
    """A convolution to `small`: (trials, batch, channels, h, w) with taps (trials, out, kernel h and w,
    channels).
    """
    count, outs, kernel_h, kernel_w, channels = taps.shape
    _, batch, _, in_h, in_w = large.shape
    out_h, out_w = small.shape[3:]
    rows = batch * out_h * out_w
    tensors = large, taps, bias if bias is not None else large, small
    numbers = (
        rows, channels, outs, in_h, in_w, out_h, out_w, out_h, out_w,
        count * channels, channels, taps.stride(0), 1, taps.stride(1), channels, count * outs, outs,
        kernel_h, kernel_w, stride, pad[0], pad[1], False, bias is not None,
    )  # fmt: skip
    launch(_gather_product, _grid(rows, outs, count, 1), tensors, numbers)


def up(small: Tensor, taps: Tensor, bias: Tensor | None, stride: int, pad: Pad, large: Tensor) -> None:
    """The transpose of `down`: (trials, batch, out, ...) to `large` with the taps' channels."""
    count, outs, kernel_h, kernel_w, channels = taps.shape
    _, batch, _, in_h, in_w = small.shape
    size = large.shape[3:]
    sub_h, sub_w = -(-size[0] // stride), -(-size[1] // stride)
    rows = batch * sub_h * sub_w
    tensors = small, taps, bias if bias is not None else small, large
    numbers = (
        rows, outs, channels, in_h, in_w, size[0], size[1], sub_h, sub_w,
        count * outs, outs, taps.stride(0), taps.stride(1), 1, channels, count * channels, channels,
        kernel_h, kernel_w, stride, pad[0], pad[1], True, bias is not None,
    )  # fmt: skip
    launch(_gather_product, _grid(rows, channels, count, stride * stride), tensors, numbers)


def _grid(rows: int, outs: int, count: int, phases: int) -> Any:
    return lambda meta: (
        cdiv(rows, meta["BLOCK_M"]) * cdiv(outs, meta["BLOCK_N"]),
        count,
        phases,
    )


def taps_gradient(large: Tensor, small: Tensor, taps: Tensor, stride: int, pad: Pad) -> Tensor:
    """The gradient of the taps, in float32, from the large image and the small one; one is a gradient."""
    count, outs, kernel_h, kernel_w, channels = taps.shape
    _, batch, _, in_h, in_w = large.shape
    out_h, out_w = small.shape[3:]
    tiles = cdiv(outs, 128) * cdiv(channels, 128) * kernel_h * kernel_w * count
    shares = max(1, min(_PROGRAMS // tiles, batch * out_h * out_w // 1024))
    parts = torch.empty((shares, *taps.shape), dtype=torch.float32, device=large.device)

    def grid(meta: Any) -> tuple[int, int, int]:
        tiles = cdiv(outs, meta["BLOCK_O"]) * cdiv(channels, meta["BLOCK_C"])
        return tiles * kernel_h * kernel_w, count, shares

    numbers = (
        batch * out_h * out_w, channels, outs, in_h, in_w, out_h, out_w,
        count * channels, channels, count * outs, outs, parts.stride(1),
        kernel_h, kernel_w, stride, pad[0], pad[1],
    )  # fmt: skip
    launch(_weight_gradient, grid, (large, small, parts), numbers)
    return parts[0] if shares == 1 else parts.sum(0)
