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
from torch.autograd.function import once_differentiable

from plait.fusion.kernels import conv_tma, gather, im2col
from plait.fusion.kernels.images import Pad


def _down(
    large: Tensor,
    taps: Tensor,
    bias: Tensor | None,
    stride: int,
    pad: Pad,
    kind: torch.dtype | None = None,
    spread: Tensor | None = None,
) -> Tensor:
    if im2col.fits(taps):
        spread = im2col.spread_out(large, taps, stride, pad) if spread is None else spread
        return im2col.down(large, taps, bias, stride, pad, spread, kind)
    if conv_tma.fits(large, taps, stride, large.shape[2:]):
        return conv_tma.down(large, taps, bias, stride, pad, kind)
    return gather.down(large, taps, bias, stride, pad, kind)


def _up(
    small: Tensor, taps: Tensor, bias: Tensor | None, stride: int, pad: Pad, size: tuple[int, int]
) -> Tensor:
    # If each pixel of the large image depends on one pixel of the small one, a product with all taps wastes
    # nothing; if it has few channels, separate products per tap would be narrow.
    if im2col.fits(taps) or small.shape[2:] == (1, 1):
        columns = _down(small, im2col.as_points(taps), None, 1, (0, 0), torch.float32)
        return im2col.fold(columns, taps, bias, stride, pad, size, small.dtype)
    if conv_tma.fits(small, taps, stride, size):
        return conv_tma.up(small, taps, bias, stride, pad, size)
    return gather.up(small, taps, bias, stride, pad, size)


def _taps_gradient(
    large: Tensor, small: Tensor, taps: Tensor, stride: int, pad: Pad, kind: torch.dtype, sums: bool
) -> tuple[Tensor, Tensor | None]:
    """The gradient of the taps, and sums of the small images if asked for and at no cost.

    With few channels, `large` is spread out.
    """
    totals = None
    if im2col.fits(taps):
        gradient = im2col.taps_gradient(large, small, taps, stride)
    elif conv_tma.fits(large, taps, stride, large.shape[2:]) and conv_tma.fits(
        small, taps, stride, large.shape[2:]
    ):
        gradient, totals = conv_tma.taps_gradient(large, small, taps, stride, pad, sums)
    else:
        gradient = gather.taps_gradient(large, small, taps, stride, pad)
    return gradient.to(kind).movedim(-1, 2), totals


class _TrialConvolution(torch.autograd.Function):
    """A convolution of each trial's channels with its weight; with an output size, a transposed one."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, pad: Pad, size: Any
    ) -> Tensor:
        taps = weight.to(x.dtype).movedim(2, -1).contiguous()
        ctx.geometry = (stride, pad, size, bias is not None, weight.dtype)
        ctx.save_for_backward(x, taps)
        return _down(x, taps, bias, stride, pad) if size is None else _up(x, taps, bias, stride, pad, size)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, taps = ctx.saved_tensors
        stride, pad, size, has_bias, kind = ctx.geometry
        dy = dy.contiguous(memory_format=torch.channels_last)
        dx = dw = db = None
        # With few channels the images are spread out once for both gradients.
        large = im2col.spread_out(dy, taps, stride, pad) if im2col.fits(taps) else dy
        if ctx.needs_input_grad[0]:
            dx = (
                _up(dy, taps, None, stride, pad, x.shape[2:])
                if size is None
                else _down(dy, taps, None, stride, pad, None, large)
            )
        if ctx.needs_input_grad[1]:
            large, small = (x, dy) if size is None else (large, x)
            dw, db = _taps_gradient(large, small, taps, stride, pad, kind, has_bias and size is None)
        if has_bias and db is None:
            db = _bias_gradient(dy, taps)
        return dx, dw, db, None, None, None


class _FewChannels(torch.autograd.Function):
    """A convolution of images with few channels, and its activation: `slope` times what is negative."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, pad: Pad, slope: float
    ) -> Tensor:
        taps = weight.to(x.dtype).movedim(2, -1).contiguous()
        spread = im2col.spread_out(x, taps, stride, pad)
        y = im2col.down(x, taps, bias, stride, pad, spread, None, slope)
        ctx.geometry = (stride, pad, slope, bias is not None, weight.dtype, x.shape[2:])
        ctx.save_for_backward(spread, taps, y if slope != 1.0 else None)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        spread, taps, y = ctx.saved_tensors
        stride, pad, slope, has_bias, kind, image = ctx.geometry
        dy = dy.contiguous(memory_format=torch.channels_last)
        if slope != 1.0 and (ctx.needs_input_grad[0] or has_bias):  # several read the gradient before it
            dy, slope = torch.ops.aten.leaky_relu_backward(dy, y, slope, True), 1.0
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = _up(dy, taps, None, stride, pad, image)
        if ctx.needs_input_grad[1]:
            dw = im2col.taps_gradient(spread, dy, taps, stride, y, slope).to(kind).movedim(-1, 2)
        return dx, dw, _bias_gradient(dy, taps) if has_bias else None, None, None, None


def _bias_gradient(dy: Tensor, taps: Tensor) -> Tensor:
    return dy.sum((0, 2, 3), dtype=torch.float32).view(taps.shape[0], -1)


def has_few_channels(weight: Tensor) -> bool:
    """Whether the activation after a convolution with this weight can be computed with it."""
    return weight.dim() == 5 and weight.shape[2] <= im2col.FEW


def trial_convolution(
    folded: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: int,
    pad: Pad,
    size: tuple[int, int] | None = None,
    slope: float = 1.0,
) -> Tensor:
    """The convolution of each trial's channels with its weight; in 16 bits, accumulated in float32.

    `folded` is (batch, trials x channels, height, width), the weight (trials, out, channels, ...). With a
    `size`, the transposed convolution to images of that size; its weight has the input channels first, as in
    torch. Under autocast the input is cast as for a convolution. The `slope` for what is negative, as of a
    ReLU, is for few channels.
    """
    if torch.is_autocast_enabled("cuda"):
        folded = folded.to(torch.get_autocast_dtype("cuda"))
    if folded.dtype not in (torch.bfloat16, torch.float16):
        raise RuntimeError(f"found {folded.dtype}, expected 16 bits")
    x = folded.contiguous(memory_format=torch.channels_last)
    outcome: Tensor
    if size is None and has_few_channels(weight):
        outcome = _FewChannels.apply(x, weight, bias, stride, pad, slope)
        return outcome
    assert slope == 1.0
    outcome = _TrialConvolution.apply(x, weight, bias, stride, pad, size)
    return outcome
