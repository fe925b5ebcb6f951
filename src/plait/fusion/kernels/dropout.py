"""Dropout in one pass over memory: the hash of `plait.fusion.dispatch.random` is computed where it is used.

No mask is stored; the gradient computes the same one again.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from plait.fusion.dispatch.random import Mask
from plait.fusion.kernels import cdiv
from plait.fusion.kernels.images import in_memory
from plait.fusion.kernels.launch import launch, tl, triton
from plait.fusion.plain_function import PlainFunction

_BLOCK = 1024
_KINDS = (torch.float32, torch.bfloat16, torch.float16)
# Elements are counted in 32 bits.
_MOST = (1 << 31) - _BLOCK


@triton.jit
def keeps(element, offset, factor, level):
    """Whether the hash of an element's number by a trial's keys reaches the level."""
    bits = (element * factor + offset).to(tl.uint32, bitcast=True)
    bits ^= bits >> 16
    bits *= 0x85EBCA6B
    bits ^= bits >> 13
    bits *= 0xC2B2AE35
    bits ^= bits >> 16
    return bits.to(tl.int32, bitcast=True) >= level


@triton.jit(do_not_specialize=["of_offset", "of_factor", "level"])
def _drop(
    x_ptr, y_ptr, offset_ptr, factor_ptr, level_ptr, scale_ptr, of_offset, of_factor, level, scale,
    size, trials, channels, points, EACH: tl.constexpr, IMAGES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y = x times the scale or zero; of `IMAGES`, whose trials lie between points and channels."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if IMAGES:
        row = offs // (channels * trials)
        trial = offs // channels % trials
        element = (row // points * channels + offs % channels) * points + row % points
        mask = offs < size * trials
        at = offs.to(tl.int64)
    else:
        trial = tl.program_id(1)
        element = offs
        mask = offs < size
        at = trial.to(tl.int64) * size + offs
    offset = tl.load(offset_ptr + trial) ^ of_offset
    factor = tl.load(factor_ptr + trial) ^ of_factor
    if EACH:
        level = tl.load(level_ptr + trial)
        scale = tl.load(scale_ptr + trial).to(tl.float32)
    kept = keeps(element, offset, factor | 1, level)
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, (x * tl.where(kept, scale, 0.0)).to(y_ptr.dtype.element_ty), mask=mask)


class _Dropped(PlainFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, by: Mask) -> Tensor:
        ctx.by = by
        is_images = _is_images(x)
        x = x if is_images else x.contiguous()
        y = torch.empty_like(x)
        if not x.numel():
            return y
        trials, size = x.shape[0], prod(x.shape[1:])
        channels, points = (x.shape[2], prod(x.shape[3:])) if is_images else (1, 1)
        each = isinstance(by.level, Tensor)
        ones = (0, 1.0) if each else (by.level, by.scale)
        tensors = x, y, *by.keys, *((by.level, by.scale) if each else by.keys)
        grid = (cdiv(x.numel(), _BLOCK),) if is_images else (cdiv(size, _BLOCK), trials)
        numbers = *by.of_call, *ones, size, trials, channels, points, each, is_images, _BLOCK
        launch(_drop, grid, tensors, numbers)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return _Dropped.apply(dy, ctx.by), None


def _is_images(x: Tensor) -> bool:
    return x.dim() in (4, 5) and not x.is_contiguous() and in_memory(x).is_contiguous()


def supports(x: Tensor) -> bool:
    return x.dtype in _KINDS and x.numel() < _MOST


def dropped(x: Tensor, by: Mask) -> Tensor:
    """x (trials, ...) with zeros for what is dropped; elements are counted in the order of its axes."""
    outcome: Tensor = _Dropped.apply(x, by)
    return outcome
