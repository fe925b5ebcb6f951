"""Opening a pipeline: the job's model, traced and cut, and the channels between those who hold its stages."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from plait.comm.channels import Channels, connect
from plait.comm.clock import clock_offset
from plait.comm.collectives import broadcast_value
from plait.core.errors import DataError, InputError, JobError
from plait.core.files import write_atomic
from plait.core.run_events import Verified
from plait.data import loader
from plait.data.call_model import as_arguments, explaining_type_errors
from plait.launch.run_dir import RunDir
from plait.launch.worker_process import Worker
from plait.pipeline import executor as pipelines
from plait.pipeline.cutting.check_model import StageError, check_state
from plait.pipeline.cutting.cut import written_buffers_of_replicas
from plait.pipeline.cutting.trace_job import check_target
from plait.pipeline.gradient_sync import find_stages
from plait.pipeline.layout import PipelineLayout
from plait.pipeline.loss_scale import LossScale
from plait.pipeline.named_state import model_state, unsaved_state
from plait.pipeline.verify.in_process import Choices
from plait.pipeline.verify.verify_stages import Example, VerifiedStages, prepare_stages
from plait.planner.schedules.in_flight import Schedule
from plait.profiler.trace import trace
from plait.profiler.traced_model import TracedModel
from plait.schema.settings import TrainSettings
from plait.training.checkpoint import EngineState
from plait.training.checks.replicas import describe_rows, own_buffers
from plait.training.components import Components, build_model
from plait.training.engines.straggler_injection import StragglerInjector
from plait.training.optimizers.build import build_optimizer
from plait.training.optimizers.traits import check_gradients_left, find_traits
from plait.training.run_record import RunRecorder
from plait.training.worker_group import ALONE, WorkerGroup
from plait.verification import same_random_numbers

# How many batches are checked for values that change.
_LOOKS = 8
# The model's and the optimizer's state, by name.
State = tuple[dict[str, Tensor], dict[str, Tensor]]


def trace_components(
    settings: TrainSettings,
    components: Components,
    whole: Collection[str] = (),
    evaluation: bool = True,
) -> TracedModel:
    """The layers of the model, traced with the first few samples; modules in `whole` are one layer each."""
    with same_random_numbers(settings.seed):
        (inputs, target), (others, _) = _examples(settings, components, few=4)
    check_target(target)
    with components.autocast(), explaining_type_errors(components.model, inputs):
        return trace(
            components.model,
            as_arguments(inputs),
            others=[as_arguments(others)],
            whole=whole,
            evaluation=evaluation,
        )


def _examples(settings: TrainSettings, components: Components, few: int) -> list[tuple[Any, Any]]:
    """Two batches of the training split that differ in their samples and, if there are several, in size."""
    few = max(1, min(few, components.train_set.length or few))
    contents = components.train_set.example_batches((few, max(1, few - 1)), settings.seed)
    return [loader.to_device(content, components.device, components.dtype) for content in contents]


def prepare_pipeline(
    settings: TrainSettings, components: Components, pipeline_layout: PipelineLayout, verify: bool
) -> tuple[VerifiedStages, PipelineLayout]:
    """The model traced in whole modules where the layout allows it; its stages are verified if `verify`."""
    traced = trace_components(settings, components, evaluation=False)
    _check_layers(settings, traced, pipeline_layout)
    example = example_of(settings, components, pipeline_layout) if verify else None
    verified = prepare_stages(
        traced,
        pipeline_layout.stages,
        lambda whole: trace_components(settings, components, whole),
        example,
    )
    pipeline_layout = replace(pipeline_layout, stages=verified.stages)
    check_state(verified.traced, pipeline_layout)
    if example is not None:
        _check_values(settings, components, verified.traced)
        names = written_buffers_of_replicas(verified.traced, pipeline_layout)
        local = [name for name in own_buffers(components.model) if name in names]
        if local and (message := describe_rows(components.model, example.batches[0][0], local)):
            raise StageError(message)
    return verified, pipeline_layout


def _check_values(settings: TrainSettings, components: Components, traced: TracedModel) -> None:
    """Check on samples from the whole data set that values which the trace took as constant do not change."""
    source = components.train_set
    if not traced.fixed_values or source.is_stream:
        return
    few, samples = min(4, settings.data.batch_size), len(source)
    with same_random_numbers(settings.seed):
        for begin in range(0, samples, max(few, samples // _LOOKS)):
            numbers = range(begin, min(begin + few, samples))
            traced.order_inputs(as_arguments(source.batch(0, numbers, settings.seed)[0]))


def example_of(settings: TrainSettings, components: Components, pipeline_layout: PipelineLayout) -> Example:
    """Batches of the job for comparing its stages with its whole model."""
    with same_random_numbers(settings.seed):
        batches = _examples(settings, components, few=min(4, settings.data.batch_size))
    choices = Choices(
        components.autocast, pipeline_layout.recompute, pipeline_layout.schedule is Schedule.ZERO_BUBBLE
    )

    def fresh() -> torch.nn.Module:
        model = build_model(settings.model, settings.seed).to(components.device, components.dtype)
        model.load_state_dict(components.model.state_dict())
        return model

    return Example(batches, components.loss, choices, fresh)


def prepare_together(
    worker: Worker,
    settings: TrainSettings,
    components: Components,
    pipeline_layout: PipelineLayout,
    folder: RunDir | None,
) -> tuple[VerifiedStages, PipelineLayout]:
    """As `prepare_pipeline`, verified by rank 0 for all; all workers call it together.

    A run that resumes under the same plan is not verified again, unless the job says `every_run`; the
    verified stages are saved in its folder.
    """
    outcome = _prepare_here(worker, settings, components, pipeline_layout, folder)
    local = outcome.pop("checked")
    if worker.world_size > 1:
        outcome = broadcast_value(outcome, 0)
    if outcome["failure"] is not None:
        raise JobError(outcome["failure"])
    stages = tuple(tuple(ids) for ids in outcome["stages"])
    if local is None or local.fine != stages:
        local, _ = prepare_pipeline(
            settings, components, replace(pipeline_layout, stages=stages), verify=False
        )
    verified = replace(local, notes=tuple(outcome["notes"]), seconds=outcome["seconds"])
    return verified, replace(pipeline_layout, stages=verified.stages)


_NOT_WHOLE = "the stages are not verified: no worker has memory for the whole model"


def _prepare_here(
    worker: Worker,
    settings: TrainSettings,
    components: Components,
    pipeline_layout: PipelineLayout,
    folder: RunDir | None,
) -> dict[str, Any]:
    """The outcome on this worker; all workers use that of rank 0, which verifies and has the run's folder."""
    outcome: dict[str, Any] = {"stages": pipeline_layout.stages, "notes": (), "seconds": 0.0, "failure": None}
    verify = settings.verify.start != "off" and worker.rank == 0
    if verify and components.local_tensors is not None:
        verify, outcome["notes"] = False, (_NOT_WHOLE,)
    if verify and settings.verify.start == "first":
        known = _known_stages(folder, settings, pipeline_layout)
        if known is not None:
            verify, pipeline_layout = False, replace(pipeline_layout, stages=known)
    try:
        verified, _ = prepare_pipeline(settings, components, pipeline_layout, verify)
    except (JobError, DataError) as failure:  # which name the key
        return outcome | {"failure": str(failure), "checked": None}
    except InputError as failure:
        return outcome | {"failure": f"parallel.plan: {failure}", "checked": None}
    if verify and folder is not None:
        _keep_stages(folder, settings, pipeline_layout, verified.fine)
    notes = (*outcome["notes"], *verified.notes)
    outcome |= {"stages": verified.fine, "notes": notes, "seconds": verified.seconds}
    return outcome | {"checked": verified}


