"""Sums for a batch norm, which the convolution before it has made: else the norm reads its input once more.

Whether a norm follows a convolution is known after the first step.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from plait.fusion.kernels.images import TileSums

# Weights of convolutions whose outputs a batch norm has read.
_before_norms: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
# Attribute of an output: the weight, the sums, and the version of the output that they are of.
_MADE_BY = "plait_made_by"


def wanted_sums(weight: Tensor) -> list[TileSums] | None:
    """A list for the sums of a convolution's output; None if no norm reads that."""
    return [] if weight in _before_norms else None


def note_output(output: Tensor, weight: Tensor, sums: list[TileSums] | None) -> Tensor:
    """Let a batch norm of `output` find the sums."""
    if not output.is_inference():  # which has no version
        setattr(output, _MADE_BY, (weight, sums, output._version))
    return output


def sums_of(output: Tensor) -> TileSums | None:
    """The sums of a convolution's output for a batch norm, if there are any; from now on there will be."""
    made: Any = getattr(output, _MADE_BY, None)
    if made is None:
        return None
    weight, sums, version = made
    _before_norms[weight] = True
    return sums[0] if sums and output._version == version else None
