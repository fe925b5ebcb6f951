"""Layer and RMS norms of rows, with a weight and a bias for each trial, in one pass forward and one back.

Values have shape (trials, rows, channels). Torch's function knows one weight; with one for each trial it
would take two passes more forward and six more back.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,import-not-found,misc"

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:
    from plait.fusion.kernels import triton_stub as triton

# A program holds about this many values at a time: some rows, or one.
_TILE = 4096
MOST_CHANNELS = 8192
# Enough programs to fill a GPU several times.
_PROGRAMS = 132 * 8


@triton.jit
def _rows_of(start, rows, channels, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """Where the values of some rows of this program's trial are, which of them exist, and the rows."""
    offs_r = start + tl.arange(0, BLOCK_R)
    offs_c = tl.arange(0, BLOCK_C)
    mask = (offs_r < rows)[:, None] & (offs_c < channels)[None, :]
    row = tl.program_id(1).to(tl.int64) * rows + offs_r
    return row[:, None] * channels + offs_c[None, :], mask, row


@triton.jit
def _own(ptr, channels, HAS: tl.constexpr, BLOCK_C: tl.constexpr, other: tl.constexpr):
    """The trial's weight or bias, to broadcast."""
    offs_c = tl.arange(0, BLOCK_C)
    if HAS:
        at = ptr + tl.program_id(1) * channels + offs_c
        return tl.load(at, mask=offs_c < channels, other=0.0).to(tl.float32)[None, :]
    return tl.full((1, BLOCK_C), other, tl.float32)


@triton.jit
def _forward(
    x_ptr, weight_ptr, bias_ptr, y_ptr, mean_ptr, inverse_ptr, rows, channels, eps,
    CENTRED: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    weight = _own(weight_ptr, channels, HAS_WEIGHT, BLOCK_C, 1.0)
    bias = _own(bias_ptr, channels, HAS_BIAS, BLOCK_C, 0.0)
    start = tl.program_id(0) * BLOCK_R
    at, mask, row = _rows_of(start, rows, channels, BLOCK_R, BLOCK_C)
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    real = start + tl.arange(0, BLOCK_R) < rows
    if CENTRED:
        mean = tl.sum(x, 1) / channels
        tl.store(mean_ptr + row, mean, mask=real)
        x = tl.where(mask, x - mean[:, None], 0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(x * x, 1) / channels + eps)
    tl.store(inverse_ptr + row, inverse, mask=real)
    y = x * inverse[:, None] * weight + bias
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _backward(
    dy_ptr, x_ptr, weight_ptr, mean_ptr, inverse_ptr, dx_ptr, dw_ptr, db_ptr, rows, channels,
    CENTRED: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The gradient of x, and sums of those of weight and bias over this program's rows."""
    weight = _own(weight_ptr, channels, HAS_WEIGHT, BLOCK_C, 1.0)
    dw = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    db = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for start in range(tl.program_id(0) * BLOCK_R, rows, tl.num_programs(0) * BLOCK_R):
        at, mask, row = _rows_of(start, rows, channels, BLOCK_R, BLOCK_C)
        real = start + tl.arange(0, BLOCK_R) < rows
        dy = tl.load(dy_ptr + at, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
        inverse = tl.load(inverse_ptr + row, mask=real, other=0.0)[:, None]
        if CENTRED:
            x = tl.where(mask, x - tl.load(mean_ptr + row, mask=real, other=0.0)[:, None], 0.0)
        normal = x * inverse
        dw += dy * normal
        db += dy
        of_normal = dy * weight
        dx = of_normal - normal * (tl.sum(of_normal * normal, 1) / channels)[:, None]
        if CENTRED:
            dx -= (tl.sum(of_normal, 1) / channels)[:, None]
        tl.store(dx_ptr + at, (dx * inverse).to(dx_ptr.dtype.element_ty), mask=mask)
    offs_c = tl.arange(0, BLOCK_C)
    to = (tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)) * channels + offs_c
    if HAS_WEIGHT:
        tl.store(dw_ptr + to, tl.sum(dw, 0), mask=offs_c < channels)
    if HAS_BIAS:
        tl.store(db_ptr + to, tl.sum(db, 0), mask=offs_c < channels)


def _tile(rows: int, channels: int) -> dict[str, int]:
    across = triton.next_power_of_2(channels)
    down = max(1, min(_TILE // across, triton.next_power_of_2(rows)))
    return {"BLOCK_R": down, "BLOCK_C": across, "num_warps": 8 if across * down > 2048 else 4}


class _RowsNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        centred: bool,
    ) -> Tensor:
        trials, rows, channels = x.shape
        y = torch.empty_like(x)
        mean, inverse = (torch.empty(trials, rows, device=x.device) for _ in range(2))
        ctx.options = {"CENTRED": centred, "HAS_WEIGHT": weight is not None, "HAS_BIAS": bias is not None}
        ctx.eps = eps
        size = _tile(rows, channels)
        if y.numel():
            _forward[(triton.cdiv(rows, size["BLOCK_R"]), trials)](
                x, weight, bias, y, mean, inverse, rows, channels, eps, **ctx.options, **size
            )
        ctx.save_for_backward(x, weight, bias, mean, inverse)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight, bias, mean, inverse = ctx.saved_tensors
        if torch.is_grad_enabled():  # a gradient that is differentiated again
            return _by_torch(ctx, dy)
        trials, rows, channels = x.shape
        size = _tile(rows, channels)
        shares = max(1, min(triton.cdiv(rows, size["BLOCK_R"]), _PROGRAMS // trials))
        dx = torch.empty_like(x)
        # Without rows no program writes them.
        make = torch.empty if dx.numel() else torch.zeros
        dw, db = (make(trials, shares, channels, device=x.device) for _ in range(2))
        if dx.numel():
            _backward[(shares, trials)](
                dy.contiguous(), x, weight, mean, inverse, dx, dw, db, rows, channels, **ctx.options, **size
            )
        sums = (
            None if own is None else part.sum(1).to(own.dtype) for own, part in ((weight, dw), (bias, db))
        )
        return dx, *sums, None, None


def _by_torch(ctx: Any, dy: Tensor) -> Any:
    x, weight, bias = ctx.saved_tensors[:3]
    wide, shape = x.float(), x.shape[2:]
    y = (
        F.layer_norm(wide, shape, eps=ctx.eps)
        if ctx.options["CENTRED"]
        else F.rms_norm(wide, shape, eps=ctx.eps)
    )
    y = y if weight is None else y * weight.unsqueeze(1)
    y = y if bias is None else y + bias.unsqueeze(1)
    inputs = [part for part, asked in zip((x, weight, bias), ctx.needs_input_grad) if asked]
    found = iter(torch.autograd.grad(y, inputs, dy.to(y.dtype), create_graph=True))
    return *(next(found) if asked else None for asked in ctx.needs_input_grad[:3]), None, None


def trial_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, centred: bool, kind: torch.dtype
) -> Tensor:
    """The norm of each row of x (trials, rows, channels), times a trial's weight, plus its bias, as `kind`.

    A norm that is not centred is RMS norm.
    """
    parts = (None if part is None else part.contiguous() for part in (weight, bias))
    # As alone, x may be written in place later if the norm is that of a cast.
    y: Tensor = _RowsNorm.apply(x.to(kind).contiguous(), *parts, eps, centred)
    return y
