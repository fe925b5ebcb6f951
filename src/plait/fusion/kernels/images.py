"""Helpers of the convolution kernels: images in channels-last format, with the trials in the channels."""

from __future__ import annotations

import torch
from torch import Tensor

Pad = tuple[int, int]
Size = tuple[int, int]


def new_images(of: Tensor, channels: int, size: Size, kind: torch.dtype | None = None) -> Tensor:
    """As many empty images (trials, batch, channels, height, width) as there are `of`; `fold` views them."""
    (trials, batch), (height, width) = of.shape[:2], size
    wide = trials * channels
    strides = channels, height * width * wide, 1, width * wide, wide
    shape = trials, batch, channels, height, width
    return torch.empty_strided(shape, strides, dtype=kind or of.dtype, device=of.device)


def fold(images: Tensor) -> Tensor:
    """(trials, batch, channels, height, width) as (batch, trials x channels, height, width), channels last.

    A view of what the kernels made.
    """
    trials, batch, channels, height, width = images.shape
    wide = trials * channels
    strides = height * width * wide, 1, width * wide, wide
    if images.stride() == (channels, *strides):
        return images.as_strided((batch, wide, height, width), strides)
    return images.movedim(0, 1).flatten(1, 2).contiguous(memory_format=torch.channels_last)


def small_size(large: Tensor, taps: Tensor, stride: int, pad: Pad) -> Size:
    """Height and width of the output of a convolution on `large`."""
    *_, high, wide = large.shape
    _, _, kernel_h, kernel_w, _ = taps.shape
    return (high + 2 * pad[0] - kernel_h) // stride + 1, (wide + 2 * pad[1] - kernel_w) // stride + 1


def in_16_bits(images: Tensor) -> Tensor:
    """`images` as a convolution takes them under autocast; raises RuntimeError if these are not 16 bits."""
    if torch.is_autocast_enabled("cuda"):
        images = images.to(torch.get_autocast_dtype("cuda"))
    if images.dtype not in (torch.bfloat16, torch.float16):
        raise RuntimeError(f"found {images.dtype}, expected 16 bits")
    return images
