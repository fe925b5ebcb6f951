"""Which of several ways computes an operation fastest here: measured once for each shape, then remembered."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Way = Callable[..., Tensor]

# Keyed by what decides speed: operation, shapes, layout, type, device, threads, whether a gradient follows.
_CHOSEN: dict[tuple[Any, ...], str] = {}

_REPEATS = 3
# Some milliseconds on a GPU.
_HEAD_START_CYCLES = 5_000_000


def choose(operation: str, ways: Mapping[str, Way], *operands: Tensor | None) -> Tensor:
    """The outcome of the way that was fastest for these shapes, forward and backward together.

    All ways compute the same function. The first call for a shape measures each on copies of its operands;
    during a CUDA graph's capture, where nothing can be measured, an unknown shape takes the first way that
    there is.
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
        except RuntimeError:  # a way may not exist for a type or device
            continue
    return last(*operands)


def chosen() -> dict[tuple[Any, ...], str]:
    """What was measured so far: the way taken for each key."""
    return dict(_CHOSEN)


def _key(operation: str, operands: tuple[Tensor | None, ...]) -> tuple[Any, ...]:
    described = tuple(
        None if x is None else (tuple(x.shape), x.stride(), x.dtype, x.device, x.requires_grad)
        for x in operands
    )
    device = operands[0].device.type if operands[0] is not None else "cpu"
    cast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return (operation, described, cast, torch.get_num_threads(), torch.is_grad_enabled())


def _can_measure(x: Tensor | None) -> bool:
    """Fake and proxy tensors have shapes but no time, and nothing can be timed inside a graph's capture."""
    if type(x) not in (Tensor, torch.nn.Parameter):
        return False
    return not (x is not None and x.is_cuda and torch.cuda.is_current_stream_capturing())


def _measure(ways: Mapping[str, Way], operands: tuple[Tensor | None, ...]) -> str:
    copies = [None if x is None else _copy(x) for x in operands]
    # What is measured is no part of the model: a checkpoint around it must not keep it.
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        return _fastest(ways, copies)


def _fastest(ways: Mapping[str, Way], copies: list[Tensor | None]) -> str:
    times: dict[str, float] = {}
    seconds = _gpu_seconds if copies[0] is not None and copies[0].is_cuda else _seconds
    for name, way in ways.items():
        try:
            times[name] = min(seconds(way, copies) for _ in range(_REPEATS))
        except RuntimeError:  # a way may not exist for a type or device, or need more memory than there is
            continue
    return min(times, key=lambda name: times[name]) if times else next(iter(ways))


def _copy(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_(x.requires_grad)


def _seconds(way: Way, operands: list[Tensor | None]) -> float:
    start = time.perf_counter()
    _forward_and_backward(way, operands)
    return time.perf_counter() - start


def _gpu_seconds(way: Way, operands: list[Tensor | None]) -> float:
    """What the GPU takes, whatever the host takes to ask for it: that falls away when a step is captured."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # While the GPU sleeps, the host gets ahead of it.
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
