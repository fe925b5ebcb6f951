"""Depthwise convolutions of all trials in one launch each, and their gradients.

Each channel of each trial has one filter, so that trials are but more channels. cuDNN takes a launch
for each channel where a stride or a kernel is unusual: 20,000 a step for 32 MobileNets.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,misc"

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from plait.fusion.kernels import cdiv, power_of_2_from
from plait.fusion.kernels.images import Pad, in_16_bits, in_order, new_images
from plait.fusion.kernels.launch import launch, tl, triton
from plait.fusion.plain_function import PlainFunction, once_differentiable

# Pixels and channels of a program, and how many numbers it holds for the gradient of the filters.
_PIXELS, _CHANNELS = 32, 64
_HELD = 8192
# The most taps that are compiled one by one, which takes seconds for more.
_UNROLLED = 25
# Enough programs to fill a GPU a few times.
_PROGRAMS = 132 * 8


@triton.jit
def _row_of_taps(
    acc, x_ptr, taps_ptr, row, image, y_at, x_at, exists, offs_c, in_c, channels, in_h, in_w,
    KERNEL_W: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    PAD_H: tl.constexpr, PAD_W: tl.constexpr, STEP_H: tl.constexpr, STEP_W: tl.constexpr,
    UP: tl.constexpr,
):  # fmt: skip
    """Add the products with one row of a filter's taps; up, each pixel reads the outputs that read it."""
    for column in tl.static_range(KERNEL_W):
        if UP:
            from_y = y_at + PAD_H - row * STEP_H
            from_x = x_at + PAD_W - column * STEP_W
            in_y, in_x = from_y // STRIDE_H, from_x // STRIDE_W
            inside = (from_y >= 0) & (from_x >= 0) & (from_y % STRIDE_H == 0) & (from_x % STRIDE_W == 0)
        else:
            in_y = y_at * STRIDE_H - PAD_H + row * STEP_H
            in_x = x_at * STRIDE_W - PAD_W + column * STEP_W
            inside = (in_y >= 0) & (in_x >= 0)
        inside = inside & (in_y < in_h) & (in_x < in_w) & exists
        at = ((image * in_h + in_y) * in_w + in_x).to(tl.int64) * channels
        x = tl.load(x_ptr + at[:, None] + offs_c[None, :], mask=inside[:, None] & in_c[None, :], other=0.0)
        tap = row * KERNEL_W + column
        weight = tl.load(taps_ptr + tap * channels + offs_c, mask=in_c, other=0.0)
        acc += x.to(tl.float32) * weight.to(tl.float32)[None, :]
    return acc


