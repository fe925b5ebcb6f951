"""Layers that sleep: they cost time but no processor, so that many workers fit on few cores."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from plait.pipeline.split_backward import jobs_of_this_forward


class Sleep(torch.autograd.Function):
    """The input as it is, after a while; so is its gradient. The weight gets `gradient`.

    Where backward is taken in two halves, `weight_s` are those of the second. Once the file `slow` is there,
    the worker whose rank it names takes as many times longer as it says.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        forward_s: float,
        backward_s: float = 0.0,
        weight_s: float = 0.0,
        slow: str = "",
        gradient: Tensor | None = None,
    ) -> Tensor:
        ctx.backward_s, ctx.weight_s, ctx.slow, ctx.gradient = backward_s, weight_s, slow, gradient
        ctx.jobs = jobs_of_this_forward()
        _sleep(forward_s, slow)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        _sleep(ctx.backward_s, ctx.slow)
        if ctx.jobs is None:
            _sleep(ctx.weight_s, ctx.slow)
        elif ctx.weight_s:
            seconds, slow = ctx.weight_s, ctx.slow
            ctx.jobs.append(lambda: _sleep(seconds, slow))
        return grads[0], ctx.gradient, *[None] * 5


def _sleep(seconds: float, slow: str) -> None:
    if slow and dist.is_initialized() and os.path.exists(slow):
        rank, times = Path(slow).read_text().split()
        seconds *= float(times) if dist.get_rank() == int(rank) else 1.0
    if seconds:
        time.sleep(seconds)


class Sleeping(nn.Module):
    """`layer`, or nothing, and then a sleep, in training."""

    def __init__(
        self,
        layer: nn.Module | None,
        forward_s: float = 0.0,
        backward_s: float = 0.0,
        weight_s: float = 0.0,
        slow: str = "",
    ) -> None:
        super().__init__()
        self.layer = layer
        self.weight = nn.Parameter(torch.ones(1)) if layer is None else None
        self._seconds = forward_s, backward_s, weight_s, slow

    def forward_s(self, x: Tensor) -> float:
        return self._seconds[0]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x if self.layer is None else self.layer(x)
        if self.training:
            y = Sleep.apply(y, self.weight, self.forward_s(x), *self._seconds[1:])  # type: ignore[no-untyped-call]
        return y
