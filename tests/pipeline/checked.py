"""Cutting a model in one process, in whole modules and verified, as a pipelined run does it."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from plait.pipeline.verify.in_process import Choices, StagedModel
from plait.pipeline.verify.verify_stages import Example, VerifiedStages, prepare_stages
from plait.profiler.trace import trace
from support.hard_models import HARD
from support.traced_models import as_double, tensors_of


def square_loss(output: Any, target: Any) -> Tensor:
    tensors = [t for t in tensors_of(output) if t.is_floating_point()]
    return sum(((t.double() - 0.3) ** 2).mean() for t in tensors)  # type: ignore[return-value]


def make_hard(name: str) -> tuple[nn.Module, tuple[Any, Any], str]:
    """The model, two batches of inputs, and where it is cut."""
    torch.manual_seed(0)
    random.seed(0)
    model, batches, place = HARD[name]
    return model().double(), as_double(batches()), place


def prepare(
    model: nn.Module,
    batches: tuple[Any, Any],
    place: str,
    choices: Choices | None = None,
    verify: bool = True,
) -> VerifiedStages:
    """The model in two stages, cut in front of the layer `place`."""
    first, second = batches
    traced = trace(model, first, others=[second], evaluation=False)
    ids = [layer.id for layer in traced.layers]
    at = ids.index(place) if place in ids else len(ids) // 2
    example = Example([(first, None), (second, None)], square_loss, choices or Choices()) if verify else None

    def retrace(whole: frozenset[str]) -> Any:
        return trace(model, first, others=[second], whole=whole)

    return prepare_stages(traced, (ids[:at], ids[at:]), retrace, example)


def staged(checked: VerifiedStages, choices: Choices | None = None) -> StagedModel:
    return StagedModel(checked.traced, checked.stages, square_loss, choices or Choices())


def plain_step(model: nn.Module, inputs: Any, seed: int) -> list[Tensor]:
    """Outputs of one training step; the gradients stay in the model."""
    model.zero_grad()
    torch.manual_seed(seed)
    output = model(*inputs)
    square_loss(output, None).backward()
    return [t.detach() for t in pytree.tree_leaves(output) if isinstance(t, Tensor)]
