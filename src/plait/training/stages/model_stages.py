"""The stages of one trial's model on this worker; when the plan changes, only layers that must move do."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from plait.adapt.changes import PlanChange
from plait.adapt.members import NO_STATE, ProgressMark, loss_of
from plait.comm.collectives import all_gather_values, gather_in_turn
from plait.core.errors import JobError
from plait.core.run_events import LayersMoved
from plait.data.sampler import GlobalBatch, Position
from plait.launcher.run_dir import RunDir
from plait.launcher.worker_process import Worker
from plait.pipeline.executor import PipelineExecutor
from plait.pipeline.layout import PipelineLayout
from plait.pipeline.microbatches import Microbatch, cut_step, loaded_by
from plait.pipeline.named_state import Tensors, model_state, tensors_of, tied_aliases
from plait.profiler.traced_model import TracedModel
from plait.schema.settings import TrainSettings
from plait.training import checkpoint as checkpoints
from plait.training.change.replanning import replan_together
from plait.training.change.resharding import (
    LayerState,
    find_complete,
    find_moves,
    layer_state,
    merge_into,
    receive_layers,
)
from plait.training.change.step_commit import StepCommit
from plait.training.checkpoint import Checkpoint, EngineState
from plait.training.checks.plan_settings import check_pipeline
from plait.training.components import Components, with_fresh_model
from plait.training.engine import IntervalResult
from plait.training.engines.pipeline_setup import (
    State,
    gathered,
    open_pipeline,
    prepare_job,
    report_verification,
)
from plait.training.run_record import RunRecorder
from plait.training.stages.local_tensors import (
    fill_local_tensors,
    names_by_stage,
    stages_by_name,
    unused_names,
)
from plait.training.stages.tensor_file import write_in_turn
from plait.training.stages.trial_stages import StepBatch, TrialStages, load_microbatches
from plait.training.trial import Trial
from plait.training.worker_group import WorkerGroup


class ModelStages(TrialStages):
    """The stages of one trial that this worker holds.

    `trials` contains only that trial. `order` yields the sample numbers of its next batches. When layers
    move, the model is built again and `on_components` is called with the new components. `on_late_step` is
    called when this worker completes a step after the interval in which another was lost.
    """

    components: Components

    def __init__(
        self,
        worker: Worker,
        trials: Sequence[Trial],
        components: Components,
        folder: RunDir,
        recorder: RunRecorder,
        order: Callable[[], Iterator[GlobalBatch]],
        on_components: Callable[[Components], None],
        on_late_step: Callable[[Position], None],
    ) -> None:
        self._worker = worker
        self._trials = trials
        # While the pipeline is open, their optimizer is that of this worker's stages.
        self.components = components
        self._folder = folder
        self._recorder = recorder
        self._order = order
        self._on_components = on_components
        self._on_late_step = on_late_step
        elastic = worker.memberships.can_change
        self.layout = check_pipeline(self._settings, None if elastic else worker.world_size)
        # What the sync keeps for this worker's parameters, if it averages.
        self.sync: Sequence[Tensors] = ({},)
        # After the pipeline was closed: what this worker holds, and the names that each worker holds.
        self._held: LayerState | None = None
        self._held_by: list[list[str]] = []
        # The ranks that hold each tensor, the names that this worker holds, and the layers it keeps for
        # leavers.
        self._holders: dict[str, tuple[int, ...]] = {}
        self._local_names: set[str] = set()
        self._held_for_leavers = LayerState()
        # Tensors that leaving workers have sent to others.
        self._handed_over: set[str] = set()
        # Whether the states of all workers are consistent: False during a step that cannot be undone.
        self._is_whole = True
        self._commit: StepCommit | None = None
        self._next_position = Position()
        self._tied = tied_aliases(components.model)
        # For a model on the meta device: the checkpoint that its tensors are read from.
        self._stored: checkpoints.StoredCheckpoint | None = None
        # The stages that use each tensor.
        self.names: Mapping[str, tuple[int, ...]] = {}
        self._contents: Iterator[Any] = iter(())

    @property
    def _settings(self) -> TrainSettings:
        return self._trials[0].settings

    def load(self, state: Checkpoint) -> None:
        if self.components.local_tensors is None:
            # Without tensors: the layers are received from other workers when the pipeline opens.
            if state.model:
                self.components.load(state)
            self.sync = [dict(state.sync)]
        elif state.stored is not None:
            # Tensors are read one by one once it is known which rank holds them.
            self._stored = state.stored
            checkpoints.check_names(self.components.model, self._stored.model)

    def open(self) -> PipelineExecutor:
        """Cut the model, with its present state, into stages."""
        pipeline = self._open(self._distribute(), self.layout)
        if self._worker.memberships.can_change and self._can_lose_replicas():
            self._commit = StepCommit(pipeline)
        return pipeline

    def _arrange(self) -> PipelineLayout:
        """The layout of the stages on the present workers, of which each has one."""
        if self._worker.memberships.can_change:
            self._trials[0].settings = replan_together(self._worker, self._settings)
        return check_pipeline(self._settings, self._worker.world_size)

    def _summed(self) -> PipelineLayout:
        """The part of the layout in which gradients are summed: all of it."""
        return self.layout

    def _distribute(self) -> TracedModel:
        """Assign the stages to the present workers and send each its layers; returns the traced model."""
        worker, self._commit = self._worker, None
        if self._held is not None:
            self._build_again()
            merge_into(self.components, self._held)
        self.layout = self._arrange()
        components = self.components
        verified, prepared = prepare_job(worker, self._settings, components, self._summed(), self._folder)
        self.layout = replace(self.layout, stages=prepared.stages)
        report_verification(self._recorder, verified)
        self.names = stages_by_name(verified.traced, self.layout)
        holders = names_by_stage(verified.traced, self.layout)
        if components.local_tensors is not None:
            fill_local_tensors(worker.rank, components, components.local_tensors, holders, self._stored)
            self._unused = unused_names(components.model, holders) if worker.rank == 0 else []
        all_ranks = range(worker.world_size)
        needed = {**holders, **dict.fromkeys(unused_names(components.model, holders), all_ranks)}
        if self._held is not None:
            self._receive_missing_layers(needed)
        self._holders = {name: tuple(ranks) for name, ranks in needed.items()}
        self._local_names = {name for name, ranks in needed.items() if worker.rank in ranks}
        return verified.traced

    def _open(self, traced: TracedModel, layout: PipelineLayout) -> PipelineExecutor:
        """This worker's part of the pipelines of `layout`."""
        worker, components = self._worker, self.components
        self.channels, pipeline = open_pipeline(
            worker, self._settings, components, traced, layout, worker.hosts
        )
        self._forget_held()
        self.components = replace(components, optimizer=pipeline.optimizer, base_lrs=pipeline.base_lrs)
        return pipeline

    def _forget_held(self) -> None:
        """All workers have the layers that they need."""
        self._held, self._held_by, self._is_whole = None, [], True
        self._held_for_leavers = LayerState()

    def _build_again(self, keep_scale: bool = True) -> None:
        """Build a new, untrained model and optimizer."""
        self.components = with_fresh_model(self.components, self._settings, keep_scale)
        self._on_components(self.components)

    def _local_layers(self, optimizer: torch.optim.Optimizer) -> LayerState:
        """The layers of this worker, and those that it keeps for leavers."""
        local = layer_state(self.components, self._local_names, optimizer)
        return replace(local, sync=self.sync[0]) | self._held_for_leavers

    def _can_lose_replicas(self) -> bool:
        """Whether another worker may hold the layers of a lost one, after the same step."""
        layout = self.layout
        replicated = any(len(layout.holders(stage)) > 1 for stage in range(len(layout.stages)))
        return replicated and layout.schedule.synchronous and not self.components.scaler.is_enabled()

    def _receive_missing_layers(self, needed: Mapping[str, Sequence[int]]) -> None:
        """Send each worker the layers of its stages that it lacks."""
        assert self._held is not None
        if not self._held_by:
            self._held_by = all_gather_values(sorted(self._held.model))
        moves = find_moves(self._held_by, needed)
        received = receive_layers(moves, self._held, self._worker.rank)
        merge_into(self.components, received)
        self.sync = [self._held.sync | received.sync]
        moved = {name for name, *_ in moves} | self._handed_over
        self._recorder.record(LayersMoved(self._trials[0].step, tuple(sorted(moved))))
        self._handed_over = set()

    def close(self, pipeline: PipelineExecutor) -> None:
        self._close(pipeline.close)

    def _close(self, close_pipeline: Callable[[], None]) -> None:
        self._held = self._local_layers(self.components.optimizer)
        was_lost = self._worker.memberships.loss() is not None
        try:
            close_pipeline()
        except RuntimeError:
            if self._is_whole and not was_lost:
                raise
        finally:
            with contextlib.suppress(*([RuntimeError] if was_lost or not self._is_whole else [])):
                self.channels.close()

    def steps(self, trials: Sequence[Trial], count: int) -> Iterator[StepBatch]:
        (trial,), layout, rank = trials, self.layout, self._worker.rank
        batches = list(itertools.islice(self._order(), count))
        many, usual = layout.microbatches, trial.batch.size
        cut = [cut_step(trial.step + i, batch, many, usual) for i, batch in enumerate(batches)]
        if layout.schedule.synchronous:
            # Loader processes prefetch, also the microbatches of later steps.
            local = [microbatch for each in cut for microbatch in loaded_by(layout, rank, each)]
            self._contents = self._load(local)
        return iter(
            StepBatch(each, (batch.after,), batch.epoch, len(batch.samples))
            for each, batch in zip(cut, batches)
        )

    def contents(self, microbatches: list[Microbatch]) -> Iterator[Any]:
        if self.layout.schedule.synchronous:
            return self._contents
        return self._load(microbatches)

    def _load(self, microbatches: list[Microbatch]) -> Iterator[Any]:
        components = self.components
        return load_microbatches(components.train_set, self._settings, components, microbatches)

    def run_interval(
        self, train: Callable[[], IntervalResult], positions: Callable[[int], tuple[Position, ...]]
    ) -> IntervalResult:
        commit, self._is_whole = self._commit, False
        if commit is not None:
            commit.begin_interval()
        try:
            result = train()
        except RuntimeError as failure:
            lost = loss_of(self._worker, failure)
            if lost is None or commit is None:
                raise
            commit.keep_gradients()
            (self._next_position,) = positions(commit.written + 1)
            result = IntervalResult(commit.written, positions(commit.written), lost=lost)
        else:
            if commit is not None:
                commit.end_interval()
        self._is_whole = True
        return result

    def gather(self, slot: int, local: State, group: WorkerGroup) -> EngineState | None:
        if self.components.local_tensors is not None:
            return self._write_in_turn(*local)
        return gathered(self.components, local, group, self._tied)

    def _write_in_turn(self, model: Tensors, optimizer: Tensors) -> EngineState | None:
        """Rank 0 writes tensors as they arrive, so that no worker holds the whole model."""
        is_writer = self._worker.rank == 0
        if is_writer:
            local = model_state(self.components.model)
            model |= {name: local[name] for name in self._unused if name in local}
        folder = self._folder.checkpoints
        paths = folder / ".step-model.part", folder / ".step-optimizer.part"
        broken = None
        for path, tensors, weights in zip(paths, (model, optimizer), (self.components.weights, None)):
            specs, gathered = gather_in_turn(tensors, 0)
            if is_writer:
                broken = write_in_turn(path, specs, gathered, weights) or broken
        written = checkpoints.Written(*paths, self._tied, broken)
        return EngineState({}, {}, written=written) if is_writer else None

    def with_plan(self, change: PlanChange) -> TrainSettings:
        settings = self._settings
        assert settings.pipeline is not None
        if self.components.local_tensors is not None:
            raise JobError(
                "adapt: found a change of the plan, but no worker has memory for the whole model, which "
                "is needed to cut it again; leave the policy out"
            )
        settings = replace(settings, pipeline=replace(settings.pipeline, plan=change.plan))
        check_pipeline(settings, self._worker.world_size)
        return settings

    def find_source(self, marks: Sequence[ProgressMark]) -> tuple[int, EngineState] | None:
        rank = self._worker.rank
        if self._held is None and marks[rank] != NO_STATE:
            # It has not trained yet: it has the initial state.
            initial = layer_state(self.components, None, self.components.optimizer)
            self._held = replace(initial, sync=self.sync[0])
        marks = self._finish_step(marks)
        self._held = self._held if self._held is not None and self._is_whole else LayerState()
        self._held_by = all_gather_values(sorted(self._held.model))
        source = find_complete(marks, self._held_by, tensors_of(self.components.model))
        if source is not None:
            # Ignore the layers of workers at other steps.
            is_current = [mark[0] == marks[source][0] for mark in marks]
            self._held_by = [names if current else [] for names, current in zip(self._held_by, is_current)]
            self._held = self._held if is_current[rank] else LayerState()
        else:
            self._build_again(keep_scale=False)
            self._forget_held()
            self.sync, self._commit = ({},), None
        # Layers are exchanged when the pipeline opens.
        return None if source is None else (source, EngineState({}, {}))

    def _finish_step(self, marks: Sequence[ProgressMark]) -> list[ProgressMark]:
        """Apply the update of the step in which a worker was lost, if another worker has applied it.

        All workers call it; returns the progress of each worker afterwards.
        """
        commit = self._commit
        ready = all_gather_values(commit is not None and commit.is_ready)
        last = max(marks, key=lambda mark: (mark[0], -mark[1]))
        behind = [is_ready and mark[0] == last[0] - 1 for is_ready, mark in zip(ready, marks)]
        self._commit = None
        if commit is not None and self._is_whole:
            is_behind = behind[self._worker.rank]
            commit.finish(write=is_behind)
            if is_behind:
                # In case another worker is lost before this one has received the progress of the others.
                self._on_late_step(self._next_position)
            self._held = self._local_layers(commit.optimizer)
        return [last if is_behind else mark for is_behind, mark in zip(behind, marks)]

    def leave_to(self, staying: Sequence[int]) -> None:
        if not staying:
            return
        only = {name: ranks for name, ranks in self._holders.items() if not set(ranks) & set(staying)}
        moves = [(name, ranks[0], staying[i % len(staying)]) for i, (name, ranks) in enumerate(only.items())]
        local = self._local_layers(self.components.optimizer)
        self._held_for_leavers = receive_layers(moves, local, self._worker.rank)
        self._handed_over = set(only)
