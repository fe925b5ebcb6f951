"""Images as the kernels read them: in channels-last format, the trials before the channels.

Their axes are (trials, batch, channels, height, width); in memory they lie as (batch, height, width, trials,
channels).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from plait.fusion.kernels import HALF

Pad = tuple[int, int]
Size = Sequence[int]


def new_images(of: Tensor, channels: int, size: Size, kind: torch.dtype | None = None) -> Tensor:
    """As many empty images (trials, batch, channels, height, width) as there are `of`."""
    shape = *of.shape[:2], channels, *size
    return of.new_empty_strided(shape, _strides(shape), dtype=kind)


@lru_cache(maxsize=4096)
def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Those of (batch, height, width, trials, channels)."""
    trials, _, channels, height, width = shape
    wide = trials * channels
    return channels, height * width * wide, 1, width * wide, wide


def in_memory(x: Tensor) -> Tensor:
    """A view whose axes are in the order in which the kernels find them in memory."""
    return x.permute(1, *range(3, x.dim()), 0, 2)


def in_order(images: Tensor) -> Tensor:
    """The same images, which lie in memory as the kernels read them; a copy only if they do not."""
    if images.stride() == _strides(images.shape):
        return images
    return images.permute(1, 3, 4, 0, 2).contiguous().permute(3, 0, 4, 1, 2)


def small_size(large: Tensor, taps: Tensor, stride: int, pad: Pad) -> Size:
    """Height and width of the output of a convolution on `large`."""
    *_, high, wide = large.shape
    _, _, kernel_h, kernel_w, _ = taps.shape
    return (high + 2 * pad[0] - kernel_h) // stride + 1, (wide + 2 * pad[1] - kernel_w) // stride + 1


def in_16_bits(images: Tensor) -> Tensor:
    """`images` as a convolution takes them under autocast; raises RuntimeError if these are not 16 bits."""
    if torch.is_autocast_enabled("cuda") and images.dtype != torch.float64:  # which it does not cast
        images = images.to(torch.get_autocast_dtype("cuda"))
    if images.dtype not in HALF:
        raise RuntimeError(f"found {images.dtype}, expected 16 bits")
    return images
