"""A row of each trial, written many times."""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,import-not-found,misc"

from __future__ import annotations

from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:
    from plait.fusion.kernels import triton_stub as triton

_ROWS, _COLUMNS = 32, 256


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
