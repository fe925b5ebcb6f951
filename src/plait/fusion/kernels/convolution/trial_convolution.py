"""Convolutions of all trials in one launch each, and their gradients: selects the kernels.

Images are in channels-last format: (batch, height, width, trials, channels). Kernels for grouped convolutions
are slow with many groups; here each trial is one matrix of a batched product. Its rows are loaded in one of
three ways: by TMA, by im2col if an image has few channels, or gathered.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,import-not-found"

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from plait.fusion.kernels.convolution import gather, im2col, tma
from plait.fusion.kernels.images import Pad, Size, in_16_bits, in_order, new_images, small_size
from plait.fusion.plain_function import PlainFunction, once_differentiable


def _down(
    large: Tensor,
    taps: Tensor,
    bias: Tensor | None,
    stride: int,
    pad: Pad,
    small: Tensor,
    spread: Tensor | None,
) -> None:
    """The convolution of `large` to `small`; with few channels, of what is `spread` out."""
    if spread is not None:
        im2col.down(spread, taps, bias, stride, small)
    elif tma.fits(large, taps, stride, large.shape[3:]):
        tma.multiply(large, taps, bias, stride, pad, small, False)
    else:
        gather.down(large, taps, bias, stride, pad, small)


def _up(small: Tensor, taps: Tensor, bias: Tensor | None, stride: int, pad: Pad, size: Size) -> Tensor:
    """The transposed convolution to images of `size`."""
    large = new_images(small, taps.shape[-1], size)
    if small.shape[3:] == (1, 1):  # each tap of its only pixel makes a pixel, whatever the stride
        stride = max(stride, *taps.shape[2:4])
    if im2col.fits(taps):  # separate products per tap would be narrow
        points = im2col.as_points(taps)
        columns = new_images(small, points.shape[1], small.shape[3:], torch.float32)
        spread = im2col.spread_out(small, points, 1, (0, 0)) if im2col.fits(points) else None
        _down(small, points, None, 1, (0, 0), columns, spread)
        im2col.fold_columns(columns, taps, bias, stride, pad, large)
    elif tma.fits(small, taps, stride, size):
        tma.multiply(small, taps, bias, stride, pad, large, True)
    else:
        gather.up(small, taps, bias, stride, pad, large)
    return large


def _taps_gradient(
    large: Tensor, small: Tensor, taps: Tensor, stride: int, pad: Pad, kind: torch.dtype, sums: bool
) -> tuple[Tensor, Tensor | None]:
    """The gradient of the taps, and sums of the small images if asked for and at no cost.

    With few channels, `large` is spread out.
    """
    totals = None
    if im2col.fits(taps):
        gradient = im2col.taps_gradient(large, small, taps, stride)
    elif tma.fits(large, taps, stride, large.shape[3:]) and tma.fits(small, taps, stride, large.shape[3:]):
        gradient, totals = tma.taps_gradient(large, small, taps, stride, pad, sums)
    else:
        gradient = gather.taps_gradient(large, small, taps, stride, pad)
    return _as_weight(gradient.to(kind)), totals


class _TrialConvolution(PlainFunction):
    """A convolution of each trial's images with its weight; with an output size, a transposed one."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, pad: Pad, size: Size | None
    ) -> Tensor:
        taps, x = _taps(weight, x.dtype), in_order(x)
        ctx.geometry = (stride, pad, size, bias is not None, weight.dtype)
        ctx.save_for_backward(x, taps)
        if size is not None:
            return _up(x, taps, bias, stride, pad, size)
        y = new_images(x, taps.shape[1], small_size(x, taps, stride, pad))
        _down(x, taps, bias, stride, pad, y, None)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, taps = ctx.saved_tensors
        stride, pad, size, has_bias, kind = ctx.geometry
        dy = in_order(dy)
        dx = dw = db = None
        # With few channels the images are spread out once for both gradients.
        spread = im2col.spread_out(dy, taps, stride, pad) if size is not None and im2col.fits(taps) else None
        if ctx.needs_input_grad[0] and size is None:
            dx = _up(dy, taps, None, stride, pad, x.shape[3:])
        elif ctx.needs_input_grad[0]:
            dx = new_images(x, taps.shape[1], x.shape[3:])
            _down(dy, taps, None, stride, pad, dx, spread)
        if ctx.needs_input_grad[1]:
            large, small = (x, dy) if size is None else (dy if spread is None else spread, x)
            dw, db = _taps_gradient(large, small, taps, stride, pad, kind, has_bias and size is None)
        if has_bias and db is None:
            db = _bias_gradient(dy)
        return dx, dw, db, None, None, None


class _FewChannels(PlainFunction):
    """A convolution of images with few channels, and its activation: `slope` times what is negative."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, pad: Pad, slope: float
    ) -> Tensor:
        taps = _taps(weight, x.dtype)
        spread = im2col.spread_out(x, taps, stride, pad)
        y = new_images(x, taps.shape[1], small_size(x, taps, stride, pad))
        im2col.down(spread, taps, bias, stride, y, slope)
        ctx.geometry = (stride, pad, slope, bias is not None, weight.dtype, x.shape[3:])
        ctx.save_for_backward(spread, taps, y if slope != 1.0 else None)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        spread, taps, y = ctx.saved_tensors
        stride, pad, slope, has_bias, kind, image = ctx.geometry
        if slope != 1.0 and (ctx.needs_input_grad[0] or has_bias):  # several read the gradient before it
            dy, slope = torch.ops.aten.leaky_relu_backward(dy, y, slope, True), 1.0
        dy = in_order(dy)
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = _up(dy, taps, None, stride, pad, image)
        if ctx.needs_input_grad[1]:
            dw = _as_weight(im2col.taps_gradient(spread, dy, taps, stride, y, slope).to(kind))
        return dx, dw, _bias_gradient(dy) if has_bias else None, None, None, None


def _taps(weight: Tensor, kind: torch.dtype) -> Tensor:
    return weight.movedim(2, -1).to(kind, memory_format=torch.contiguous_format).contiguous()


def _as_weight(taps: Tensor) -> Tensor:
    """Taps (trials, out, kernel h and w, channels) in the order of a weight's axes."""
    if taps.shape[2:4] == (1, 1):
        return taps.view(*taps.shape[:2], -1, 1, 1)  # with a weight's strides, or torch would copy it
    return taps.movedim(-1, 2)


def _bias_gradient(dy: Tensor) -> Tensor:
    return dy.sum((1, 3, 4), dtype=torch.float32)


def has_few_channels(weight: Tensor) -> bool:
    """Whether the activation after a convolution with this weight can be computed with it."""
    return weight.dim() == 5 and weight.shape[2] <= im2col.FEW


def trial_convolution(
    images: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: int,
    pad: Pad,
    size: Size | None = None,
    slope: float = 1.0,
) -> Tensor:
    """The convolution of each trial's images with its weight; in 16 bits, accumulated in float32.

    The `images` are (trials, batch, channels, height, width), the weight (trials, out, channels, ...). With a
    `size`, the transposed convolution to images of that size; its weight has the input channels first, as in
    torch. Under autocast the input is cast as for a convolution. The `slope` for what is negative, as of a
    ReLU, is for few channels.
    """
    x = in_16_bits(images)
    bias = None if bias is None else bias.contiguous()  # one that trials share is expanded
    outcome: Tensor
    if size is None and has_few_channels(weight):
        outcome = _FewChannels.apply(x, weight, bias, stride, pad, slope)
        return outcome
    assert slope == 1.0
    outcome = _TrialConvolution.apply(x, weight, bias, stride, pad, size)
    return outcome
