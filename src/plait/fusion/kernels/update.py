"""Adam for all trials of a parameter in one pass over memory, each trial with its own coefficients."""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,import-not-found"

from __future__ import annotations

import torch
from torch import Tensor

from plait.fusion.kernels import cdiv

try:
    import triton
    import triton.language as tl
except ImportError:
    from plait.fusion.kernels import triton_stub as triton

_BLOCK = 1024


@triton.jit
def _adam(
    p_ptr, g_ptr, mean_ptr, square_ptr, table_ptr, size, trials,
    DECOUPLED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The formulas of `plait.fusion.optim.optimizer_kinds` for a block of one trial's elements."""
    trial = tl.program_id(1)
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < size
    at = trial.to(tl.int64) * size + offs
    step = tl.load(table_ptr + trial)
    root = tl.load(table_ptr + trials + trial)
    eps = tl.load(table_ptr + 2 * trials + trial)
    enter1 = tl.load(table_ptr + 3 * trials + trial)
    enter2 = tl.load(table_ptr + 4 * trials + trial)
    keep2 = tl.load(table_ptr + 5 * trials + trial)
    p = tl.load(p_ptr + at, mask=mask, other=0.0)
    g = tl.load(g_ptr + at, mask=mask, other=0.0)
    mean = tl.load(mean_ptr + at, mask=mask, other=0.0)
    square = tl.load(square_ptr + at, mask=mask, other=0.0)
    if DECOUPLED:
        p *= tl.load(table_ptr + 7 * trials + trial)
    else:
        g += tl.load(table_ptr + 6 * trials + trial) * p
    mean += enter1 * (g - mean)
    square = keep2 * square + enter2 * g * g
    p -= mean / (tl.sqrt(square) * root + eps) * step
    tl.store(p_ptr + at, p, mask=mask)
    tl.store(mean_ptr + at, mean, mask=mask)
    tl.store(square_ptr + at, square, mask=mask)


def adam(p: Tensor, g: Tensor, mean: Tensor, square: Tensor, numbers: Tensor, decoupled: bool) -> None:
    """One step in place; all in float32, each trial's elements contiguous.

    `numbers` has a row per coefficient, in the order of Adam's `coefficients`, and a column per trial.
    """
    trials, size = p.shape[0], p[0].numel()
    assert p.stride(0) == size
    assert p.stride() == mean.stride() == square.stride()
    if g.stride() != p.stride():
        g = torch.empty_like(p).copy_(g)
    _adam[(cdiv(size, _BLOCK), trials)](
        p, g, mean, square, numbers, size, trials, decoupled, _BLOCK, num_warps=4
    )
