"""Opening a pipeline: the job's model, traced and cut, and the channels between those who hold its stages."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from plait.comm.channels import Channels, connect
from plait.comm.clock import clock_offset
from plait.core.errors import DataError, InputError, JobError
from plait.core.files import write_atomic
from plait.core.run_events import Verified
from plait.data import loader
from plait.data.call_model import as_arguments, explaining_type_errors
from plait.launcher.run_dir import RunDir
from plait.launcher.worker_process import Worker
from plait.pipeline.cutting.trace_job import check_target
from plait.pipeline.cutting.whole_modules import Stages
from plait.pipeline.executor import PipelineExecutor
from plait.pipeline.layout import PipelineLayout
from plait.pipeline.named_state import unsaved_state, whole_state
from plait.pipeline.pipeline_parts import PipelineParts
from plait.pipeline.updates.loss_scale import LossScale
from plait.pipeline.verify.in_process import Choices
from plait.pipeline.verify.optimizer_traits import objection_in_stages
from plait.pipeline.verify.prepare import free_other_stages, prepare_layout, prepare_together
from plait.pipeline.verify.verify_stages import Example, VerifiedStages
from plait.planner.schedules.in_flight import Schedule
from plait.profiler.trace import trace
from plait.profiler.traced_model import TracedModel
from plait.schema.settings import TrainSettings
from plait.training.checkpoint import EngineState
from plait.training.components import Components
from plait.training.engines.straggler_injection import StragglerInjector
from plait.training.optimizers.build import build_optimizer
from plait.training.optimizers.traits import traits_of
from plait.training.run_record import RunRecorder
from plait.training.setup.model import build_model
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
    verified = prepare_layout(
        partial(trace_components, settings, components),
        pipeline_layout,
        example_of(settings, components, pipeline_layout) if verify else None,
        settings.model.factory,
        partial(_check_values, settings, components),
    )
    return verified, replace(pipeline_layout, stages=verified.stages)


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


def prepare_job(
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

    def prepare_again(stages: Stages | None) -> VerifiedStages:
        layout = pipeline_layout if stages is None else replace(pipeline_layout, stages=stages)
        return prepare_pipeline(settings, components, layout, verify=False)[0]

    def prepare_first() -> VerifiedStages:
        try:
            return _prepare_first(settings, components, pipeline_layout, folder)
        except (JobError, DataError):  # which name the key
            raise
        except InputError as failure:
            raise JobError(f"parallel.plan: {failure}") from None

    try:
        verified = prepare_together(worker.rank, worker.world_size, prepare_first, prepare_again)
    except InputError as failure:
        raise JobError(str(failure)) from None
    return verified, replace(pipeline_layout, stages=verified.stages)


_NOT_WHOLE = "the stages are not verified: no worker has memory for the whole model"


def _prepare_first(
    settings: TrainSettings, components: Components, pipeline_layout: PipelineLayout, folder: RunDir | None
) -> VerifiedStages:
    """The stages on rank 0, which verifies and has the run's folder."""
    verify = settings.verify.start != "off"
    if verify and components.local_tensors is not None:
        verified, _ = prepare_pipeline(settings, components, pipeline_layout, verify=False)
        return replace(verified, notes=(_NOT_WHOLE, *verified.notes))
    if verify and settings.verify.start == "first":
        known = _known_stages(folder, settings, pipeline_layout)
        if known is not None:
            verify, pipeline_layout = False, replace(pipeline_layout, stages=known)
    verified, _ = prepare_pipeline(settings, components, pipeline_layout, verify)
    if verify and folder is not None:
        _keep_stages(folder, settings, pipeline_layout, verified.fine)
    return verified


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


def check_optimizer(
    settings: TrainSettings, components: Components, traced: TracedModel, pipeline_layout: PipelineLayout
) -> None:
    """Refuse a custom optimizer whose updates in stages would differ from those on one worker."""
    traits = traits_of(settings.optimizer, dict(components.model.named_parameters()))
    if why := objection_in_stages(settings.optimizer.kind, traits, traced, pipeline_layout):
        raise JobError(f"optimizer.kind: {why}")


def open_pipeline(
    worker: Worker,
    settings: TrainSettings,
    components: Components,
    traced: TracedModel,
    pipeline_layout: PipelineLayout,
    hosts: Sequence[str],
    group: WorkerGroup = ALONE,
) -> tuple[Channels, PipelineExecutor]:
    """This worker's part of a pipeline, with the state of `components`; all workers call it together.

    The workers may be in several pipelines. They are those of `group` if it has links, else the world.
    Tensors that this worker does not need are freed in `components`.
    """
    check_optimizer(settings, components, traced, pipeline_layout)
    links = group.links
    channels = link(worker, pipeline_layout, components.device) if links is None else links.channels
    pipeline = PipelineExecutor(
        worker.rank,
        pipeline_layout,
        traced,
        channels,
        PipelineParts(
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
            compile=settings.compile,
        ),
    )
    if links is None:
        pipeline.clock_offset_s = clock_offset(worker.rank, hosts)
    pipeline.take_optimizer_state(components.optimizer)
    free_other_stages(components.model, pipeline, traced)
    components.optimizer.state.clear()
    return channels, pipeline


def gathered(
    components: Components, local: State, group: WorkerGroup, tied: Mapping[str, str]
) -> EngineState | None:
    """The state of the whole model on the first worker of the group, of what each worker has as `local`."""
    model, optimizer = map(group.gather, local)
    if not group.is_first:
        return None
    whole = whole_state(components.model, model, tied)
    unsaved = tuple(unsaved_state(components.optimizer))
    return EngineState(whole, optimizer, unsaved=unsaved, loss_scale=components.scaler.state_dict())


def report_verification(recorder: RunRecorder, verified: VerifiedStages) -> None:
    """Record the result of the verification of a pipeline."""
    for warning in verified.notes:
        recorder.warn(f"verify: {warning}")
    if verified.seconds:
        recorder.verified(Verified(round(verified.seconds, 3), verified.notes))
