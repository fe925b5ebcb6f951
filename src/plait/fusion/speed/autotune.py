"""Selects the fastest implementation of an operation by measuring: once for each shape, then cached."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Way = Callable[..., Tensor]

# Keyed by operation, shapes, layout, dtype, device, threads, and whether gradients are needed.
_CHOSEN: dict[tuple[Any, ...], str] = {}

_REPEATS = 3
# Some milliseconds on a GPU.
_HEAD_START_CYCLES = 5_000_000


def choose(operation: str, ways: Mapping[str, Way], *operands: Tensor | None) -> Tensor:
    """The result of the fastest of `ways` for these shapes, forward and backward together.

    All ways compute the same function. The first call for a shape measures each on copies of its operands.
    During the capture of a CUDA graph nothing can be measured, so an unknown shape uses the first way that
    works.
    """
    key = _key(operation, operands)
    name = _CHOSEN.get(key)
    if name is None:
        if not _can_measure(operands[0]):
            return _first_that_works(ways, operands)
        name = _CHOSEN[key] = _measure(ways, operands)
    return ways[name](*operands)


def _first_that_works(ways: Mapping[str, Way], operands: tuple[Tensor | None, ...]) -> Tensor:
    *others, last = ways.values()
    for way in others:
        try:
            return way(*operands)
        except RuntimeError:  # a way may not support a dtype or device
            continue
    return last(*operands)


def _key(operation: str, operands: tuple[Tensor | None, ...]) -> tuple[Any, ...]:
    described = tuple(
        None if x is None else (tuple(x.shape), x.stride(), x.dtype, x.device, x.requires_grad)
        for x in operands
    )
    device = operands[0].device.type if operands[0] is not None else "cpu"
    cast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return (operation, described, cast, torch.get_num_threads(), torch.is_grad_enabled())


def _can_measure(x: Tensor | None) -> bool:
    """Whether `x` is a real tensor, and no CUDA graph is being captured."""
    if type(x) not in (Tensor, torch.nn.Parameter):
        return False
    return not (x is not None and x.is_cuda and torch.cuda.is_current_stream_capturing())


def _measure(ways: Mapping[str, Way], operands: tuple[Tensor | None, ...]) -> str:
    copies = [None if x is None else _copy(x) for x in operands]
    # The measurement is not part of the model: an enclosing checkpoint must not save its tensors.
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        return _fastest(ways, copies)


def _fastest(ways: Mapping[str, Way], copies: list[Tensor | None]) -> str:
    times: dict[str, float] = {}
    seconds = _gpu_seconds if copies[0] is not None and copies[0].is_cuda else _seconds
    for name, way in ways.items():
        try:
            times[name] = min(seconds(way, copies) for _ in range(_REPEATS))
        except RuntimeError:  # a way may not support a dtype or device, or need too much memory
            continue
    return min(times, key=lambda name: times[name]) if times else next(iter(ways))


def _copy(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_(x.requires_grad)


def _seconds(way: Way, operands: list[Tensor | None]) -> float:
    start = time.perf_counter()
    _forward_and_backward(way, operands)
    return time.perf_counter() - start


def _gpu_seconds(way: Way, operands: list[Tensor | None]) -> float:
    """The time on the GPU, without launch overhead, which a captured step does not have."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # While the GPU sleeps, the host queues the kernels.
    torch.cuda._sleep(_HEAD_START_CYCLES)
    start.record()
    _forward_and_backward(way, operands)
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def _forward_and_backward(way: Way, operands: list[Tensor | None]) -> None:
    outcome = way(*operands)
    if outcome.requires_grad:
        inputs = [x for x in operands if x is not None and x.requires_grad]
        torch.autograd.grad(outcome, inputs, torch.ones_like(outcome))
