"""A row of each trial, written many times, and the sum of rows."""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,import-not-found,misc"

from __future__ import annotations

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:
    from plait.fusion.kernels import triton_stub as triton

_ROWS, _COLUMNS = 32, 256
# Enough programs to fill a GPU several times.
_PROGRAMS = 132 * 16


@triton.jit
def _repeat(row_ptr, out_ptr, rows, width, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    trial = tl.program_id(2).to(tl.int64)
    offs_c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    offs_r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    row = tl.load(row_ptr + trial * width + offs_c, mask=offs_c < width, other=0.0)
    at = (trial * rows + offs_r)[:, None] * width + offs_c[None, :]
    mask = (offs_r < rows)[:, None] & (offs_c < width)[None, :]
    tl.store(out_ptr + at, tl.broadcast_to(row[None, :], (BLOCK_R, BLOCK_C)), mask=mask)


def repeated(row: Tensor, rows: int) -> Tensor:
    """`row` of shape (trials, width) as (trials, rows, width)."""
    trials, width = row.shape
    out = row.new_empty(trials, rows, width)
    if out.numel():
        grid = (triton.cdiv(width, _COLUMNS), triton.cdiv(rows, _ROWS), trials)
        _repeat[grid](row.contiguous(), out, rows, width, _ROWS, _COLUMNS)
    return out


@triton.jit
def _sum(x_ptr, out_ptr, rows, width, trial_stride, row_stride, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """Sums of columns over this program's rows."""
    trial = tl.program_id(2).to(tl.int64)
    offs_c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    total = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for start in range(tl.program_id(1) * BLOCK_R, rows, tl.num_programs(1) * BLOCK_R):
        offs_r = start + tl.arange(0, BLOCK_R)
        mask = (offs_r < rows)[:, None] & (offs_c < width)[None, :]
        at = trial * trial_stride + offs_r[:, None] * row_stride + offs_c[None, :]
        total += tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    to = (tl.program_id(1) * tl.num_programs(2) + trial) * width + offs_c
    tl.store(out_ptr + to, tl.sum(total, 0), mask=offs_c < width)


def summed(x: Tensor) -> Tensor:
    """The sum of the rows of x (trials, rows, width), in float32."""
    x = x if x.stride(2) == 1 else x.contiguous()
    trials, rows, width = x.shape
    across = triton.cdiv(width, _COLUMNS)
    shares = max(1, min(_PROGRAMS // (across * trials), triton.cdiv(rows, _ROWS)))
    out = torch.empty(shares, trials, width, device=x.device)
    if out.numel():
        _sum[(across, shares, trials)](x, out, rows, width, x.stride(0), x.stride(1), _ROWS, _COLUMNS)
    return out.sum(0)
