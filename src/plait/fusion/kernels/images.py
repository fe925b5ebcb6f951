"""Helpers of the convolution kernels: images in channels-last format, with the trials in the channels."""

from __future__ import annotations

import torch
from torch import Tensor

Pad = tuple[int, int]


def new_images(like: Tensor, channels: int, size: tuple[int, int], kind: torch.dtype | None = None) -> Tensor:
    """Empty images in channels-last format, with the batch size and device of `like`."""
    shape = (like.shape[0], channels, *size)
    return torch.empty(shape, dtype=kind or like.dtype, device=like.device, memory_format=torch.channels_last)


def small_size(large: Tensor, taps: Tensor, stride: int, pad: Pad) -> tuple[int, int]:
    """Height and width of the output of a convolution on `large`."""
    height, width = (
        (large.shape[2 + axis] + 2 * pad[axis] - taps.shape[2 + axis]) // stride + 1 for axis in range(2)
    )
    return height, width
