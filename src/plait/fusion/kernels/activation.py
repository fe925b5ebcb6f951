"""Biases and activations of dense layers in one pass forward and one back, which also sums for the bias."""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,misc"

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.fusion.kernels import cdiv
from plait.fusion.kernels.launch import launch, tl, triton
from plait.fusion.plain_function import PlainFunction, gradients_again

_ROWS, _COLUMNS = 16, 256
# Of gradients, which are also summed.
_FEWER_ROWS, _FEWER_COLUMNS = 8, 128
# Enough programs to fill a GPU several times.
_PROGRAMS = 132 * 8
# torch's function of each activation that a kernel knows; without one only the bias is added.
ACTIVATIONS = {
    "none": lambda x: x,
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
}


@triton.jit
def _tile(start, rows, width, row_stride, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """Where some rows of this program's trial and columns are, which exist, and those of the trial's bias."""
    trial = tl.program_id(2).to(tl.int64)
    offs_r = start + tl.arange(0, BLOCK_R)
    offs_c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = (offs_r < rows)[:, None] & (offs_c < width)[None, :]
    return (trial * rows + offs_r)[:, None] * row_stride + offs_c[None, :], mask


@triton.jit
def _bias_of(bias_ptr, width, BLOCK_C: tl.constexpr):
    offs_c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    at = bias_ptr + tl.program_id(2).to(tl.int64) * width + offs_c
    return tl.load(at, mask=offs_c < width, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _activation_forward(
    y_ptr, bias_ptr, out_ptr, rows, width, row_stride,
    KIND: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    # Gaps between rows are written, too: a multiple of 16 numbers is, in words of 16 bytes.
    at, mask = _tile(tl.program_id(1) * BLOCK_R, rows, row_stride, row_stride, BLOCK_R, BLOCK_C)
    x = tl.load(y_ptr + at, mask=mask, other=0.0).to(tl.float32) + _bias_of(bias_ptr, width, BLOCK_C)
    if KIND == "relu":
        x = tl.where(x <= 0.0, 0.0, x)
    elif KIND == "silu":
        x = x * tl.sigmoid(x)
    elif KIND == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == "gelu tanh":
        # tanh(z) is 2 sigmoid(2 z) - 1
        x = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    tl.store(out_ptr + at, x.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _activation_backward(
    dout_ptr, y_ptr, bias_ptr, dy_ptr, sums_ptr, rows, width,
    KIND: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The gradient of y, and its sums over this program's rows."""
    bias = _bias_of(bias_ptr, width, BLOCK_C)
    total = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for start in range(tl.program_id(1) * BLOCK_R, rows, tl.num_programs(1) * BLOCK_R):
        at, mask = _tile(start, rows, width, width, BLOCK_R, BLOCK_C)
        x = tl.load(y_ptr + at, mask=mask, other=0.0).to(tl.float32) + bias
        d = tl.load(dout_ptr + at, mask=mask, other=0.0).to(tl.float32)
        if KIND == "relu":
            d = tl.where(x <= 0.0, 0.0, d)
        elif KIND == "silu":
            s = tl.sigmoid(x)
            d = d * s * (1.0 + x * (1.0 - s))
        elif KIND == "gelu":
            chance = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
            d = d * (chance + x * 0.3989422804014327 * tl.exp(-0.5 * x * x))
        elif KIND == "gelu tanh":
            s = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
            d = d * (s + x * s * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * x * x))
        tl.store(dy_ptr + at, d.to(dy_ptr.dtype.element_ty), mask=mask)
        total += d
    offs_c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    share = tl.program_id(2).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    tl.store(sums_ptr + share * width + offs_c, tl.sum(total, 0), mask=offs_c < width)


def _apply(y: Tensor, bias: Tensor, out: Tensor, kind: str) -> None:
    trials, rows, width = y.shape
    if y.numel():
        grid = (cdiv(width, _COLUMNS), cdiv(rows, _ROWS), trials)
        launch(_activation_forward, grid, (y, bias, out), (rows, width, y.stride(1), kind, _ROWS, _COLUMNS))


def add_bias(y: Tensor, bias: Tensor) -> None:
    """Add the bias of each trial to y (trials, rows, width) in place; gaps between rows are lost."""
    _apply(y, bias.contiguous(), y, "none")


class _Biased(PlainFunction):
    @staticmethod
    def forward(ctx: Any, y: Tensor, bias: Tensor) -> Tensor:
        ctx.kind = bias.dtype
        ctx.mark_dirty(y)
        add_bias(y, bias)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None]:
        return dy, dy.sum(1, dtype=ctx.kind) if ctx.needs_input_grad[1] else None


class _Activated(PlainFunction):
    @staticmethod
    def forward(ctx: Any, y: Tensor, bias: Tensor, kind: str) -> Tensor:
        ctx.kind = kind
        ctx.save_for_backward(y, bias)
        out = torch.empty_like(y)
        _apply(y, bias, out, kind)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        y, bias = ctx.saved_tensors
        if torch.is_grad_enabled():  # a gradient that is differentiated again
            out = ACTIVATIONS[ctx.kind](y.float() + bias.float().unsqueeze(1))
            return *gradients_again(out, (y, bias), ctx.needs_input_grad, dout.float()), None
        trials, rows, width = y.shape
        across = cdiv(width, _FEWER_COLUMNS)
        shares = max(1, min(cdiv(rows, _FEWER_ROWS), _PROGRAMS // (across * trials)))
        dy = torch.empty_like(y)
        # Without rows no program writes them.
        make = torch.empty if y.numel() else torch.zeros
        sums = make(trials, shares, width, device=y.device)
        if y.numel():
            tensors = dout.contiguous(), y, bias, dy, sums
            numbers = rows, width, ctx.kind, _FEWER_ROWS, _FEWER_COLUMNS
            launch(_activation_backward, (across, shares, trials), tensors, numbers, num_warps=8)
        return dy, sums.sum(1).to(bias.dtype), None


def biased(y: Tensor, bias: Tensor) -> Tensor:
    """y (trials, rows, width) plus the bias of each trial, as by `add_bias`."""
    made: Tensor = _Biased.apply(y, bias)
    return made


def activated(y: Tensor, bias: Tensor, kind: str) -> Tensor:
    """The activation `kind` of y (trials, rows, width), contiguous, plus the bias of each trial."""
    made: Tensor = _Activated.apply(y, bias.contiguous(), kind)
    return made
