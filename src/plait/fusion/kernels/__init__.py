"""GPU kernels in Triton; imported only if there is a GPU to run them."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

# An activation: the factor for what is negative, or a name.
Slope = float | str
# The types of 16 bits.
HALF = (torch.bfloat16, torch.float16)


def can_run_on(x: Tensor) -> bool:
    """Whether the kernels support `x`: it is a real tensor on a GPU, and Triton is installed."""
    return x.is_cuda and not isinstance(x, FakeTensor) and _has_triton()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def cdiv(size: int, block: int) -> int:
    """How many blocks hold `size` elements; Triton's function takes longer than a kernel of a small model."""
    return -(-size // block)


def power_of_2_from(size: int) -> int:
    """The smallest power of two that is no less."""
    return 1 << max(0, size - 1).bit_length()
