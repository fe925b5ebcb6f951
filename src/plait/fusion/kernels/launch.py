"""Triton, and launches of its kernels with the same numbers as before.

Triton looks at all arguments of each launch to find the compiled kernel, and calls hooks: on the host that
takes longer than a small kernel runs. Here a kernel is found by the few things that may differ.
"""
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["TensorDescriptor", "launch", "tl", "triton"]

# Triton compiles another kernel for addresses that are no multiple of this many bytes.
_ALIGNED_BYTES = 16
# More launches than a model has; beyond them they are found again.
_MOST_READY = 16_384

Grid = tuple[int, ...] | Callable[[dict[str, Any]], tuple[int, ...]]


class _NoTriton:
    """What kernels are decorated with where Triton is not installed."""

    def jit(self, function: Callable[..., Any] | None = None, **options: Any) -> Callable[..., Any]:
        return function or self.jit

    def autotune(self, *args: Any, **options: Any) -> Callable[..., Any]:
        return self.jit

    def Config(self, *args: Any, **options: Any) -> None:
        """As Triton's class."""


try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:
    # Modules of kernels can be imported, but no kernel runs.
    triton, tl, TensorDescriptor = _NoTriton(), None, object


class _Ready(NamedTuple):
    """A compiled kernel, loaded to a device, and how it is launched."""

    run: Callable[..., Any]
    grid: tuple[int, ...]
    function: Any
    metadata: Any
    numbers: tuple[Any, ...]


_ready: dict[tuple[Any, ...], _Ready] = {}
_address_of, _dtype_of = Tensor.data_ptr, attrgetter("dtype")


def launch(
    kernel: Any, grid: Grid, tensors: tuple[Any, ...], numbers: tuple[Any, ...], **options: Any
) -> None:
    """Launch a kernel whose parameters are tensors, numbers, and those that the options name.

    A tensor may be None, a tensor descriptor, or a tuple of tensors. Numbers must be of the same type in each
    launch of a kernel. The grid of a kernel whose options Triton measures is a function of these, and
    otherwise of the numbers alone.
    """
    device = torch.cuda.current_device()
    known: list[Any] = [id(kernel), device, None if callable(grid) else grid, numbers, *options.values()]
    given: list[Any] = []
    for each in tensors:
        if isinstance(each, Tensor):
            address = each.data_ptr()
            known.append(each.dtype if address % _ALIGNED_BYTES == 0 else (each.dtype,))
            given.append(address)
        elif isinstance(each, tuple):
            addresses = tuple(map(_address_of, each))
            known += map(_dtype_of, each)
            known.append(tuple([address % _ALIGNED_BYTES == 0 for address in addresses]))
            given.append(addresses)
        else:
            known.append(None if each is None else each.base.dtype)
            given.append(each)
    key = tuple(known)
    ready = _ready.get(key)
    if ready is None:
        compiled = kernel[grid](*tensors, *numbers, **options)
        if compiled is None:  # as by Triton's interpreter
            return
        if len(_ready) == _MOST_READY:
            _ready.clear()
        if callable(grid):
            options = kernel.best_config.kwargs
            grid = grid(options)
        named = [options[name] for name in kernel.arg_names[len(tensors) + len(numbers) :]]
        sizes = (*grid, 1, 1)[:3]
        whole = (*numbers, *named)
        _ready[key] = _Ready(compiled.run, sizes, compiled.function, compiled.packed_metadata, whole)
        return
    stream = torch._C._cuda_getCurrentRawStream(device)
    run, sizes, function, metadata, numbers = ready
    run(*sizes, stream, function, metadata, None, None, None, *given, *numbers)
