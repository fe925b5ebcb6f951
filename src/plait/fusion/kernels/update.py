"""Adam for all trials of several parameters in one pass over memory, each trial with its own coefficients."""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from plait.fusion.kernels import cdiv
from plait.fusion.kernels.launch import launch, tl, triton

_BLOCK = 1024
# The numbers that are written together, or none: a word of 16 bytes.
_WORD = 4
# The most parameters of one launch, and what addresses are multiples of. All sizes of a launch are, or none:
# these have another compiled kernel.
_MOST, _ALIGNED = 8, 16
# A parameter, its gradient, and the averages of the gradient and of its square.
Moments = tuple[Tensor, Tensor, Tensor, Tensor]


@triton.jit
def _bits(a, b):
    """The bits in which two numbers differ."""
    return a.to(tl.int32, bitcast=True) ^ b.to(tl.int32, bitcast=True)


@triton.jit
def _adam(
    ps, gs, means, squares, table_ptr, sizes, trials,
    DECOUPLED: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr, WORD: tl.constexpr,
):  # fmt: skip
    """The formulas of `plait.fusion.optim.optimizer_kinds` for a block of one trial's elements.

    What stays as it is, as where gradients have always been zero, is not written.
    """
    block = tl.program_id(0)
    p_ptr = ps[0]
    g_ptr = gs[0]
    mean_ptr = means[0]
    square_ptr = squares[0]
    size = sizes[0]
    first = 0
    end = tl.cdiv(sizes[0], BLOCK)
    for number in tl.static_range(1, COUNT):
        if block >= end:
            p_ptr = ps[number]
            g_ptr = gs[number]
            mean_ptr = means[number]
            square_ptr = squares[number]
            size = sizes[number]
            first = end
        end += tl.cdiv(sizes[number], BLOCK)
    trial = tl.program_id(1)
    words = (block - first) * (BLOCK // WORD) + tl.arange(0, BLOCK // WORD)
    offs = words[:, None] * WORD + tl.arange(0, WORD)[None, :]
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
    new_p = p
    if DECOUPLED:
        new_p = p * tl.load(table_ptr + 7 * trials + trial)
    else:
        g += tl.load(table_ptr + 6 * trials + trial) * p
    new_mean = mean + enter1 * (g - mean)
    new_square = keep2 * square + enter2 * g * g
    new_p -= new_mean / (tl.sqrt(new_square) * root + eps) * step
    apart = _bits(new_p, p) | _bits(new_mean, mean) | _bits(new_square, square)
    mask = mask & (tl.max((apart != 0).to(tl.int32), 1) != 0)[:, None]
    tl.store(p_ptr + at, new_p, mask=mask)
    tl.store(mean_ptr + at, new_mean, mask=mask)
    tl.store(square_ptr + at, new_square, mask=mask)


def adam(moments: Iterable[Moments], numbers: Tensor, decoupled: bool) -> None:
    """One step of several parameters in place; all in float32, each trial's elements contiguous.

    `numbers` has a row per coefficient, in the order of Adam's `coefficients`, and a column per trial.
    """
    for several in _launches(map(_prepared, moments)):
        trials = several[0][0].shape[0]
        sizes = tuple([p.numel() // trials for p, *_ in several])
        tensors = *zip(*several), numbers
        grid = sum([cdiv(size, _BLOCK) for size in sizes]), trials
        launch(_adam, grid, tensors, (sizes, trials, decoupled, len(several), _BLOCK, _WORD), num_warps=4)
        # As after a write by torch: a backward that saved a parameter before must not go on unnoticed.
        torch.autograd.graph.increment_version([p for p, *_ in several])


def _prepared(moments: Moments) -> Moments:
    """With the gradient in the layout of the parameter."""
    p, g, mean, square = moments
    strides = p.stride()
    assert strides[0] * p.shape[0] == p.numel()
    for average in (mean, square):
        if average.stride() != strides:  # as where the parameter was brought into another order since
            average.data = torch.empty_like(p).copy_(average)
    return p, g if g.stride() == strides else torch.empty_like(p).copy_(g), mean, square


def _launches(moments: Iterable[Moments]) -> Iterator[Sequence[Moments]]:
    """The parameters of each launch; what has odd addresses is launched alone, as is a single number."""
    waiting: dict[bool, list[Moments]] = {True: [], False: []}
    for each in moments:
        own = each[0].numel() // each[0].shape[0]
        if own == 1 or any(part.data_ptr() % _ALIGNED for part in each):
            yield [each]
            continue
        several = waiting[own % _ALIGNED == 0]
        several.append(each)
        if len(several) == _MOST:  # not all of them first, as gradients may be copies
            yield several
            several.clear()
    yield from filter(None, waiting.values())
