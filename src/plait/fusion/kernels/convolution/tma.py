"""Convolutions of all trials as matrix products whose operands the tensor memory accelerator (TMA) loads.

In channels-last format, the pixels that one tap of a convolution kernel reads for a tile of outputs are a box
of the image, shifted by the tap; with a stride, a box of one phase of the image. A tensor descriptor loads
such a box in one instruction and fills pixels outside of the image with zeros, so padding is free. Needs a
Hopper GPU or newer.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from plait.fusion.kernels import cdiv, power_of_2_from
from plait.fusion.kernels.images import Pad
from plait.fusion.kernels.launch import TensorDescriptor, launch, tl, triton

Box = tuple[int, int, int]
Shape = tuple[int, ...]
# The shape, strides and box of a tensor descriptor.
Described = tuple[list[int], list[int], list[int]]

# Tensor descriptors need addresses and strides in multiples of this many bytes.
_ALIGNED_BYTES = 16
# A weight gradient with fewer programs than this is split over its rows.
_PROGRAMS = 132 * 2


@dataclass(frozen=True)
class Tile:
    """The block sizes of one program: rows, columns, and the reduced axis (`depth`)."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


@triton.jit
def _moved(
    desc, image0, y0, x0, tap_y, tap_x, trial, trials, channels, k,
    STRIDE: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr,
):  # fmt: skip
    """Load the pixels that a tap reads for a box of outputs; see `_described` for the axes."""
    if STRIDE == 1:
        box = desc.load([image0, y0 + tap_y - PAD_H, x0 + tap_x - PAD_W, trial, k])
    else:
        # The padding is added in whole strides, so that no negative number is divided.
        far_y = tap_y + (STRIDE - 1) * PAD_H
        far_x = tap_x + (STRIDE - 1) * PAD_W
        channel = ((far_x % STRIDE) * trials + trial) * channels + k
        y_at = y0 + far_y // STRIDE - PAD_H
        x_at = x0 + far_x // STRIDE - PAD_W
        box = desc.load([far_y % STRIDE, image0, y_at, x_at, channel])
    return box


