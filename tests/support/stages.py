"""Models cut in two within one process, compared with themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from plait.data.calling import as_arguments
from plait.pipeline.cutting.cut import StageModule, check_buffers, check_stages, cut
from plait.pipeline.verify.stages import Example, Parting, find_parting
from plait.profiler.trace import trace
from plait.profiler.traced import TracedModel

Loss = Callable[[Any, Any], Tensor]


def cut_all(traced: TracedModel, stages: Sequence[Sequence[str]]) -> tuple[StageModule, ...]:
    """All stages, checked: every layer is in exactly one, and values flow only to later stages."""
    check_stages(traced, stages)
    check_buffers(traced, stages)
    return tuple(cut(traced, ids) for ids in stages)


def stages_part(
    model: nn.Module, batches: list[tuple[Any, Any]], loss: Loss, traced: TracedModel | None = None
) -> Parting | None:
    """Where two stages of half the layers each part from the plain model, in training or evaluation mode."""
    first, second = (as_arguments(inputs) for inputs, _ in batches)
    traced = traced or trace(model, first, others=[second])
    ids = [layer.id for layer in traced.layers]
    stages = [tuple(ids[: len(ids) // 2]), tuple(ids[len(ids) // 2 :])]
    check_buffers(traced, stages)
    return find_parting(traced, stages, Example(batches, loss))
