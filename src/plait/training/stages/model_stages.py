"""The stages of one trial's model: each layer stays where it is, if it belongs there, and others move."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from plait.adapt.changes import PlanChange
from plait.comm.collectives import all_gather_values, gather_in_turn
from plait.core.errors import JobError
from plait.core.run_events import LayersMoved
from plait.data import loader
from plait.data.sampler import GlobalBatch, Position
from plait.launch.run_dir import RunDir
from plait.launch.worker import Worker
from plait.pipeline.executor import Pipeline
from plait.pipeline.microbatches import Microbatch, cut_step, loaded_by
from plait.pipeline.named_state import Tensors, model_state, tensors_of, tied_aliases, unsaved_state
from plait.schema.settings import TrainSettings
from plait.training import checkpoint as checkpoints
from plait.training.change.layers import (
    HeldLayers,
    find_complete,
    find_moves,
    held_layers,
    put_beside,
    taken,
)
from plait.training.change.members import NO_STATE, Mark, loss_of
from plait.training.change.replanning import replan_together
from plait.training.change.step_commit import StepCommit
from plait.training.checkpoint import Checkpoint, EngineState
from plait.training.components import Components, TrialInit, with_fresh_model
from plait.training.engine import IntervalResult
from plait.training.engines.pipeline import StepBatch, check_pipeline
from plait.training.engines.pipeline_setup import (
    open_pipeline,
    prepare_together,
    report_verification,
    with_gathered,
)
from plait.training.metrics import MetricsLogger
from plait.training.stages.own_tensors import fill_pieces, names_by_stage, stages_by_name, unused_names
from plait.training.trial import Trial
from plait.training.worker_group import WorkerGroup


class ModelStages:
    """The stages of one trial that this worker holds.

    `trials` has that one. `order` gives its batches to come, by their samples, and `load` what is in batches.
    Where layers move, the model is built again: `on_components` is told of its components. `on_late_step` is
    told of a step that this worker has finished after the interval in which another was lost.
    """

    def __init__(
        self,
        worker: Worker,
        trials: Sequence[Trial],
        components: Components,
        folder: RunDir,
        recorder: MetricsLogger,
        order: Callable[[], Iterator[GlobalBatch]],
        load: Callable[[loader.DataSource, Iterator[GlobalBatch]], Iterator[loader.Batch]],
        on_components: Callable[[Components], None],
        on_late_step: Callable[[Position], None],
    ) -> None:
        self._worker = worker
        self._trials = trials
        # With the optimizer of this worker's stages while they are open.
        self.components = components
        self._folder = folder
        self._recorder = recorder
        self._order = order
        self._load_batches = load
        self._on_components = on_components
        self._on_late_step = on_late_step
        elastic = worker.memberships.can_change
        self.layout = check_pipeline(self._settings, None if elastic else worker.world_size)
        # Of a pipeline that was closed: what this worker holds, and what each worker does.
        self._held: HeldLayers | None = None
        self._held_by: list[list[str]] = []
        # By name, the ranks that hold each tensor; and what this worker keeps for others that have left.
        self._holders: dict[str, tuple[int, ...]] = {}
        self._own_names: set[str] = set()
        self._in_trust = HeldLayers()
        # Tensors that workers which leave have given to others.
        self._handed_over: set[str] = set()
        # Whether what workers hold belongs together: not in the middle of a step, unless that can be undone.
        self._is_whole = True
        self._commit: StepCommit | None = None
        self._next_position = Position()
        self._tied = tied_aliases(components.model)
        # Of a model that no worker holds as a whole: the checkpoint that its tensors are read from.
        self._stored: checkpoints.StoredCheckpoint | None = None
        # The stages that use each tensor.
        self.names: Mapping[str, tuple[int, ...]] = {}
        self._contents: Iterator[Any] = iter(())

    @property
    def _settings(self) -> TrainSettings:
        return self._trials[0].settings

    def load(self, state: Checkpoint) -> None:
        if self.components.pieces is None:
            # Where layers are with other workers, they come from there.
            if state.model:
                self.components.load(state)
        elif state.stored is not None:
            # Its tensors are read later, one by one, once it is known who holds them.
            self._stored = state.stored
            checkpoints.check_names(self.components.model, self._stored.model)

    def open(self) -> Pipeline:
        """Cut the model, with the state it has now, into its stages."""
        worker, self._commit = self._worker, None
        if self._held is not None:
            self._build_again()
            put_beside(self.components, self._held)
        if worker.memberships.can_change:
            self._trials[0].settings = replan_together(worker, self._settings)
        self.layout = check_pipeline(self._settings, worker.world_size)
        parts = self.components
        found, self.layout = prepare_together(worker, self._settings, parts, self.layout, self._folder)
        report_verification(self._recorder, found)
        self.names = stages_by_name(found.traced, self.layout)
        holders = names_by_stage(found.traced, self.layout)
        if parts.pieces is not None:
            fill_pieces(worker.rank, parts, parts.pieces, holders, self._stored)
            self._unused = unused_names(parts.model, holders) if worker.rank == 0 else []
        everyone = range(worker.world_size)
        needed = {**holders, **dict.fromkeys(unused_names(parts.model, holders), everyone)}
        if self._held is not None:
            self._bring_layers(needed)
        self._holders = {name: tuple(ranks) for name, ranks in needed.items()}
        self._own_names = {name for name, ranks in needed.items() if worker.rank in ranks}
        self._channels, pipeline = open_pipeline(
            worker, self._settings, parts, found.traced, self.layout, worker.hosts
        )
        if worker.memberships.can_change:
            self._commit = StepCommit(pipeline) if self._can_lose_replicas() else None
        self._held, self._held_by, self._is_whole = None, [], True
        self._in_trust = HeldLayers()
        self.components = replace(parts, optimizer=pipeline.optimizer, base_lrs=pipeline.base_lrs)
        return pipeline

    def _build_again(self, keep_scale: bool = True) -> None:
        """Have the model and the optimizer as the job makes them."""
        self.components = with_fresh_model(self.components, self._settings, keep_scale)
        self._on_components(self.components)

    def _own_layers(self, optimizer: torch.optim.Optimizer) -> HeldLayers:
        """What this worker holds, with what it keeps for others."""
        held, kept = held_layers(self.components, self._own_names, optimizer), self._in_trust
        return HeldLayers(held.model | kept.model, held.optimizer | kept.optimizer)

    def _can_lose_replicas(self) -> bool:
        """Whether what a lost worker held may be with another, after the same step."""
        layout = self.layout
        replicated = any(len(layout.holders(stage)) > 1 for stage in range(len(layout.stages)))
        return replicated and layout.schedule.synchronous and not self.components.scaler.is_enabled()

    def _bring_layers(self, needed: Mapping[str, Sequence[int]]) -> None:
        """Have each worker that lacks layers of its stages take them from one that has them."""
        assert self._held is not None
        if not self._held_by:
            self._held_by = all_gather_values(sorted(self._held.model))
        moves = find_moves(self._held_by, needed)
        put_beside(self.components, taken(moves, self._held, self._worker.rank))
        moved = {name for name, *_ in moves} | self._handed_over
        self._recorder.note(LayersMoved(self._trials[0].step, tuple(sorted(moved))))
        self._handed_over = set()

    def close(self, pipeline: Pipeline) -> None:
        self._held = self._own_layers(pipeline.optimizer)
        was_lost = self._worker.memberships.loss() is not None
        try:
            pipeline.close()
        except RuntimeError:
            if self._is_whole and not was_lost:
                raise
        finally:
            with contextlib.suppress(*([RuntimeError] if was_lost or not self._is_whole else [])):
                self._channels.close()

    def steps(self, trials: Sequence[Trial], count: int) -> Iterator[StepBatch]:
        (trial,), layout, rank = trials, self.layout, self._worker.rank
        batches = list(itertools.islice(self._order(), count))
        many, usual = layout.microbatches, trial.batch.size
        cut = [cut_step(trial.step + i, batch, many, usual) for i, batch in enumerate(batches)]
        if layout.schedule.synchronous:
            # Loader processes read ahead, also those of later steps.
            own = [microbatch for each in cut for microbatch in loaded_by(layout, rank, each)]
            self._contents = self._load(self.components.train_set, own)
        return iter(
            StepBatch(each, (batch.after,), batch.epoch, len(batch.samples))
            for each, batch in zip(cut, batches)
        )

    def contents(self, microbatches: list[Microbatch]) -> Iterator[Any]:
        if self.layout.schedule.synchronous:
            return self._contents
        return self._load(self.components.train_set, microbatches)

    def test_contents(self, settings: TrainSettings, microbatches: list[Microbatch]) -> Iterator[Any]:
        assert self.components.test_set is not None
        return self._load(self.components.test_set, microbatches)

    def _load(self, source: loader.DataSource, microbatches: list[Microbatch]) -> Iterator[Any]:
        if not microbatches:
            return iter(())
        order = (GlobalBatch(m.epoch, tuple(m.samples), Position()) for m in microbatches)
        device, dtype = self.components.device, self.components.dtype
        return (loader.to_device(b.content, device, dtype) for b in self._load_batches(source, order))

    def take_losses(self, pipeline: Pipeline) -> Tensor:
        loss = sum(float(loss) for loss in pipeline.losses.values())
        pipeline.losses.clear()
        return torch.tensor([loss], dtype=torch.float64)

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

    def state(self, slot: int, pipeline: Pipeline, group: WorkerGroup) -> EngineState | None:
        if self.components.pieces is not None:
            return self._write_in_turn(*pipeline.state())
        model, optimizer = map(group.gather, pipeline.state())
        if not group.is_first:
            return None
        known = EngineState(
            model_state(self.components.model),
            {},
            unsaved=tuple(unsaved_state(pipeline.optimizer)),
            loss_scale=self.components.scaler.state_dict(),
        )
        return with_gathered(known, (model, optimizer), self._tied)

    def _write_in_turn(self, model: Tensors, optimizer: Tensors) -> EngineState | None:
        """Rank 0 writes what all workers hold as it comes, so that nobody holds all of it."""
        is_writer = self._worker.rank == 0
        if is_writer:
            own = model_state(self.components.model)
            model |= {name: own[name] for name in self._unused if name in own}
        folder = self._folder.checkpoints
        paths = folder / ".step-model.part", folder / ".step-optimizer.part"
        broken = None
        for path, tensors, weights in zip(paths, (model, optimizer), (self.components.weights, None)):
            specs, found = gather_in_turn(tensors, 0)
            if is_writer:
                broken = checkpoints.write_in_turn(path, specs, found, weights) or broken
        written = checkpoints.Written(*paths, self._tied, broken)
        return EngineState({}, {}, written=written) if is_writer else None

    def check_entering(self, entering: Sequence[TrialInit]) -> None:
        """One trial has these stages from the first step to the last."""
        assert not entering

    def change(self, leaving: Sequence[int], entering: Sequence[TrialInit]) -> None:
        assert not leaving
        assert not entering

    def with_plan(self, change: PlanChange) -> TrainSettings:
        settings = self._settings
        assert settings.pipeline is not None
        if self.components.pieces is not None:
            raise JobError(
                "adapt: found a change of the plan, but no worker has memory for the whole model, which it "
                "takes to cut it anew; leave the policy out"
            )
        settings = replace(settings, pipeline=replace(settings.pipeline, plan=change.plan))
        check_pipeline(settings, self._worker.world_size)
        return settings

    def hand_over(self, marks: Sequence[Mark]) -> tuple[int, EngineState] | None:
        rank = self._worker.rank
        if self._held is None and marks[rank] != NO_STATE:
            # It has not trained yet: it has what all start from.
            self._held = held_layers(self.components, None, self.components.optimizer)
        marks = self._finish_step(marks)
        self._held = self._held if self._held is not None and self._is_whole else HeldLayers()
        self._held_by = all_gather_values(sorted(self._held.model))
        source = find_complete(marks, self._held_by, tensors_of(self.components.model))
        if source is not None:
            # Others are elsewhere in the run, and so is what they hold.
            far = [mark[0] == marks[source][0] for mark in marks]
            self._held_by = [held if is_there else [] for held, is_there in zip(self._held_by, far)]
            self._held = self._held if far[rank] else HeldLayers()
        else:
            self._build_again(keep_scale=False)
            self._held, self._held_by, self._is_whole = None, [], True
            self._in_trust, self._commit = HeldLayers(), None
        # Layers go from worker to worker when the pipeline is opened.
        return None if source is None else (source, EngineState({}, {}))

    def _finish_step(self, marks: Sequence[Mark]) -> list[Mark]:
        """Write the update of the step that a worker was lost in, where one has written it; all call it.

        Returns how far each worker is then.
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
                # Should another worker be lost before this one has the progress of the others.
                self._on_late_step(self._next_position)
            self._held = self._own_layers(commit.optimizer)
        return [last if is_behind else mark for is_behind, mark in zip(behind, marks)]

    def leave_to(self, staying: Sequence[int], pipeline: Pipeline) -> None:
        if not staying:
            return
        only = {name: ranks for name, ranks in self._holders.items() if not set(ranks) & set(staying)}
        moves = [(name, ranks[0], staying[i % len(staying)]) for i, (name, ranks) in enumerate(only.items())]
        self._in_trust = taken(moves, self._own_layers(pipeline.optimizer), self._worker.rank)
        self._handed_over = set(only)
