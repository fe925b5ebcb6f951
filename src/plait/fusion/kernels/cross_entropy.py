"""Cross entropy of rows of logits, read as they are: no copy in float32, no table of log-likelihoods."""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,misc"

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.fusion.kernels import cdiv
from plait.fusion.kernels.launch import launch, tl, triton
from plait.fusion.plain_function import PlainFunction

_BLOCK = 4096
_MOST_PADDING = 64


@triton.jit
def _loss_forward(x_ptr, target_ptr, loss_ptr, lse_ptr, classes, stride, ignored, BLOCK: tl.constexpr):
    """The loss of one row, and the logarithm of the sum of its exponentials."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + row)
    lane = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    top = tl.full((), float("-inf"), tl.float32)
    base = top
    for start in range(0, classes, BLOCK):
        at = start + lane
        x = tl.load(x_ptr + row * stride + at, mask=at < classes, other=float("-inf")).to(tl.float32)
        above = tl.maximum(top, tl.max(x, 0))
        # What is nothing but -inf would subtract it from itself.
        base = tl.where(above == float("-inf"), 0.0, above)
        total = total * tl.where(top == float("-inf"), 0.0, tl.exp(top - base)) + tl.exp(x - base)
        top = above
    lse = base + tl.log(tl.sum(total, 0))
    tl.store(lse_ptr + row, lse)
    inside = (target >= 0) & (target < classes)
    chosen = tl.load(x_ptr + row * stride + tl.where(inside, target, 0)).to(tl.float32)
    loss = tl.where(inside, lse - chosen, float("nan"))
    tl.store(loss_ptr + row, tl.where(target == ignored, 0.0, loss))


@triton.jit
def _loss_backward(
    x_ptr, target_ptr, lse_ptr, g_ptr, out_ptr, classes, stride, ignored, BLOCK: tl.constexpr
):  # fmt: skip
    """The gradient of one block of a row, and zeros in the padding after the row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    target = tl.load(target_ptr + row)
    valid = (target >= 0) & (target < classes)
    number = tl.where(valid, target, -1).to(tl.int32)
    gradient = tl.where(target == ignored, 0.0, tl.load(g_ptr + row))
    lse = tl.load(lse_ptr + row)
    x = tl.load(x_ptr + row * stride + at, mask=at < classes, other=0.0).to(tl.float32)
    chance = tl.exp(x - lse) - tl.where(at == number, 1.0, 0.0)
    # A row that is ignored has no gradient, whatever its logits are; a target that is no class has none.
    out = tl.where(target == ignored, 0.0, tl.where(valid, chance * gradient, float("nan")))
    out = tl.where(at < classes, out, 0.0)
    tl.store(out_ptr + row * stride + at, out.to(out_ptr.dtype.element_ty), mask=at < stride)


class _RowLosses(PlainFunction):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, ignored: int) -> Tensor:
        rows, classes = logits.shape
        losses, lse = (torch.empty(rows, device=logits.device, dtype=torch.float32) for _ in range(2))
        if rows:
            numbers = classes, logits.stride(0), ignored, _BLOCK
            launch(_loss_forward, (rows,), (logits, target, losses, lse), numbers, num_warps=8)
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
            numbers = classes, stride, ctx.ignored, _BLOCK
            launch(_loss_backward, (rows, cdiv(stride, _BLOCK)), tensors, numbers, num_warps=8)
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
