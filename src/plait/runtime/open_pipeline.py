"""Opening a pipeline: the job's model, traced and cut, and the channels between those who hold its stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from plait.cluster.channels import Channels, connect
from plait.cluster.clock import clock_offset
from plait.cluster.worker import Worker
from plait.core.errors import JobError
from plait.profiler.traced import TracedModel
from plait.runtime import loading
from plait.runtime import pipeline as pipelines
from plait.runtime.arrangement import Arrangement
from plait.runtime.build import Parts
from plait.runtime.checkpoint import Checkpoint
from plait.runtime.evaluate import as_arguments
from plait.runtime.loss_scale import LossScale
from plait.runtime.optim import build_optimizer
from plait.runtime.settings import TrainSettings
from plait.runtime.slow import SlowDown
from plait.runtime.tracing import check_target, trace_inputs

# The model's and the optimizer's state, by name.
State = tuple[dict[str, Tensor], dict[str, Tensor]]


def trace_parts(settings: TrainSettings, parts: Parts) -> TracedModel:
    """The model as layers, found with the first few samples."""
    few = min(4, parts.train_set.length or 4)
    content = parts.train_set.first_batch(few, settings.seed)
    inputs, target = loading.to_device(content, parts.device, parts.dtype)
    check_target(target)
    with parts.autocast():
        return trace_inputs(parts.model, as_arguments(inputs))


def link(worker: Worker, arrangement: Arrangement, device: torch.device) -> Channels:
    """This worker's channels to the others of `arrangement`; all workers call it together."""
    return connect(worker.rendezvous, arrangement.workers, window=arrangement.window(), device=device)


def _check_layers(settings: TrainSettings, traced: TracedModel, arrangement: Arrangement) -> None:
    layers = [layer for ids in arrangement.stages for layer in ids]
    unknown = [layer for layer in layers if layer not in traced.layer_by_id]
    missing = [layer.id for layer in traced.layers if layer.id not in set(layers)]
    if unknown or missing:
        what = f"has layer {unknown[0]!r}" if unknown else f"lacks layer {missing[0]!r}"
        raise JobError(
            f"parallel.plan: the plan is for another model than {settings.model.factory}: it {what}; make "
            f"one for this job with plait profile and plait plan"
        )


def open_pipeline(
    worker: Worker,
    settings: TrainSettings,
    parts: Parts,
    traced: TracedModel,
    arrangement: Arrangement,
    hosts: Sequence[str],
) -> tuple[Channels, pipelines.Pipeline]:
    """This worker's part of `arrangement`, with the state that `parts` have; all workers call it together.

    The workers of the world may be in several arrangements of their own. `parts` keep what this one holds.
    """
    _check_layers(settings, traced, arrangement)
    channels = link(worker, arrangement, parts.device)
    pipeline = pipelines.Pipeline(
        worker.rank,
        arrangement,
        traced,
        channels,
        pipelines.Parts(
            parts.loss,
            lambda parameters: build_optimizer(settings.optimizer, parameters, parts.names),
            parts.device,
            parts.autocast,
            worker.rendezvous,
            settings.clip_norm,
            settings.topology,
            SlowDown(settings.slow, worker.rank, settings.seed).slowed,
            loss_scale=LossScale(parts.scaler) if parts.scaler.is_enabled() else None,
        ),
    )
    pipeline.clock_offset_s = clock_offset(worker.rank, hosts)
    pipeline.take_optimizer_state(parts.optimizer)
    held = {name for layer in traced.layers for name in (*layer.parameters, *layer.buffers)}
    _let_go(parts, pipeline, held)
    return channels, pipeline


def _let_go(parts: Parts, pipeline: pipelines.Pipeline, everywhere: set[str]) -> None:
    """Free the memory of what only other workers hold; their names stay."""
    kept = {id(t) for m in pipeline.modules.values() for t in (*m.parameters(), *m.buffers())}
    named = [*parts.model.named_parameters(), *parts.model.named_buffers()]
    for name, tensor in named:
        if id(tensor) not in kept and name in everywhere:
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    parts.optimizer.state.clear()


def with_gathered(state: Checkpoint, gathered: State, tied: Mapping[str, str]) -> Checkpoint:
    """`state` with the model's and the optimizer's state as gathered from all stages, if it has been."""
    model, optimizer = gathered
    if not model:
        return state
    whole = {**state.model, **model}
    whole |= {name: whole[first] for name, first in tied.items()}
    return replace(state, model=whole, optimizer=optimizer)


def further_names(model: torch.nn.Module) -> dict[str, str]:
    """The further names of tied parameters, with the first."""
    first: dict[int, str] = {}
    further: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in first:
            further[name] = first[id(parameter)]
        first.setdefault(id(parameter), name)
    return further
