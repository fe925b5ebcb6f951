"""Kernels for GPUs, in Triton; only imported where there is a GPU to run them."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def can_run_on(x: Tensor) -> bool:
    """Whether our kernels can compute with `x`: it lies on a GPU, has memory, and Triton is there."""
    return x.is_cuda and not isinstance(x, FakeTensor) and _has_triton()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
