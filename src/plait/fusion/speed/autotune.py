"""Selects the fastest implementation of an operation by measuring: once for each shape, then cached.

Choices on a GPU are kept on disk, too (`choice_cache`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from plait.fusion.speed.choice_cache import choices_on

Way = Callable[..., Tensor]

# Keyed by operation, shapes, layout, dtype, device, threads, and whether gradients are needed.
_CHOSEN: dict[tuple[Any, ...], str] = {}

# The most rounds after the first, which warms up; no third one after this many seconds.
_MOST_ROUNDS = 8
_ENOUGH_S = 0.2
# Times have settled if a round brings none below this share of the shortest before.
_SETTLED = 0.98
_CLEARLY_FASTER = 0.97
# Some milliseconds on a GPU.
_HEAD_START_CYCLES = 5_000_000


def choose(operation: str, ways: Mapping[str, Way], *operands: Tensor | None) -> Tensor:
    """The result of the fastest of `ways` for these shapes, forward and backward together.

    All ways compute the same function. The first call for a shape measures each on copies of its operands;
    the first way is preferred if another is only a little faster. During the capture of a CUDA graph nothing
    can be measured, so an unknown shape uses the first way that works.
    """
    name = chosen(operation, ways, *operands)
    return _first_that_works(ways, operands) if name is None else ways[name](*operands)


def chosen(operation: str, ways: Mapping[str, Way], *operands: Tensor | None) -> str | None:
    """The name of the way that `choose` takes; None if it is unknown and cannot be measured now."""
    key = _key(operation, operands)
    name = _CHOSEN.get(key)
    if name is None and _can_measure(operands[0]):
        name = _CHOSEN[key] = _kept_or_measured(key, ways, operands)
    return name


def _kept_or_measured(
    key: tuple[Any, ...], ways: Mapping[str, Way], operands: tuple[Tensor | None, ...]
) -> str:
    first = operands[0]
    kept = None if first is None else choices_on(first.device)
    if kept is None:
        return measure(ways, operands)
    text = _text(key)
    name = kept.get(text)
    if name is None or name not in ways:  # another version may have had other ways
        name = measure(ways, operands)
        kept.keep(text, name)
    return name


def _text(key: tuple[Any, ...]) -> str:
    """A key without what another process may have otherwise: the number of the device, the threads."""
    operation, described, cast, _, grad = key
    operands = [x and (tuple(x[0]), x[1], str(x[2]), x[4]) for x in described]
    return f"{operation} of {operands} cast {cast} grad {grad}"


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
        [None if x is None else (x.shape, x.stride(), x.dtype, x.device, x.requires_grad) for x in operands]
    )
    device = operands[0].device.type if operands[0] is not None else "cpu"
    cast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return (operation, described, cast, torch.get_num_threads(), torch.is_grad_enabled())


def _can_measure(x: Tensor | None) -> bool:
    """Whether `x` is a real tensor, and no CUDA graph is being captured."""
    if type(x) not in (Tensor, torch.nn.Parameter):
        return False
    return not (x is not None and x.is_cuda and torch.cuda.is_current_stream_capturing())


def measure(ways: Mapping[str, Way], operands: tuple[Tensor | None, ...]) -> str:
    copies = [None if x is None else _copy(x) for x in operands]
    # The measurement is not part of the model: an enclosing checkpoint must not save its tensors.
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        return _fastest(ways, copies)


def _fastest(ways: Mapping[str, Way], copies: list[Tensor | None]) -> str:
    """The name of the fastest way, or of the first that works if none is clearly faster.

    A device that was idle may run faster from run to run, so each round times all ways in turn, until their
    times no longer fall.
    """
    times = dict.fromkeys(ways, math.inf)
    seconds = _gpu_seconds if copies[0] is not None and copies[0].is_cuda else _seconds
    spent_s = 0.0
    for number in range(1 + _MOST_ROUNDS):
        before = dict(times)
        for name in before:
            try:
                taken_s = seconds(ways[name], copies)
            except RuntimeError:  # a way may not support a dtype or device, or need too much memory
                del times[name]
                continue
            if number:  # the first run may compile kernels
                times[name] = min(times[name], taken_s)
                spent_s += taken_s
        has_settled = all(time_s > _SETTLED * before[name] for name, time_s in times.items())
        if len(times) < 2 or has_settled or (number > 1 and spent_s > _ENOUGH_S):
            break
    default = next(iter(times or ways))
    best = min(times, key=times.__getitem__, default=default)
    return best if times and times[best] < _CLEARLY_FASTER * times[default] else default


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
