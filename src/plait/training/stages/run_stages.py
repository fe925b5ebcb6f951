"""The engine of a run whose workers hold stages of its model."""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor

from plait.data.sampler import Position
from plait.pipeline.executor import PipelineExecutor
from plait.training.audit.schedule import USUAL_COST, next_audited
from plait.training.audit.stage_audit import AuditedStages
from plait.training.components import Components
from plait.training.engines.pipeline import PipelineEngine
from plait.training.monitoring.required_signals import is_monitored
from plait.training.monitoring.stage_monitor import StageMonitor
from plait.training.run import Run
from plait.training.stages.model_stages import ModelStages
from plait.training.stages.replica_stages import ReplicaStages
from plait.training.stages.trial_stages import StepBatch
from plait.training.trial import UNKNOWN_STEPS

Stages = TypeVar("Stages", bound=ModelStages)


def _stages_of(run: Run, kind: type[Stages]) -> Stages:
    """The stages of the run's trial, with callbacks that update the run."""

    def on_components(components: Components) -> None:
        run.components = components

    def on_late_step(position: Position) -> None:
        run.trial.advance(1, position)

    return kind(
        run.worker,
        run.trials,
        run.components,
        run.folder,
        run.metrics,
        run.order,
        on_components,
        on_late_step,
    )


def replica_stages(run: Run) -> ReplicaStages:
    """The stages of the run's trial where pipelines average side by side."""
    return _stages_of(run, ReplicaStages)


def pipeline_engine(run: Run) -> PipelineEngine:
    """The engine that trains the run's trial in stages, with callbacks that update the run."""
    worker, trials, metrics = run.worker, run.trials, run.metrics

    def on_step(done: int, losses: Tensor, batch: StepBatch, ended: float) -> None:
        step = run.trial.step + done
        metrics.step(step, batch.epoch, losses[0], run.lr(step - 1), batch.samples, ended)

    def on_opened(seconds: float) -> None:
        if run.opened_s:
            # Earlier measurements are of another plan or of other workers.
            run.trial.signals.forget()
        run.opened_s = seconds

    def begin_audit(pipeline: PipelineExecutor) -> tuple[int, AuditedStages | None]:
        """Steps until the next audit, or (1, the audit) if the next step is audited."""
        # On a CPU the first worker can use the cores of the workers that wait.
        cost = USUAL_COST if run.components.device.type == "cpu" else float(worker.world_size)
        step, following = run.trial.step, next_audited(run.settings, run.trial.step, cost)
        if following is None or following > step:
            return UNKNOWN_STEPS if following is None else following - step, None
        if run.components.local_tensors is not None:
            run.audits.say("audit: no worker has memory for the whole model, so that no step is taken twice")
            return 1, None
        return 1, AuditedStages(worker, run.trial, run.components, pipeline, stages.names, run.audits)

    def make_monitor(pipeline: PipelineExecutor) -> StageMonitor | None:
        if not is_monitored(run.settings):
            return None
        workers, trial = (worker.rank, worker.world_size), run.trial
        return StageMonitor(workers, trials, pipeline, [trial.noise], metrics.warn, trial.signals.add)

    stages = _stages_of(run, ModelStages)
    return PipelineEngine(
        worker, trials, stages, on_step, metrics.record_here, on_opened, begin_audit, make_monitor
    )