def _fingerprint(settings: TrainSettings, pipeline_layout: PipelineLayout) -> Any:
    """What identifies a verification: it holds for these settings only."""
    model = {"factory": settings.model.factory, "args": dict(settings.model.args)}
    values = {
        "model": model,
        "stages": pipeline_layout.stages,
        "recompute": sorted(pipeline_layout.recompute),
        "schedule": pipeline_layout.schedule.value,
        "precision": settings.precision,
        "torch": torch.__version__,
    }
    return json.loads(json.dumps(values, default=str))


def _known_stages(
    folder: RunDir | None, settings: TrainSettings, pipeline_layout: PipelineLayout
) -> tuple[tuple[str, ...], ...] | None:
    """The stages of an earlier verification of this run for the same plan; None if there is none."""
    if folder is None or not folder.verified.exists():
        return None
    try:
        kept = json.loads(folder.verified.read_text())
        if kept["for"] != _fingerprint(settings, pipeline_layout):
            return None
        return tuple(tuple(str(id) for id in ids) for ids in kept["stages"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _keep_stages(
    folder: RunDir, settings: TrainSettings, pipeline_layout: PipelineLayout, stages: Sequence[Sequence[str]]
) -> None:
    kept = {"for": _fingerprint(settings, pipeline_layout), "stages": stages}
    write_atomic(folder.verified, json.dumps(kept))


def link(worker: Worker, pipeline_layout: PipelineLayout, device: torch.device) -> Channels:
    """This worker's channels to the others of `pipeline_layout`; all workers call it together."""
    return connect(worker.rendezvous, pipeline_layout.workers, window=pipeline_layout.window(), device=device)


def _check_layers(settings: TrainSettings, traced: TracedModel, pipeline_layout: PipelineLayout) -> None:
    layers = [layer for ids in pipeline_layout.stages for layer in ids]
    unknown = [layer for layer in layers if layer not in traced.layer_by_id]
    missing = [layer.id for layer in traced.layers if layer.id not in set(layers)]
    if unknown or missing:
        what = f"has layer {unknown[0]!r}" if unknown else f"lacks layer {missing[0]!r}"
        raise JobError(
            f"parallel.plan: the plan is for another model than {settings.model.factory}: it {what}; make "
            f"one for this job with plait profile and plait plan"
        )


def check_optimizer(
    settings: TrainSettings, components: Components, traced: TracedModel, pipeline_layout: PipelineLayout
) -> None:
    """Refuse a custom optimizer whose updates in stages would differ from those on one worker."""
    kind = settings.optimizer.kind
    traits = find_traits(settings.optimizer, dict(components.model.named_parameters()))
    check_gradients_left(kind, traits)
    if traits.couples and len(pipeline_layout.stages) > 1:
        raise JobError(
            f"optimizer.kind: {kind} computes an update from all parameters together (a norm over all, say), "
            f"and a stage has only some; use plan: data-parallel, or, for a limit on the norm, clip_norm, "
            f"which is that of all stages under the schedules that drain"
        )
    if traits.draws and len(pipeline_layout.stages) > 1:
        raise JobError(
            f"optimizer.kind: {kind} draws random numbers for one parameter after the other; a stage, which "
            f"has only some, would draw others than one worker does; use plan: data-parallel"
        )
    tied = any(len(stages) > 1 for stages in find_stages(traced, pipeline_layout).values())
    if traits.counts and not pipeline_layout.schedule.synchronous and (pipeline_layout.shared or tied):
        raise JobError(
            f"optimizer.kind: {kind} counts its updates (in its groups or attributes), and under schedule "
            f"{pipeline_layout.schedule.value} a worker with several stages, or with tied weights, updates "
            f"several times a batch; use schedule flush"
        )


def open_pipeline(
    worker: Worker,
    settings: TrainSettings,
    components: Components,
    traced: TracedModel,
    pipeline_layout: PipelineLayout,
    hosts: Sequence[str],
    group: WorkerGroup = ALONE,
) -> tuple[Channels, pipelines.PipelineExecutor]:
    """This worker's part of a pipeline, with the state of `components`; all workers call it together.

    The workers may be in several pipelines. They are those of `group` if it has links, else the world.
    Tensors that this worker does not need are freed in `components`.
    """
    check_optimizer(settings, components, traced, pipeline_layout)
    links = group.links
    channels = link(worker, pipeline_layout, components.device) if links is None else links.channels
    pipeline = pipelines.PipelineExecutor(
        worker.rank,
        pipeline_layout,
        traced,
        channels,
        pipelines.PipelineParts(
            components.loss,
            lambda parameters: build_optimizer(settings.optimizer, parameters, components.names),
            components.device,
            components.autocast,
            worker.rendezvous,
            settings.clip_norm,
            settings.topology,
            StragglerInjector(settings.slow, worker.rank, settings.seed).slowed,
            loss_scale=LossScale(components.scaler) if components.scaler.is_enabled() else None,
            everyone=group.sums,
            members_of=None if links is None else links.members_of,
        ),
    )
    if links is None:
        pipeline.clock_offset_s = clock_offset(worker.rank, hosts)
    pipeline.take_optimizer_state(components.optimizer)
    held = {name for layer in traced.layers for name in (*layer.parameters, *layer.buffers)}
    _free_other_stages(components, pipeline, held)
    return channels, pipeline


def _free_other_stages(
    components: Components, pipeline: pipelines.PipelineExecutor, everywhere: set[str]
) -> None:
    """Free the memory of tensors that only other workers hold; their names stay."""
    kept = {id(t) for m in pipeline.modules.values() for t in (*m.parameters(), *m.buffers())}
    named = [*components.model.named_parameters(), *components.model.named_buffers()]
    for name, tensor in named:
        if id(tensor) not in kept and name in everywhere:
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    components.optimizer.state.clear()


def gathered(
    components: Components, local: State, group: WorkerGroup, tied: Mapping[str, str]
) -> EngineState | None:
    """The state of the whole model on the first worker of the group, of what each worker has as `local`."""
    model, optimizer = map(group.gather, local)
    if not group.is_first:
        return None
    whole = {**model_state(components.model), **model}
    whole |= {name: whole[first] for name, first in tied.items()}
    unsaved = tuple(unsaved_state(components.optimizer))
    return EngineState(whole, optimizer, unsaved=unsaved, loss_scale=components.scaler.state_dict())


def report_verification(recorder: RunRecorder, verified: VerifiedStages) -> None:
    """Record the result of the verification of a pipeline."""
    for warning in verified.notes:
        recorder.warn(f"verify: {warning}")
    if verified.seconds:
        recorder.verified(Verified(round(verified.seconds, 3), verified.notes))
