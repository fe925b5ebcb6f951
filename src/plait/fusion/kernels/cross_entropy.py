"""Cross entropy of rows of logits, read as they are: no copy in float32, no table of log-likelihoods."""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,misc"

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.fusion.kernels import cdiv, power_of_2_from
from plait.fusion.kernels.launch import launch, tl, triton
from plait.fusion.plain_function import PlainFunction

# Logits of a program: many rows of few classes, or a part of one row.
_BLOCK = 4096
_MOST_PADDING = 64


@triton.jit
def _rows_of_program(count, BLOCK_R: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    return rows, rows < count


@triton.jit(do_not_specialize=["count"])
def _loss_forward(
    x_ptr, target_ptr, loss_ptr, lse_ptr, count, classes, stride, ignored,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The loss of each row, and the logarithm of the sum of its exponentials."""
    rows, real = _rows_of_program(count, BLOCK_R)
    target = tl.load(target_ptr + rows, mask=real, other=0)
    lane = tl.arange(0, BLOCK_C)
    total = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    top = tl.full((BLOCK_R,), float("-inf"), tl.float32)
    base = top
    for start in range(0, classes, BLOCK_C):
        at = start + lane
        x = tl.load(
            x_ptr + (rows * stride)[:, None] + at[None, :],
            mask=real[:, None] & (at < classes)[None, :],
            other=float("-inf"),
        ).to(tl.float32)
        above = tl.maximum(top, tl.max(x, 1))
        # What is nothing but -inf would subtract it from itself.
        base = tl.where(above == float("-inf"), 0.0, above)
        scale = tl.where(top == float("-inf"), 0.0, tl.exp(top - base))
        total = total * scale[:, None] + tl.exp(x - base[:, None])
        top = above
    lse = base + tl.log(tl.sum(total, 1))
    tl.store(lse_ptr + rows, lse, mask=real)
    inside = (target >= 0) & (target < classes)
    at = rows * stride + tl.where(inside, target, 0)
    chosen = tl.load(x_ptr + at, mask=real, other=0.0).to(tl.float32)
    loss = tl.where(inside, lse - chosen, float("nan"))
    tl.store(loss_ptr + rows, tl.where(target == ignored, 0.0, loss), mask=real)


@triton.jit(do_not_specialize=["count"])
def _loss_backward(
    x_ptr, target_ptr, lse_ptr, g_ptr, out_ptr, count, classes, stride, ignored,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The gradient of some columns of each row, and zeros in the padding after the row."""
    rows, real = _rows_of_program(count, BLOCK_R)
    at = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    target = tl.load(target_ptr + rows, mask=real, other=0)
    is_ignored = target == ignored
    valid = (target >= 0) & (target < classes)
    number = tl.where(valid, target, -1).to(tl.int32)
    gradient = tl.where(is_ignored, 0.0, tl.load(g_ptr + rows, mask=real, other=0.0))
    lse = tl.load(lse_ptr + rows, mask=real, other=0.0)
    to = (rows * stride)[:, None] + at[None, :]
    in_c = (at < classes)[None, :]
    x = tl.load(x_ptr + to, mask=real[:, None] & in_c, other=0.0).to(tl.float32)
    chance = tl.exp(x - lse[:, None]) - tl.where(at[None, :] == number[:, None], 1.0, 0.0)
    # A row that is ignored has no gradient, whatever its logits are; a target that is no class has none.
    out = tl.where(valid[:, None], chance * gradient[:, None], float("nan"))
    out = tl.where(in_c & (is_ignored == 0)[:, None], out, 0.0)
    tl.store(out_ptr + to, out.to(out_ptr.dtype.element_ty), mask=real[:, None] & (at < stride)[None, :])


def _blocks(stride: int) -> tuple[int, int]:
    """The rows and columns of a program."""
    columns = min(_BLOCK, power_of_2_from(stride))
    return _BLOCK // columns, columns


class _RowLosses(PlainFunction):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, ignored: int) -> Tensor:
        rows, classes = logits.shape
        losses, lse = (torch.empty(rows, device=logits.device, dtype=torch.float32) for _ in range(2))
        if rows:
            block_r, block_c = _blocks(logits.stride(0))
            numbers = rows, classes, logits.stride(0), ignored, block_r, block_c
            grid = (cdiv(rows, block_r),)
            launch(_loss_forward, grid, (logits, target, losses, lse), numbers, num_warps=8)
        ctx.save_for_backward(logits, target, lse)
        ctx.ignored = ignored
        return losses

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        logits, target, lse = ctx.saved_tensors
        rows, classes = logits.shape
        if torch.is_grad_enabled():  # a gradient that is differentiated again
            counts = target != ctx.ignored
            chosen = F.one_hot(torch.where(counts, target, 0), classes)
            each = (gradient * counts).unsqueeze(1)
            return ((logits.float().softmax(1) - chosen) * each).to(logits.dtype), None, None
        stride = logits.stride(0)
        out = logits.new_empty(rows, stride)
        if rows:
            tensors = logits, target, lse, gradient.contiguous(), out
            block_r, block_c = _blocks(stride)
            numbers = rows, classes, stride, ctx.ignored, block_r, block_c
            grid = cdiv(rows, block_r), cdiv(stride, block_c)
            launch(_loss_backward, grid, tensors, numbers, num_warps=8)
        return out[:, :classes], None, None


def row_losses(logits: Tensor, target: Tensor, ignored: int) -> Tensor:
    """The loss of each row of logits (rows, classes), in float32; 0 where the target is `ignored`.

    A target that is no class gives NaN, since a kernel cannot raise.
    """
    # Rows may have a little padding, as a product with an odd number of classes has.
    padded = logits.stride(1) == 1 and 0 <= logits.stride(0) - logits.shape[1] <= _MOST_PADDING
    rows = logits if padded else logits.contiguous()
    losses: Tensor = _RowLosses.apply(rows, target.contiguous(), ignored)
    return losses
