"""Helpers of the fusion tests: a fused array, and the same trials each alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import plait.fusion
from plait.fusion import FusedModule


def fuse(models: Sequence[nn.Module], seeds: Sequence[int] | None = None, **options: Any) -> FusedModule:
    """Most tests compare with lone models themselves, and see what fusion does before anything is mended."""
    if seeds is None and isinstance(models, list):
        seeds = range(len(models))
    return plait.fusion.fuse(models, seeds, **{"verify": False, **options})


CLOSE = {"rtol": 1e-10, "atol": 1e-10}


def make_models(make: Callable[[], nn.Module], count: int = 3, seed: int = 0) -> list[nn.Module]:
    torch.manual_seed(seed)
    return [make().double() for _ in range(count)]


def alone(models: Sequence[nn.Module], **options: Any) -> list[FusedModule]:
    """Each trial in an array of its own, with the seed it has in the common one."""
    return [fuse([model], seeds=[number], **options) for number, model in enumerate(models)]


def total(outcome: Any) -> Tensor:
    """Something to differentiate: a fixed weighting of all floats that a model returned."""
    tensors = _flat(outcome)
    floats = [t for t in tensors if t.is_floating_point()]
    return sum((t * torch.linspace(0.5, 1.5, t.numel(), dtype=t.dtype).view(t.shape)).sum() for t in floats)


def _flat(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    return [t for value in values for t in _flat(value)] if isinstance(values, (tuple, list)) else []


def assert_equals_lone_models(
    models: Sequence[nn.Module], inputs: Sequence[tuple[Tensor, ...]], training: bool = True, **options: Any
) -> None:
    """Outputs, gradients of weights and of inputs, and buffers equal those of the plain models."""
    fused = fuse(models, **options).train(training)
    stacked = [torch.stack(parts) for parts in zip(*inputs)]
    stacked = [x.requires_grad_() if x.is_floating_point() else x for x in stacked]
    outputs = fused(*stacked)
    sum(total(_trial(outputs, k)) for k in range(len(models))).backward()
    for number, (model, own) in enumerate(zip(models, inputs)):
        model.train(training)
        own = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in own]
        expected = model(*own)
        total(expected).backward()
        for found, wanted in zip(_flat(_trial(outputs, number)), _flat(expected)):
            torch.testing.assert_close(found, wanted, **CLOSE)
        for (name, parameter), lone in zip(fused.module.named_parameters(), model.parameters()):
            wanted = torch.zeros_like(lone) if lone.grad is None else lone.grad
            found = torch.zeros_like(lone) if parameter.grad is None else parameter.grad[number]
            torch.testing.assert_close(found, wanted, msg=lambda m, n=name: f"{n}: {m}", **CLOSE)
        for given, lone in zip(stacked, own):
            if lone.grad is not None:
                torch.testing.assert_close(given.grad[number], lone.grad, **CLOSE)
        for (name, found), (_, wanted) in zip(fused.trial(number).named_buffers(), model.named_buffers()):
            torch.testing.assert_close(found, wanted, msg=lambda m, n=name: f"{n}: {m}", **CLOSE)


def _trial(outputs: Any, number: int) -> Any:
    if isinstance(outputs, Tensor):
        return outputs[number]
    return tuple(_trial(part, number) for part in outputs)
