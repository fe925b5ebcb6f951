"""What an evaluation counts, besides the loss."""

from __future__ import annotations

from torch import Tensor


def accuracy(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    """How many targets the largest logit names, and how many targets there are.

    The first is a scalar on the output's device, so that nobody waits for the device to count.
    """
    return (output.argmax(-1) == target).sum(), target.numel()