@triton.jit(do_not_specialize=["reduced", "batch", "out_h", "out_w", "tiles_y", "tiles_x"])
def _box_product(
    a_desc, b_desc, bias_ptr, y_ptr, reduced, outs, y_row, batch, out_h, out_w, tiles_y, tiles_x,
    KERNEL_H: tl.constexpr, KERNEL_W: tl.constexpr, STRIDE: tl.constexpr,
    PAD_H: tl.constexpr, PAD_W: tl.constexpr, UP: tl.constexpr, HAS_BIAS: tl.constexpr,
    BOX_B: tl.constexpr, BOX_Y: tl.constexpr, BOX_X: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """y[pixel, out] = sum over taps and channels of a[shifted pixel, channel] * b[channel, out].

    A convolution computes a small image from a large one (down), a transposed one the reverse (up). Up, each
    program computes the pixels of one phase of the stride, which use the same taps.
    """
    BLOCK_M: tl.constexpr = BOX_B * BOX_Y * BOX_X
    trial = tl.program_id(1)
    tiles_n = tl.cdiv(outs, BLOCK_N)
    first_n = (tl.program_id(0) % tiles_n) * BLOCK_N
    tile = tl.program_id(0) // tiles_n
    x0 = (tile % tiles_x) * BOX_X
    y0 = (tile // tiles_x % tiles_y) * BOX_Y
    image0 = (tile // (tiles_x * tiles_y)) * BOX_B
    blocks = tl.cdiv(reduced, BLOCK_K)
    if UP:
        phase_y = tl.program_id(2) // STRIDE
        phase_x = tl.program_id(2) % STRIDE
        first_y = (phase_y + PAD_H) % STRIDE
        first_x = (phase_x + PAD_W) % STRIDE
        taps_y = (KERNEL_H - first_y + STRIDE - 1) // STRIDE
        taps_x = (KERNEL_W - first_x + STRIDE - 1) // STRIDE
        last_y = y0 + (phase_y + PAD_H - first_y) // STRIDE
        last_x = x0 + (phase_x + PAD_W - first_x) // STRIDE
    else:
        taps_y = KERNEL_H
        taps_x = KERNEL_W
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for step in range(taps_y * taps_x * blocks):
        number = step // blocks
        k = (step % blocks) * BLOCK_K
        tap_y = number // taps_x
        tap_x = number % taps_x
        if UP:
            a = a_desc.load([image0, last_y - tap_y, last_x - tap_x, trial, k])
            tap = (first_y + STRIDE * tap_y) * KERNEL_W + first_x + STRIDE * tap_x
            b = b_desc.load([trial, k, tap, first_n])
            b = tl.reshape(b, (BLOCK_K, BLOCK_N))
        else:
            a = _moved(
                a_desc, image0, y0, x0, tap_y, tap_x, trial, tl.num_programs(1), reduced, k,
                STRIDE, PAD_H, PAD_W,
            )  # fmt: skip
            b = b_desc.load([trial, first_n, number, k])
            b = tl.reshape(b, (BLOCK_N, BLOCK_K)).T
        acc = tl.dot(tl.reshape(a, (BLOCK_M, BLOCK_K)), b, acc)
    offs_n = first_n + tl.arange(0, BLOCK_N)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + trial * outs + offs_n, mask=offs_n < outs, other=0.0)
        acc += bias.to(tl.float32)[None, :]
    offs_m = tl.arange(0, BLOCK_M)
    image = image0 + offs_m // (BOX_Y * BOX_X)
    y_at = y0 + offs_m // BOX_X % BOX_Y
    x_at = x0 + offs_m % BOX_X
    if UP:
        y_at = y_at * STRIDE + phase_y
        x_at = x_at * STRIDE + phase_x
    real = (image < batch) & (y_at < out_h) & (x_at < out_w)
    row = ((image * out_h + y_at) * out_w + x_at).to(tl.int64)
    to = row[:, None] * y_row + (trial * outs + offs_n)[None, :]
    tl.store(y_ptr + to, acc.to(y_ptr.dtype.element_ty), mask=real[:, None] & (offs_n < outs)[None, :])


@triton.jit(do_not_specialize=["tiles", "tiles_y", "tiles_x"])
def _box_gradient(
    large_desc, small_desc, dw_ptr, sums_ptr, channels, outs, dw_trial, tiles, tiles_y, tiles_x,
    KERNEL_H: tl.constexpr, KERNEL_W: tl.constexpr, STRIDE: tl.constexpr,
    PAD_H: tl.constexpr, PAD_W: tl.constexpr,
    BOX_B: tl.constexpr, BOX_Y: tl.constexpr, BOX_X: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_C: tl.constexpr, HAS_SUMS: tl.constexpr,
):  # fmt: skip
    """dw[out, tap, channel] = sum over pixels of small[pixel, out] * large[shifted pixel, channel].

    Sums of small alone, as of the gradients of a bias, are one more column of the product.
    """
    BLOCK_M: tl.constexpr = BOX_B * BOX_Y * BOX_X
    trial = tl.program_id(1)
    tiles_c = tl.cdiv(channels, BLOCK_C)
    tap = tl.program_id(0) % (KERNEL_H * KERNEL_W)
    part = tl.program_id(0) // (KERNEL_H * KERNEL_W)
    first_o = (part // tiles_c) * BLOCK_O
    first_c = (part % tiles_c) * BLOCK_C
    acc = tl.zeros((BLOCK_O, BLOCK_C), dtype=tl.float32)
    sums = tl.zeros((BLOCK_O, 16), dtype=tl.float32)
    one = tl.where(tl.arange(0, 16)[None, :] + tl.zeros((BLOCK_M, 16), dtype=tl.int32) == 0, 1.0, 0.0)
    for tile in range(tl.program_id(2), tiles, tl.num_programs(2)):
        x0 = (tile % tiles_x) * BOX_X
        y0 = (tile // tiles_x % tiles_y) * BOX_Y
        image0 = (tile // (tiles_x * tiles_y)) * BOX_B
        large = _moved(
            large_desc, image0, y0, x0, tap // KERNEL_W, tap % KERNEL_W, trial, tl.num_programs(1),
            channels, first_c, STRIDE, PAD_H, PAD_W,
        )  # fmt: skip
        small = small_desc.load([image0, y0, x0, trial, first_o])
        small = tl.reshape(small, (BLOCK_M, BLOCK_O))
        acc = tl.dot(tl.trans(small), tl.reshape(large, (BLOCK_M, BLOCK_C)), acc)
        if HAS_SUMS:
            sums = tl.dot(tl.trans(small), one.to(small.dtype), sums)
    offs_o = first_o + tl.arange(0, BLOCK_O)
    offs_c = first_c + tl.arange(0, BLOCK_C)
    share = (tl.program_id(2).to(tl.int64) * tl.num_programs(1) + trial) * dw_trial
    to = share + (offs_o[:, None] * (KERNEL_H * KERNEL_W) + tap) * channels + offs_c[None, :]
    tl.store(dw_ptr + to, acc, mask=(offs_o < outs)[:, None] & (offs_c < channels)[None, :])
    if HAS_SUMS:
        to = (tl.program_id(2) * tl.num_programs(1) + trial) * outs + offs_o
        tl.store(sums_ptr + to, tl.sum(sums, 1), mask=(offs_o < outs) & (tap == 0) & (first_c == 0))


def fits(source: Tensor, taps: Tensor, stride: int, size: Sequence[int]) -> bool:
    """Whether `source`, on its GPU, can be loaded by tensor descriptors; the large images have this size."""
    # No descriptor has an axis without elements, as of an empty batch.
    has_address = source.numel() > 0 and (source.data_ptr() | taps.data_ptr()) % _ALIGNED_BYTES == 0
    return has_address and _fits(taps.shape[1], taps.shape[4], stride, *size) and _has_tma(source.device)


@cache
def _fits(outs: int, channels: int, stride: int, height: int, width: int) -> bool:
    aligned = (outs * 2) % _ALIGNED_BYTES == (channels * 2) % _ALIGNED_BYTES == 0
    # With a stride the descriptor has no axis left for the trials, and cannot separate them.
    phased = stride == 1 or (channels % 64 == 0 and height % stride == 0 and width % stride == 0)
    return aligned and phased


@cache
def _has_tma(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def box_of(rows: int, batch: int, height: int, width: int) -> Box:
    """The box of `rows` pixels (images, height, width; powers of two) that wastes the fewest."""
    powers = [2**n for n in range(rows.bit_length())]
    boxes = [(rows // (y * x), y, x) for y, x in product(powers, powers) if y * x <= rows]
    return min(boxes, key=lambda box: (_count(box, batch, height, width), box[0]))


def _count(box: Box, batch: int, height: int, width: int) -> int:
    return cdiv(batch, box[0]) * cdiv(height, box[1]) * cdiv(width, box[2])


def _described(images: Shape, stride: int, box: Box, block: int) -> Described:
    """Images as (batch, height, width, trials, channels), with `block` channels of one trial.

    With a stride, as (vertical phase, batch, height, width, horizontal phase x trials x channels), with boxes
    of one phase: a descriptor has at most five axes.
    """
    trials, batch, channels, height, width = images
    wide = trials * channels
    row, image = width * wide, height * width * wide
    if stride == 1:
        return [batch, height, width, trials, channels], [image, row, wide, channels, 1], [*box, 1, block]
    shape = [stride, batch, height // stride, width // stride, stride * wide]
    return shape, [row, image, stride * row, stride * wide, 1], [1, *box, block]


def _table(taps: Shape, block_o: int, block_c: int) -> Described:
    """The weights as (trials, outs, taps, channels), with boxes of one tap."""
    trials, outs, kernel_h, kernel_w, channels = taps
    shape = [trials, outs, kernel_h * kernel_w, channels]
    strides = [outs * kernel_h * kernel_w * channels, kernel_h * kernel_w * channels, channels, 1]
    return shape, strides, [1, block_o, 1, block_c]


def _boxes(tensor: Tensor, how: Described) -> Any:
    """The descriptor of a tensor, without Triton's checks, which take longer than the launch."""
    made = object.__new__(TensorDescriptor)
    made.base, (made.shape, made.strides, made.block_shape) = tensor, how
    return made


def _product_tile(columns: int, reduced: int) -> Tile:
    depth = _block(reduced, 64)
    return Tile(128, 128, depth, 8, 4) if columns >= 128 else Tile(128, _block(columns, 64), depth, 4, 3)


def _gradient_tile(outs: int, channels: int) -> Tile:
    rows, columns = max(64, _block(outs, 128)), _block(channels, 256)
    if columns == 256:
        return Tile(rows, columns, 64, 8, 3) if rows == 128 else Tile(rows, 128, 64, 4, 4)
    return Tile(rows, columns, 64, 8 if rows * columns == 128 * 128 else 4, 4)


def _block(size: int, most: int) -> int:
    """The block size for this many channels: at least the minimum of Tensor Cores, at most `most`."""
    return min(most, max(16, power_of_2_from(size)))


def _in_one_row(images: Shape, taps: Shape, stride: int, pad: Pad) -> Shape:
    """For 1x1 kernels all pixels are one row of one image."""
    trials, batch, channels, height, width = images
    is_point = taps[2:4] == (1, 1) and stride == 1 and pad == (0, 0)
    return (trials, 1, channels, 1, batch * height * width) if is_point else images


class _Launch(NamedTuple):
    """The numbers of a launch for one set of shapes; to find them takes longer than to launch."""

    grid: tuple[int, int, int]
    a: Described
    b: Described
    numbers: tuple[Any, ...]
    tile: Tile


@lru_cache(maxsize=4096)
def _product_launch(
    source: Shape, made: Shape, taps: Shape, stride: int, pad: Pad, is_up: bool, has_bias: bool
) -> _Launch:
    trials, outs, kernel_h, kernel_w, channels = taps
    source, made = (_in_one_row(images, taps, stride, pad) for images in (source, made))
    _, batch, columns, out_h, out_w = made
    reduced, phases = (outs, stride) if is_up else (channels, 1)
    phase_h, phase_w = cdiv(out_h, phases), cdiv(out_w, phases)
    tile = _product_tile(columns, reduced)
    box = box_of(tile.rows, batch, phase_h, phase_w)
    tiles = _count(box, batch, phase_h, phase_w) * cdiv(columns, tile.columns)
    blocks = (tile.depth, tile.columns) if is_up else (tile.columns, tile.depth)
    numbers = (
        reduced, columns, trials * columns, batch, out_h, out_w,
        cdiv(phase_h, box[1]), cdiv(phase_w, box[2]),
        kernel_h, kernel_w, stride, *pad, is_up, has_bias, *box, tile.columns, tile.depth,
    )  # fmt: skip
    a = _described(source, 1 if is_up else stride, box, tile.depth)
    return _Launch((tiles, trials, phases**2), a, _table(taps, *blocks), numbers, tile)


def multiply(
    source: Tensor, taps: Tensor, bias: Tensor | None, stride: int, pad: Pad, made: Tensor, is_up: bool
) -> None:
    """A convolution of images (trials, batch, channels, h, w) to `made`; up, the transposed one.

    The taps are (trials, out, kernel h and w, channels).
    """
    how = _product_launch(source.shape, made.shape, taps.shape, stride, pad, is_up, bias is not None)
    tensors = _boxes(source, how.a), _boxes(taps, how.b), bias if bias is not None else made, made
    launch(_box_product, how.grid, tensors, how.numbers, num_warps=how.tile.warps, num_stages=how.tile.stages)


@lru_cache(maxsize=4096)
def _gradient_launch(large: Shape, small: Shape, taps: Shape, stride: int, pad: Pad, sums: bool) -> _Launch:
    trials, outs, kernel_h, kernel_w, channels = taps
    large, small = (_in_one_row(images, taps, stride, pad) for images in (large, small))
    _, batch, _, out_h, out_w = small
    tile = _gradient_tile(outs, channels)
    box = box_of(tile.depth, batch, out_h, out_w)
    steps = _count(box, batch, out_h, out_w)
    parts = cdiv(outs, tile.rows) * cdiv(channels, tile.columns) * kernel_h * kernel_w
    shares = max(1, min(_PROGRAMS // (parts * trials), steps // 8))
    numbers = (
        channels, outs, outs * kernel_h * kernel_w * channels,
        steps, cdiv(out_h, box[1]), cdiv(out_w, box[2]),
        kernel_h, kernel_w, stride, *pad, *box, tile.rows, tile.columns, sums,
    )  # fmt: skip
    a, b = _described(large, stride, box, tile.columns), _described(small, 1, box, tile.rows)
    return _Launch((parts, trials, shares), a, b, numbers, tile)


def taps_gradient(
    large: Tensor, small: Tensor, taps: Tensor, stride: int, pad: Pad, sums: bool
) -> tuple[Tensor, Tensor | None]:
    """The gradient of the taps, in float32, from the large image and the small one; one is a gradient.

    Also the `sums` over the pixels of the small one, if asked for, of shape (trials, out).
    """
    how = _gradient_launch(large.shape, small.shape, taps.shape, stride, pad, sums)
    shares, (trials, outs) = how.grid[2], taps.shape[:2]
    gradient = torch.empty((shares, *taps.shape), dtype=torch.float32, device=large.device)
    totals = gradient.new_empty(shares, trials, outs) if sums else gradient
    tensors = _boxes(large, how.a), _boxes(small, how.b), gradient, totals
    launch(
        _box_gradient, how.grid, tensors, how.numbers, num_warps=how.tile.warps, num_stages=how.tile.stages
    )
    return gradient[0] if shares == 1 else gradient.sum(0), totals.sum(0) if sums else None
