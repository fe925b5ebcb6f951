"""Which engine a job gets, and the loop that drives it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from plait.adapt.changes import ChangeSource
from plait.adapt.policy_source import PolicySource
from plait.comm.collectives import all_gather_values, broadcast_value
from plait.core import events
from plait.core.codec import decode, encode
from plait.core.errors import JobError
from plait.core.events import Event
from plait.core.run_events import SyncChosen, last_sync
from plait.data.loader import Batch
from plait.data.requirements import check_unchanged
from plait.launcher.run_dir import RunDir
from plait.launcher.worker_process import Worker
from plait.schema.settings import SyncSettings, TrainSettings
from plait.schema.sync_options import AUTO, KINDS
from plait.sync.allreduce.autotune import TopologyChosen, remember
from plait.training.audit.replica_audit import ReplicaAudit
from plait.training.change.apply import asked_every, policies_of
from plait.training.checks.replicas import check_no_rows
from plait.training.components import Components, with_fresh_model
from plait.training.engine import Engine
from plait.training.engines.averaging_member import (
    MakeMember,
    Member,
    MemberInit,
    MemberState,
    WholeModelMember,
    WholeModelState,
)
from plait.training.engines.decentralized import DecentralizedEngine, Observers
from plait.training.engines.whole_model import WholeModelEngine
from plait.training.monitoring.required_signals import is_monitored
from plait.training.monitoring.share_monitor import ShareMonitor
from plait.training.monitoring.step_monitor import StepMonitor
from plait.training.run import Run
from plait.training.run_loop import RunLoop
from plait.training.setup.memory import has_room_for_whole


def make_job_loop(
    worker: Worker, settings: TrainSettings, components: Components, folder: RunDir, resume: bool = False
) -> RunLoop:
    """The loop of a job; where it leaves the sync open, all workers measure and choose one together.

    With `resume` it is the one that the run's record has, and so are topologies. A worker that joins them
    later receives the choice with their progress; one worker has nothing to choose.
    """
    is_open = AUTO in (settings.sync.kind, settings.topology.name)
    recorded = _recorded_choices(worker, folder) if resume and is_open else []
    if recorded and worker.world_size > 1:
        remember([each for each in recorded if isinstance(each, TopologyChosen)], worker.rendezvous)
    if settings.sync.kind != AUTO:
        return make_loop(worker, settings, components, folder)
    if worker.world_size < 2 and not worker.memberships.can_change:
        return make_loop(worker, replace(settings, sync=SyncSettings()), components, folder)
    kept = last_sync(recorded)
    chosen = None if kept is not None else _measured_sync(worker, settings, components)
    sync = chosen.sync if chosen is not None else kept
    assert sync is not None
    loop = make_loop(worker, replace(settings, sync=SyncSettings(sync)), components, folder)
    if chosen is not None:
        loop.run.metrics.record(chosen)
    return loop


def _recorded_choices(worker: Worker, folder: RunDir) -> list[Event]:
    """What was chosen by measuring in this run; all workers that start together call it."""
    found = list[tuple[str, Any]]()
    if worker.rank == 0 and folder.events().exists():
        record = (each.event for each in events.read(folder.events()))
        chosen = (each for each in record if isinstance(each, (SyncChosen, TopologyChosen)))
        found = [(each.kind(), encode(each)) for each in chosen]
    found = found if worker.world_size < 2 else broadcast_value(found, 0)
    return [decode(Event.kinds[kind], content, kind) for kind, content in found]


def _measured_sync(worker: Worker, settings: TrainSettings, components: Components) -> SyncChosen:
    if worker.world_size < 2:
        return SyncChosen("all-reduce", "one worker has no other to wait for")
    # Both import the profiler.
    if settings.in_stages:
        from plait.training.checks.plan_settings import check_pipeline
        from plait.training.engines.choose_pipeline_sync import choose_sync_of_pipelines
        from plait.training.engines.replica_layout import replica_layouts

        if not all(all_gather_values(has_room_for_whole(components.model, components.device))):
            raise JobError(
                f"parallel.sync: found 'auto', which is measured on a second copy of the model, but a worker "
                f"has no memory for one; name one of {', '.join(KINDS)}"
            )
        copy, layout = with_fresh_model(components, settings), check_pipeline(settings, worker.world_size)
        return choose_sync_of_pipelines(worker, settings, copy, [replica_layouts(layout)])
    from plait.training.engines.choose_sync import choose_sync

    return choose_sync(settings, components, (worker.rank, worker.world_size))


def make_loop(worker: Worker, settings: TrainSettings, components: Components, folder: RunDir) -> RunLoop:
    """The loop with the engine that the settings ask for; all workers make one together."""
    check_unchanged(settings, components.train_set.dataset, elastic=worker.memberships.can_change)
    run = Run(worker, settings, components, folder)
    if settings.in_stages:
        return RunLoop(run, engine_of_stages(run), make_sources(run))
    is_alone = worker.world_size == 1 and not worker.memberships.can_change
    make_engine = partial(whole_model_engine if is_alone else engine_of_sync, run)
    return RunLoop(run, make_engine(), make_sources(run), None if is_alone else make_engine)


def engine_of_sync(run: Run) -> Engine:
    """The engine of a run whose workers each hold the whole model, by its sync."""
    if run.settings.sync.kind == "all-reduce":
        return whole_model_engine(run)

    state = WholeModelState(run.components)

    def make_member(init: MemberInit) -> WholeModelMember:
        components = run.components
        audit = ReplicaAudit(run.worker, run.trials, components, run.audits, together=False)
        return WholeModelMember(run.worker, init, state, audit, share_monitor(run))

    return decentralized_engine(run, make_member, state)


def decentralized_engine(run: Run, make_member: MakeMember, state: MemberState) -> DecentralizedEngine:
    """The engine of a run whose members each train at the speed of their device."""

    def on_step(step: int, epoch: int, losses: Tensor, samples: int) -> None:
        run.metrics.step(step, epoch, losses[0], run.lr(step - 1), samples)

    return DecentralizedEngine(
        run.worker,
        run.trials,
        state,
        make_member,
        run.name_of_opening,
        lambda trial, source: run.order(),
        Observers(on_step, run.metrics.record_here, run.audits),
    )


def share_monitor(run: Run) -> ShareMonitor | None:
    """What measures the updates of a member, where the job asks for signals."""
    if not is_monitored(run.settings):
        return None
    return ShareMonitor(run.trials, run.metrics.warn, run.trial.signals.add)


def whole_model_engine(run: Run) -> WholeModelEngine:
    """The engine of a run whose workers each hold the whole model, and sum gradients."""
    worker, trials, metrics = run.worker, run.trials, run.metrics

    def make_monitor(shared: bool) -> StepMonitor | None:
        if not is_monitored(run.settings):
            return None
        return StepMonitor(worker, trials, run.components, metrics.warn, shared)

    def on_step(done: int, losses: Tensor, batches: Sequence[Batch]) -> None:
        step, (batch,) = run.trial.step + done, batches
        metrics.step(step, batch.epoch, losses[0], run.lr(step - 1), batch.total)

    return WholeModelEngine(
        worker,
        trials,
        run.components,
        feed=lambda trial: run.own_batches(),
        on_step=on_step,
        audit=ReplicaAudit(worker, trials, run.components, run.audits),
        make_monitor=make_monitor,
    )


def make_sources(run: Run) -> list[ChangeSource]:
    """The policies of a job, asked after each step, or less often where workers must come together for it."""
    if not run.settings.adapt:
        return []
    source = PolicySource(
        policies_of(run.settings), run.trial.signals, lambda: asked_every(run.settings, run.worker.world_size)
    )
    if not run.settings.in_stages or run.settings.stages.graph is None:
        return [source]
    from plait.training.change.replanning import Replanning  # imports the planner

    return [Replanning(run, source)]


def engine_of_stages(run: Run) -> Engine:
    """The engine of a run whose workers hold stages of the model, by its sync."""
    # Slow to import, with all that tracing needs.
    from plait.training.engines.pipeline_member import join_pipelines
    from plait.training.stages.run_stages import pipeline_engine, replica_stages

    if run.settings.sync.kind == "all-reduce":
        return pipeline_engine(run)
    if run.components.local_tensors is None:
        check_no_rows(run.components, run.settings)
    stages = replica_stages(run)
    if run.settings.verify.audit != "off":
        run.audits.say("audit: the steps of pipelines side by side are not audited")

    def make_member(init: MemberInit) -> Member:
        on_event, warn = run.metrics.record_here, run.metrics.warn
        return join_pipelines(run.worker, init, stages, on_event, warn, share_monitor(run))

    return decentralized_engine(run, make_member, stages)
