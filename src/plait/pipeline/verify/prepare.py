"""Prepares the stages of a model: traced, compared with the model by rank 0, the same on all workers."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import nn

from plait.comm.collectives import broadcast_value
from plait.core.errors import InputError
from plait.pipeline.cutting.check_model import StageError, check_state
from plait.pipeline.cutting.cut import written_buffers_of_replicas
from plait.pipeline.cutting.whole_modules import Stages
from plait.pipeline.executor import PipelineExecutor
from plait.pipeline.layout import PipelineLayout
from plait.pipeline.verify.row_buffers import describe_rows, own_buffers
from plait.pipeline.verify.verify_stages import Example, VerifiedStages, prepare_stages
from plait.profiler.traced_model import TracedModel


class TraceModel(Protocol):
    """Traces the model; modules in `whole` are one layer each. With `evaluation`, also in evaluation mode."""

    def __call__(self, whole: Collection[str] = (), evaluation: bool = True) -> TracedModel: ...


def prepare_layout(
    trace_model: TraceModel,
    pipeline_layout: PipelineLayout,
    example: Example | None,
    name: str,
    check_values: Callable[[TracedModel], None] = lambda traced: None,
) -> VerifiedStages:
    """The stages of a model, in whole modules where the layout allows it; verified if there is an `example`.

    `name` is that of the model in messages. `check_values` is called with the trace of verified stages.
    Raises StageError.
    """
    traced = trace_model(evaluation=False)
    _check_layers(name, traced, pipeline_layout)
    verified = prepare_stages(traced, pipeline_layout.stages, trace_model, example)
    pipeline_layout = replace(pipeline_layout, stages=verified.stages)
    check_state(verified.traced, pipeline_layout)
    if example is not None:
        check_values(verified.traced)
        names = written_buffers_of_replicas(verified.traced, pipeline_layout)
        local = [name for name in own_buffers(verified.traced.model) if name in names]
        if local and (why := describe_rows(verified.traced.model, example.batches[0][0], local)):
            raise StageError(why)
    return verified


def _check_layers(name: str, traced: TracedModel, pipeline_layout: PipelineLayout) -> None:
    layers = [layer for ids in pipeline_layout.stages for layer in ids]
    unknown = [layer for layer in layers if layer not in traced.layer_by_id]
    missing = [layer.id for layer in traced.layers if layer.id not in set(layers)]
    if unknown or missing:
        what = f"has layer {unknown[0]!r}" if unknown else f"lacks layer {missing[0]!r}"
        raise StageError(
            f"the plan is for another model than {name}: it {what}; make one for this model with plait "
            f"profile and plait plan"
        )


def prepare_together(
    rank: int,
    world_size: int,
    prepare_first: Callable[[], VerifiedStages],
    prepare_again: Callable[[Stages | None], VerifiedStages],
) -> VerifiedStages:
    """The stages as rank 0 has prepared them, which may have changed them; all workers call it together.

    Rank 0 calls `prepare_first`, the others `prepare_again`, with the stages in layers of the plan if they
    are not those of the layout. If rank 0 refuses the stages, InputError is raised on all workers.
    """
    outcome: dict[str, Any] = {"failure": None}
    local = None
    try:
        local = prepare_first() if rank == 0 else prepare_again(None)
        outcome |= {"fine": local.fine, "notes": local.notes, "seconds": local.seconds}
    except InputError as failure:
        outcome["failure"] = str(failure)
    if world_size > 1:
        outcome = broadcast_value(outcome, 0)
    if outcome["failure"] is not None:
        raise InputError(outcome["failure"])
    fine = tuple(tuple(ids) for ids in outcome["fine"])
    if local is None or local.fine != fine:
        local = prepare_again(fine)
    return replace(local, notes=tuple(outcome["notes"]), seconds=outcome["seconds"])


def free_other_stages(model: nn.Module, pipeline: PipelineExecutor, traced: TracedModel) -> None:
    """Free the memory of the model's tensors that only other workers hold; their names stay."""
    in_stages = {name for layer in traced.layers for name in (*layer.parameters, *layer.buffers)}
    kept = {id(t) for m in pipeline.modules.values() for t in (*m.parameters(), *m.buffers())}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if id(tensor) not in kept and name in in_stages:
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
