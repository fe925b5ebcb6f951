"""Convolutions of all trials in one launch each: which kernels cut these images, and their gradients.

Images lie with their channels innermost, the trials' channels side by side: (batch, height, width, trials,
channels). A grouped convolution's kernels treat many groups poorly; here each trial is a batch of a matrix
product. Three ways fetch its rows: as boxes, as patches where an image has few channels, and gathered.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,import-not-found"

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from plait.fusion.kernels import boxes, gather, patches
from plait.fusion.kernels.images import Pad


def _down(
    large: Tensor,
    taps: Tensor,
    bias: Tensor | None,
    stride: int,
    pad: Pad,
    kind: torch.dtype | None = None,
) -> Tensor:
    if patches.fits(taps):
        return patches.down(large, taps, bias, stride, pad, kind)
    if boxes.fits(large, taps, stride, large.shape[2:]):
        return boxes.down(large, taps, bias, stride, pad, kind)
    return gather.down(large, taps, bias, stride, pad, kind)


def _up(
    small: Tensor, taps: Tensor, bias: Tensor | None, stride: int, pad: Pad, size: tuple[int, int]
) -> Tensor:
    # Where each place of the large image meets one place of the small one, a product of all taps wastes
    # nothing; where it has few channels, a product with each tap by itself would be as narrow.
    if patches.fits(taps) or small.shape[2:] == (1, 1):
        columns = _down(small, patches.as_points(taps), None, 1, (0, 0), torch.float32)
        return patches.fold(columns, taps, bias, stride, pad, size, small.dtype)
    if boxes.fits(small, taps, stride, size):
        return boxes.up(small, taps, bias, stride, pad, size)
    return gather.up(small, taps, bias, stride, pad, size)


def _taps_gradient(
    large: Tensor, small: Tensor, taps: Tensor, stride: int, pad: Pad, kind: torch.dtype
) -> Tensor:
    if patches.fits(taps):
        found = patches.taps_gradient(large, small, taps, stride, pad)
    elif boxes.fits(large, taps, stride, large.shape[2:]) and boxes.fits(
        small, taps, stride, large.shape[2:]
    ):
        found = boxes.taps_gradient(large, small, taps, stride, pad)
    else:
        found = gather.taps_gradient(large, small, taps, stride, pad)
    return found.to(kind).movedim(-1, 2)


class _TrialConvolution(torch.autograd.Function):
    """A convolution, or with a size to reach a transposed one, of each trial's channels with its weight."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, pad: Pad, size: Any
    ) -> Tensor:
        taps = weight.to(x.dtype).movedim(2, -1).contiguous()
        ctx.save_for_backward(x, taps)
        ctx.geometry = (stride, pad, size, bias is not None, weight.dtype)
        if size is None:
            return _down(x, taps, bias, stride, pad)
        return _up(x, taps, bias, stride, pad, size)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, taps = ctx.saved_tensors
        stride, pad, size, has_bias, kind = ctx.geometry
        dy = dy.contiguous(memory_format=torch.channels_last)
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx = (
                _up(dy, taps, None, stride, pad, x.shape[2:])
                if size is None
                else _down(dy, taps, None, stride, pad)
            )
        if ctx.needs_input_grad[1]:
            large, small = (x, dy) if size is None else (dy, x)
            dw = _taps_gradient(large, small, taps, stride, pad, kind)
        if has_bias:
            db = dy.sum((0, 2, 3), dtype=torch.float32).view(taps.shape[0], -1)
        return dx, dw, db, None, None, None


def trial_convolution(
    folded: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: int,
    pad: Pad,
    size: tuple[int, int] | None = None,
) -> Tensor:
    """The convolution of each trial's channels with its own weight; all in 16 bits, sums in float32.

    `folded` is (batch, trials x channels, height, width), the weight (trials, out, channels, ...). With a
    `size`, the transposed convolution that makes images of that size; its weight has the input's channels
    first, as torch's has. Under autocast the input is cast as a convolution's is.
    """
    if torch.is_autocast_enabled("cuda"):
        folded = folded.to(torch.get_autocast_dtype("cuda"))
    if folded.dtype not in (torch.bfloat16, torch.float16):
        raise RuntimeError(f"found {folded.dtype}, expected 16 bits")
    x = folded.contiguous(memory_format=torch.channels_last)
    outcome: Tensor = _TrialConvolution.apply(x, weight, bias, stride, pad, size)
    return outcome