@triton.jit(do_not_specialize=["pixels", "in_h", "in_w", "out_h", "out_w"])
def _product(
    x_ptr, taps_ptr, bias_ptr, y_ptr, pixels, channels, in_h, in_w, out_h, out_w,
    KERNEL_H: tl.constexpr, KERNEL_W: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    PAD_H: tl.constexpr, PAD_W: tl.constexpr, STEP_H: tl.constexpr, STEP_W: tl.constexpr,
    UP: tl.constexpr, HAS_BIAS: tl.constexpr, UNROLLED: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The convolution, or up its transpose: the gradient of the images."""
    offs_p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    offs_c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    in_c = offs_c < channels
    exists = offs_p < pixels
    image, y_at, x_at = offs_p // (out_h * out_w), (offs_p // out_w) % out_h, offs_p % out_w
    acc = tl.zeros((BLOCK_P, BLOCK_C), dtype=tl.float32)
    if UNROLLED:
        for row in tl.static_range(KERNEL_H):
            acc = _row_of_taps(
                acc, x_ptr, taps_ptr, row, image, y_at, x_at, exists, offs_c, in_c, channels, in_h, in_w,
                KERNEL_W, STRIDE_H, STRIDE_W, PAD_H, PAD_W, STEP_H, STEP_W, UP,
            )  # fmt: skip
    else:
        for row in range(KERNEL_H):
            acc = _row_of_taps(
                acc, x_ptr, taps_ptr, row, image, y_at, x_at, exists, offs_c, in_c, channels, in_h, in_w,
                KERNEL_W, STRIDE_H, STRIDE_W, PAD_H, PAD_W, STEP_H, STEP_W, UP,
            )  # fmt: skip
    if HAS_BIAS:
        acc += tl.load(bias_ptr + offs_c, mask=in_c, other=0.0).to(tl.float32)[None, :]
    to = offs_p.to(tl.int64)[:, None] * channels + offs_c[None, :]
    tl.store(y_ptr + to, acc.to(y_ptr.dtype.element_ty), mask=exists[:, None] & in_c[None, :])


@triton.jit(do_not_specialize=["pixels", "in_h", "in_w", "out_h", "out_w"])
def _filter_gradient(
    x_ptr, dy_ptr, parts_ptr, pixels, channels, in_h, in_w, out_h, out_w,
    KERNEL_W: tl.constexpr, TAPS: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    PAD_H: tl.constexpr, PAD_W: tl.constexpr, STEP_H: tl.constexpr, STEP_W: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """For each tap and channel the sum of dy * x over this program's share of the output's pixels."""
    offs_t = tl.arange(0, BLOCK_T)
    offs_c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    in_c = offs_c < channels
    acc = tl.zeros((BLOCK_T, BLOCK_P, BLOCK_C), dtype=tl.float32)
    for start in range(tl.program_id(1) * BLOCK_P, pixels, tl.num_programs(1) * BLOCK_P):
        offs_p = start + tl.arange(0, BLOCK_P)
        real = offs_p < pixels
        image, y_at, x_at = offs_p // (out_h * out_w), (offs_p // out_w) % out_h, offs_p % out_w
        dy_at = offs_p.to(tl.int64)[:, None] * channels + offs_c[None, :]
        dy = tl.load(dy_ptr + dy_at, mask=real[:, None] & in_c[None, :], other=0.0).to(tl.float32)
        in_y = (y_at * STRIDE_H - PAD_H)[None, :] + ((offs_t // KERNEL_W) * STEP_H)[:, None]
        in_x = (x_at * STRIDE_W - PAD_W)[None, :] + ((offs_t % KERNEL_W) * STEP_W)[:, None]
        inside = (in_y >= 0) & (in_x >= 0) & (in_y < in_h) & (in_x < in_w)
        inside = inside & real[None, :] & (offs_t < TAPS)[:, None]
        at = ((image[None, :] * in_h + in_y) * in_w + in_x).to(tl.int64) * channels
        x = tl.load(
            x_ptr + at[:, :, None] + offs_c[None, None, :],
            mask=inside[:, :, None] & in_c[None, None, :],
            other=0.0,
        )
        acc += x.to(tl.float32) * dy[None, :, :]
    to = (tl.program_id(1).to(tl.int64) * TAPS + offs_t)[:, None] * channels + offs_c[None, :]
    tl.store(parts_ptr + to, tl.sum(acc, 1), mask=(offs_t < TAPS)[:, None] & in_c[None, :])


class _Depthwise(PlainFunction):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, filters: Tensor, bias: Tensor | None, stride: Pad, pad: Pad, dilation: Pad
    ) -> Tensor:
        trials, each, _, *kernel = filters.shape
        channels = trials * each
        taps = filters.reshape(channels, -1).t().to(x.dtype).contiguous()
        out_h, out_w = (
            (x.shape[3 + axis] + 2 * pad[axis] - dilation[axis] * (kernel[axis] - 1) - 1) // stride[axis] + 1
            for axis in range(2)
        )
        y, x = new_images(x, each, (out_h, out_w)), in_order(x)
        _multiply(x, taps, bias, y, (kernel, stride, pad, dilation), False)
        ctx.geometry = (kernel, stride, pad, dilation)
        ctx.kinds = filters.dtype, filters.shape, None if bias is None else bias.dtype
        ctx.save_for_backward(x, taps)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, taps = ctx.saved_tensors
        kind, shape, bias_kind = ctx.kinds
        dy = in_order(dy)
        dx = gradient = None
        if ctx.needs_input_grad[0]:
            dx = new_images(x, shape[1], x.shape[3:])
            _multiply(dy, taps, None, dx, ctx.geometry, True)
        if ctx.needs_input_grad[1]:
            gradient = _of_filters(x, dy, len(taps), ctx.geometry).t().to(kind).reshape(shape)
        of_bias = None
        if bias_kind is not None and ctx.needs_input_grad[2]:
            of_bias = dy.sum((1, 3, 4), dtype=torch.float32).to(bias_kind)
        return dx, gradient, of_bias, None, None, None


def _multiply(x: Tensor, taps: Tensor, bias: Tensor | None, y: Tensor, geometry: Any, up: bool) -> None:
    """The convolution of x to y with taps (taps, channels), or up its transpose."""
    kernel, stride, pad, dilation = geometry
    channels, pixels = taps.shape[1], y.shape[1] * y.shape[3] * y.shape[4]
    if pixels:
        numbers = (
            pixels, channels, *x.shape[3:], *y.shape[3:], *kernel, *stride, *pad, *dilation,
            up, bias is not None, len(taps) <= _UNROLLED, _PIXELS, _CHANNELS,
        )  # fmt: skip
        grid = cdiv(pixels, _PIXELS), cdiv(channels, _CHANNELS)
        launch(_product, grid, (x, taps, x if bias is None else bias, y), numbers)


def _of_filters(x: Tensor, dy: Tensor, taps: int, geometry: Any) -> Tensor:
    """The gradient of the filters, (taps, channels), in float32."""
    kernel, stride, pad, dilation = geometry
    channels, pixels = x.shape[0] * x.shape[2], dy.shape[1] * dy.shape[3] * dy.shape[4]
    block_t = power_of_2_from(taps)
    block_c = 32
    block_p = max(1, _HELD // (block_t * block_c))
    across = cdiv(channels, block_c)
    shares = max(1, min(_PROGRAMS // across, cdiv(pixels, 4 * block_p)))
    parts = torch.empty((shares, taps, channels), dtype=torch.float32, device=x.device)
    numbers = (
        pixels, channels, *x.shape[3:], *dy.shape[3:],
        kernel[1], taps, *stride, *pad, *dilation, block_t, block_p, block_c,
    )  # fmt: skip
    launch(_filter_gradient, (across, shares), (x, dy, parts), numbers, num_warps=8)
    return parts[0] if shares == 1 else parts.sum(0)


def depthwise_convolution(
    images: Tensor, filters: Tensor, bias: Tensor | None, stride: Pad, pad: Pad, dilation: Pad
) -> Tensor:
    """The convolution of each channel of `images` (trials, batch, channels, height, width) with its filter.

    Filters are (trials, channels, 1, height, width), the bias (trials, channels). In 16 bits, accumulated in
    float32; under autocast the input is cast as for a convolution.
    """
    x = in_16_bits(images)
    bias = None if bias is None else bias.contiguous()  # one that trials share is expanded
    outcome: Tensor = _Depthwise.apply(x, filters, bias, stride, pad, dilation)
    return outcome
