"""Gradients clipped to a norm: that of one stage, or that of the whole model over all of its workers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter


def clip_stage(parameters: Sequence[Parameter], max_norm: float) -> None:
    """Clip the gradients of `parameters` to `max_norm`, without regard to other parameters."""
    squares = [p.grad.double().square().sum() for p in parameters if p.grad is not None]
    if squares:
        _scale_down(parameters, max_norm, float(torch.stack(squares).sum().sqrt()))


def clip_model(
    parameters: Iterable[Parameter],
    counted: Iterable[Parameter],
    max_norm: float,
    device: torch.device,
    everyone: dist.ProcessGroup | None,
) -> None:
    """Clip the gradients of `parameters` to `max_norm` of the whole model; all workers call it together.

    `counted` are the parameters that no other worker of the process group `everyone` counts.
    """
    squares = torch.zeros((), dtype=torch.float64, device=device)
    for parameter in counted:
        if parameter.grad is not None:
            squares += parameter.grad.double().square().sum()
    dist.all_reduce(squares, group=everyone)
    _scale_down(parameters, max_norm, float(squares.sqrt()))


def _scale_down(parameters: Iterable[Parameter], max_norm: float, norm: float) -> None:
    factor = max_norm / (norm + 1e-6)
    grads: list[Tensor] = [p.grad for p in parameters if p.grad is not None]
    if factor < 1 and grads:
        torch._foreach_mul_(grads, factor)
