"""Sums of rows with the output of a dense layer, and layer and RMS norms of rows, with weights of each trial.

Values have shape (trials, rows, channels). A residual layer adds its output to its input, and the next one
begins with a norm of the sum: here both are one pass over memory forward and one back. The output y may come
without its bias, which is then added here, and summed for its gradient.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,misc"

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.fusion.kernels import cdiv, power_of_2_from
from plait.fusion.kernels.launch import launch, tl, triton
from plait.fusion.plain_function import PlainFunction, gradients_again

# A program holds about this many values at a time, some rows or one, and a warp this many.
_TILE, _OF_WARP = 2048, 1024
MOST_CHANNELS = 8192
# Enough programs to fill a GPU several times.
_PROGRAMS = 132 * 8


@dataclass(frozen=True)
class Norm:
    """A layer norm, or an RMS norm if it is not `centred`, and in which precisions it is wanted."""

    eps: float
    centred: bool
    kinds: tuple[torch.dtype, ...]


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
def _sum_norm_forward(
    x_ptr, y_ptr, add_ptr, weight_ptr, bias_ptr, sum_ptr, first_ptr, second_ptr, mean_ptr, inverse_ptr,
    rows, channels, eps,
    HAS_SUM: tl.constexpr, HAS_ADD: tl.constexpr, NORMS: tl.constexpr, CENTRED: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The sum x + y + add, and its norm in as many precisions as `NORMS` says."""
    start = tl.program_id(0) * BLOCK_R
    at, mask, row = _rows_of(start, rows, channels, BLOCK_R, BLOCK_C)
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if HAS_SUM:
        x += tl.load(y_ptr + at, mask=mask, other=0.0).to(tl.float32)
        x += _own(add_ptr, channels, HAS_ADD, BLOCK_C, 0.0)
        total = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + at, total, mask=mask)
        x = total.to(tl.float32)
    if NORMS > 0:
        weight = _own(weight_ptr, channels, HAS_WEIGHT, BLOCK_C, 1.0)
        bias = _own(bias_ptr, channels, HAS_BIAS, BLOCK_C, 0.0)
        real = start + tl.arange(0, BLOCK_R) < rows
        if CENTRED:
            mean = tl.sum(x, 1) / channels
            tl.store(mean_ptr + row, mean, mask=real)
            x = tl.where(mask, x - mean[:, None], 0.0)
        inverse = 1.0 / tl.sqrt(tl.sum(x * x, 1) / channels + eps)
        tl.store(inverse_ptr + row, inverse, mask=real)
        n = x * inverse[:, None] * weight + bias
        tl.store(first_ptr + at, n.to(first_ptr.dtype.element_ty), mask=mask)
        if NORMS > 1:
            tl.store(second_ptr + at, n.to(second_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _sum_norm_backward(
    ds_ptr, first_ptr, second_ptr, x_ptr, weight_ptr, mean_ptr, inverse_ptr, dx_ptr, dy_ptr, parts_ptr,
    rows, channels,
    HAS_DS: tl.constexpr, HAS_FIRST: tl.constexpr, HAS_SECOND: tl.constexpr, CENTRED: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_ADD: tl.constexpr,
    STORE_DX: tl.constexpr, STORE_DY: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The gradient of the sum, and sums of those of weight, bias and add over this program's rows."""
    weight = _own(weight_ptr, channels, HAS_WEIGHT, BLOCK_C, 1.0)
    dw = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    db = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    da = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for start in range(tl.program_id(0) * BLOCK_R, rows, tl.num_programs(0) * BLOCK_R):
        at, mask, row = _rows_of(start, rows, channels, BLOCK_R, BLOCK_C)
        dx = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
        if HAS_FIRST or HAS_SECOND:
            real = start + tl.arange(0, BLOCK_R) < rows
            dn = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
            if HAS_FIRST:
                dn += tl.load(first_ptr + at, mask=mask, other=0.0).to(tl.float32)
            if HAS_SECOND:
                dn += tl.load(second_ptr + at, mask=mask, other=0.0).to(tl.float32)
            x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
            inverse = tl.load(inverse_ptr + row, mask=real, other=0.0)[:, None]
            if CENTRED:
                x = tl.where(mask, x - tl.load(mean_ptr + row, mask=real, other=0.0)[:, None], 0.0)
            normal = x * inverse
            dw += dn * normal
            db += dn
            of_normal = dn * weight
            dx += of_normal - normal * (tl.sum(of_normal * normal, 1) / channels)[:, None]
            if CENTRED:
                dx -= (tl.sum(of_normal, 1) / channels)[:, None]
            dx *= inverse
        if HAS_DS:
            dx += tl.load(ds_ptr + at, mask=mask, other=0.0).to(tl.float32)
        if STORE_DX:
            tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if STORE_DY:
            tl.store(dy_ptr + at, dx.to(dy_ptr.dtype.element_ty), mask=mask)
        if HAS_ADD:
            da += tl.where(mask, dx, 0.0)
    offs_c = tl.arange(0, BLOCK_C)
    size = tl.num_programs(0) * tl.num_programs(1) * channels
    to = parts_ptr + (tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)) * channels + offs_c
    if HAS_WEIGHT:
        tl.store(to, tl.sum(dw, 0), mask=offs_c < channels)
    if HAS_BIAS:
        tl.store(to + size, tl.sum(db, 0), mask=offs_c < channels)
    if HAS_ADD:
        tl.store(to + 2 * size, tl.sum(da, 0), mask=offs_c < channels)


def _tile(rows: int, channels: int) -> dict[str, int]:
    across = power_of_2_from(channels)
    down = max(1, min(_TILE // across, power_of_2_from(rows)))
    return {"BLOCK_R": down, "BLOCK_C": across, "num_warps": max(1, min(16, across * down // _OF_WARP))}


class _SumNorm(PlainFunction):
    """x + y + add, with y, and its norm in the precisions of `norm`, with a norm; None for what is not."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        y: Tensor | None,
        add: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        norm: Norm | None,
    ) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        trials, rows, channels = x.shape
        kind = x.dtype if y is None else torch.promote_types(x.dtype, y.dtype)
        total = None if y is None else x.new_empty(x.shape, dtype=kind)
        kinds = () if norm is None else norm.kinds
        made = [x.new_empty(x.shape, dtype=kind) for kind in kinds]
        mean, inverse = (torch.empty(trials, rows, device=x.device) for _ in range(2))
        ctx.norm, ctx.kinds = norm, [None if part is None else part.dtype for part in (x, y, add)]
        size = _tile(rows, channels)
        if x.numel():
            outputs = ([*made, x, x])[:2]
            tensors = x, y, add, weight, bias, x if total is None else total, *outputs, mean, inverse
            numbers = (
                rows, channels, 0.0 if norm is None else float(norm.eps),
                y is not None, add is not None, len(made), norm is not None and norm.centred,
                weight is not None, bias is not None,
            )  # fmt: skip
            launch(_sum_norm_forward, (cdiv(rows, size["BLOCK_R"]), trials), tensors, numbers, **size)
        if norm is not None:
            ctx.save_for_backward(x if total is None else total, weight, bias, mean, inverse)
        return total, *made, *([None] * (2 - len(made)))

    @staticmethod
    def backward(ctx: Any, ds: Tensor | None, *of_norms: Tensor | None) -> Any:
        x_kind, y_kind, add_kind = ctx.kinds
        given = [None if part is None else part.contiguous() for part in (ds, *of_norms)]
        like = next((part for part in given if part is not None), None)
        if like is None:
            return (None,) * 6
        if torch.is_grad_enabled():  # a gradient that is differentiated again
            total, dw, db = _by_torch(ctx, *given)
            da = None if add_kind is None else total.sum(1).to(add_kind)
            return total.to(x_kind), None if y_kind is None else total.to(y_kind), da, dw, db, None
        normed = any(part is not None for part in given[1:])
        x, weight, bias, mean, inverse = ctx.saved_tensors if normed else (None,) * 5
        trials, rows, channels = like.shape
        size = _tile(rows, channels)
        shares = max(1, min(cdiv(rows, size["BLOCK_R"]), _PROGRAMS // trials))
        passes = not normed and given[0] is not None and given[0].dtype == x_kind
        dx = given[0] if passes else like.new_empty(like.shape, dtype=x_kind)
        # Where y has the precision of x, their gradients are one tensor.
        joined = y_kind is None or y_kind == x_kind
        dy = (dx if y_kind is not None else None) if joined else like.new_empty(like.shape, dtype=y_kind)
        has = [weight is not None, bias is not None, add_kind is not None]
        # Without rows no program writes them.
        make = torch.empty if like.numel() else torch.zeros
        parts = make(3 if any(has) else 0, trials, shares, channels, device=like.device)
        if like.numel() and not (passes and joined and not any(has)):
            tensors = *given, x, weight, mean, inverse, dx, like if dy is None else dy, parts
            numbers = (
                rows, channels, *(part is not None for part in given), normed and ctx.norm.centred,
                *has, not passes, not joined,
            )  # fmt: skip
            launch(_sum_norm_backward, (shares, trials), tensors, numbers, **size)
        sums = parts.sum(2)
        dw, db = (
            None if own is None else sums[number].to(own.dtype) for number, own in enumerate((weight, bias))
        )
        return dx, dy, None if add_kind is None else sums[2].to(add_kind), dw, db, None


def _by_torch(ctx: Any, ds: Tensor | None, *of_norms: Tensor | None) -> tuple[Any, ...]:
    """The gradients of the sum, of weight and bias, in operations that can be differentiated again."""
    asked = [part.float() for part in of_norms if part is not None]
    if not asked:
        return ds, None, None
    x, weight, bias = ctx.saved_tensors[:3]
    wide, shape = x.float(), x.shape[2:]
    normed = F.layer_norm if ctx.norm.centred else F.rms_norm
    n = normed(wide, shape, eps=ctx.norm.eps)
    n = n if weight is None else n * weight.unsqueeze(1)
    n = n if bias is None else n + bias.unsqueeze(1)
    trained = [part is not None and part.requires_grad for part in (x, weight, bias)]
    dx, dw, db = gradients_again(n, (x, weight, bias), trained, sum(asked[1:], asked[0]))
    total = ds if dx is None else dx if ds is None else dx + ds
    return torch.zeros_like(x) if total is None else total, dw, db


def sum_norm(
    x: Tensor,
    y: Tensor | None,
    add: Tensor | None,
    norm: Norm | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """The sum x + y + add, if there is a y, and then its norm in each of the precisions of `norm`.

    x and y are (trials, rows, channels) and contiguous, the others (trials, channels). Norms are computed in
    float32.
    """
    own = (None if part is None else part.contiguous() for part in (add, weight, bias))
    return tuple(part for part in _SumNorm.apply(x, y, *own, norm) if part is not None)
