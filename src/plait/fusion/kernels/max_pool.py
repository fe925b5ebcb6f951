"""Maximum pooling of all trials' images, and its gradient in one pass, without zeros or atomic additions.

Values lie in memory as (batch, height, width, trials x channels); of each maximum one byte is kept: the place
in its window.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from plait.fusion.kernels import cdiv
from plait.fusion.kernels.images import Size, in_memory, in_order, new_images
from plait.fusion.kernels.launch import launch, tl, triton
from plait.fusion.plain_function import PlainFunction

_PIXELS, _CHANNELS = 8, 256
_MOST_PLACES = 255


@triton.jit
def _tile(pixels, wide, high, across, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """This program's pixels: their images, rows and columns, what exists, and where it is in memory."""
    offs_r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    offs_c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    image = offs_r // (high * across)
    y_at = (offs_r // across % high).to(tl.int32)
    x_at = (offs_r % across).to(tl.int32)
    mask = (offs_r < pixels)[:, None] & (offs_c < wide)[None, :]
    return image, y_at, x_at, mask, offs_r[:, None] * wide + offs_c[None, :], offs_c


@triton.jit(do_not_specialize=["pixels"])
def _largest(
    x_ptr, y_ptr, place_ptr, pixels, wide, in_h, in_w, out_h, out_w,
    KERNEL_H: tl.constexpr, KERNEL_W: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    PAD_H: tl.constexpr, PAD_W: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The largest of each window and its place; as in torch the first of equal ones, and the last NaN."""
    image, y_at, x_at, mask, to, offs_c = _tile(pixels, wide, out_h, out_w, BLOCK_R, BLOCK_C)
    best = tl.full((BLOCK_R, BLOCK_C), float("-inf"), dtype=tl.float32)
    place = tl.full((BLOCK_R, BLOCK_C), KERNEL_H * KERNEL_W, dtype=tl.int32)
    for tap_y in tl.static_range(KERNEL_H):
        for tap_x in tl.static_range(KERNEL_W):
            in_y = y_at * STRIDE_H - PAD_H + tap_y
            in_x = x_at * STRIDE_W - PAD_W + tap_x
            inside = (in_y >= 0) & (in_y < in_h) & (in_x >= 0) & (in_x < in_w)
            at = ((image * in_h + in_y) * in_w + in_x)[:, None] * wide + offs_c[None, :]
            real = mask & inside[:, None]
            x = tl.load(x_ptr + at, mask=real, other=0.0).to(tl.float32)
            is_better = real & ((x > best) | (x != x) | (place == KERNEL_H * KERNEL_W))
            best = tl.where(is_better, x, best)
            place = tl.where(is_better, tap_y * KERNEL_W + tap_x, place)
    tl.store(y_ptr + to, best.to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(place_ptr + to, place.to(tl.uint8), mask=mask)


@triton.jit(do_not_specialize=["pixels"])
def _gradient_of_largest(
    dy_ptr, place_ptr, dx_ptr, pixels, wide, in_h, in_w, out_h, out_w,
    KERNEL_H: tl.constexpr, KERNEL_W: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    PAD_H: tl.constexpr, PAD_W: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The gradient of each pixel: the sum of those of the windows whose largest it is."""
    image, y_at, x_at, mask, to, offs_c = _tile(pixels, wide, in_h, in_w, BLOCK_R, BLOCK_C)
    total = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.float32)
    for step_y in tl.static_range((KERNEL_H + STRIDE_H - 1) // STRIDE_H):
        for step_x in tl.static_range((KERNEL_W + STRIDE_W - 1) // STRIDE_W):
            tap_y = (y_at + PAD_H) % STRIDE_H + STRIDE_H * step_y
            tap_x = (x_at + PAD_W) % STRIDE_W + STRIDE_W * step_x
            out_y = (y_at + PAD_H) // STRIDE_H - step_y
            out_x = (x_at + PAD_W) // STRIDE_W - step_x
            inside = (tap_y < KERNEL_H) & (out_y >= 0) & (out_y < out_h)
            inside = inside & (tap_x < KERNEL_W) & (out_x >= 0) & (out_x < out_w)
            at = ((image * out_h + out_y) * out_w + out_x)[:, None] * wide + offs_c[None, :]
            real = mask & inside[:, None]
            place = tl.load(place_ptr + at, mask=real, other=255).to(tl.int32)
            dy = tl.load(dy_ptr + at, mask=real, other=0.0).to(tl.float32)
            total += tl.where(place == (tap_y * KERNEL_W + tap_x)[:, None], dy, 0.0)
    tl.store(dx_ptr + to, total.to(dx_ptr.dtype.element_ty), mask=mask)


class _MaxPool(PlainFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kernel: Size, stride: Size, pad: Size) -> Tensor:
        size = [(x.shape[3 + i] + 2 * pad[i] - kernel[i]) // stride[i] + 1 for i in range(2)]
        y = new_images(x, x.shape[2], size)
        places = new_images(x, x.shape[2], size, torch.uint8)
        ctx.save_for_backward(places)
        ctx.geometry = x.shape, (*x.shape[3:], *size, *kernel, *stride, *pad)
        _launch(_largest, (x, y, places), y, ctx.geometry[1])
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        (places,) = ctx.saved_tensors
        shape, numbers = ctx.geometry
        if torch.is_grad_enabled():
            return _scattered(dy, places, shape, numbers), None, None, None
        dx = new_images(dy, shape[2], shape[3:])
        _launch(_gradient_of_largest, (in_order(dy), places, dx), dx, numbers)
        return dx, None, None, None


def _scattered(dy: Tensor, places: Tensor, shape: Size, numbers: Sequence[int]) -> Tensor:
    """The gradient by torch's functions, which can be differentiated again."""
    in_h, in_w, out_h, out_w, _, kernel_w, stride_h, stride_w, pad_h, pad_w = numbers
    first_y = torch.arange(out_h, device=dy.device) * stride_h - pad_h
    first_x = torch.arange(out_w, device=dy.device) * stride_w - pad_w
    at = (first_y[:, None] + places // kernel_w) * in_w + first_x + places % kernel_w
    zeros = dy.new_zeros((*shape[:3], in_h * in_w), dtype=torch.float32)
    return zeros.scatter_add(3, at.flatten(3), dy.flatten(3).float()).view(shape).to(dy.dtype)


def _launch(kernel: Any, tensors: tuple[Tensor, ...], made: Tensor, numbers: tuple[int, ...]) -> None:
    trials, _, channels, *_ = made.shape
    wide = trials * channels
    pixels = made.numel() // wide
    grid = cdiv(pixels, _PIXELS), cdiv(wide, _CHANNELS)
    launch(kernel, grid, tensors, (pixels, wide, *numbers, _PIXELS, _CHANNELS))


def fits(x: Tensor, kernel: Size, stride: Size, pad: Size) -> bool:
    """Whether images (trials, batch, channels, height, width) lie in memory as the kernels read them, and
    such windows are valid, with places that a byte can tell.
    """
    if x.dim() != 5 or x.numel() == 0 or not in_memory(x).is_contiguous():
        return False
    if {len(kernel), len(stride), len(pad)} != {2} or min(*kernel, *stride) < 1 or min(pad) < 0:
        return False
    sized = all(2 * pad[i] <= kernel[i] <= x.shape[3 + i] + 2 * pad[i] for i in range(2))
    return sized and kernel[0] * kernel[1] <= _MOST_PLACES


def max_pool(x: Tensor, kernel: Size, stride: Size, pad: Size) -> Tensor:
    """The largest of each window, of images and windows that `fits`."""
    pooled: Tensor = _MaxPool.apply(x, kernel, stride, pad)
    return pooled
