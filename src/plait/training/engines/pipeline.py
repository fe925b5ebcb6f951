"""The trainer of pipelined runs: steps in stretches between evaluations and checkpoints.

Under a synchronous schedule a step is one batch and one update, as in data-parallel runs. Under an
asynchronous one a step is as many microbatches, updates come as the schedule says, and the pipeline drains
only where a stretch ends. Checkpoints hold the whole model by name, so a run may go on under any plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from plait.comm.collectives import broadcast_value, gather_in_turn
from plait.core.codec import decode
from plait.core.errors import JobError
from plait.data import loader
from plait.data.sampler import GlobalBatch, Position
from plait.launch.run_dir import RunDir
from plait.launch.worker import Worker
from plait.pipeline.layout import PipelineLayout, arrange, one_batch, stream, with_choices
from plait.pipeline.microbatches import Microbatch, MicrobatchSource, cut_step, loaded_by
from plait.pipeline.op_timings import operations_event
from plait.planner.errors import PlanError
from plait.planner.plan import Plan
from plait.planner.schedules.kinds import Schedule
from plait.planner.schedules.orders import operations
from plait.schema.settings import TrainSettings
from plait.training import checkpoint as checkpoints
from plait.training.components import Components
from plait.training.engines.own_tensors import arranged_names, fill_pieces, unused_names
from plait.training.engines.pipeline_setup import (
    State,
    further_names,
    open_pipeline,
    prepare_together,
    tell_of_verification,
    with_gathered,
)
from plait.training.engines.replica_layout import check_columns
from plait.training.engines.step_reduce import DeferredStepReduce
from plait.training.evaluate import in_order, mean_of_all, sums_of
from plait.training.interval_loop import StretchTrainer


def check_pipeline(settings: TrainSettings, workers: int) -> PipelineLayout:
    """The arrangement that a job's plan asks for; refuses what a pipeline cannot do."""
    assert settings.pipeline is not None
    plan = decode(Plan, settings.pipeline.plan, "plan")
    if plan.devices_used != workers:
        raise JobError(
            f"parallel.plan: the plan is for {plan.devices_used} devices, but the job has {workers} "
            f"worker{'s' if workers > 1 else ''}; "
            f"use -np {plan.devices_used}, or plan for {workers}"
        )
    if settings.precision == "fp16" and not (
        plan.schedule.synchronous and settings.sync.kind == "all-reduce"
    ):
        what = (
            f"sync {settings.sync.kind}" if plan.schedule.synchronous else f"schedule {plan.schedule.value}"
        )
        raise JobError(
            f"precision: found 'fp16', whose loss scale all stages must agree on, with {what}, under which "
            f"they update apart; use bf16 or float32, or sync all-reduce and schedule flush, gpipe or "
            f"zero-bubble"
        )
    if settings.accumulate > 1:
        raise JobError("accumulate: a pipeline accumulates by itself; use parallel.microbatches instead")
    wrong = [stage for stage in settings.pipeline.recompute if not 0 <= stage < len(plan.stages)]
    if wrong:
        raise JobError(
            f"parallel.recompute: found stage {wrong[0]}, expected stages 0 to {len(plan.stages) - 1} of the "
            f"plan"
        )
    if settings.pipeline.vertical_sync and plan.schedule is not Schedule.STASH:
        raise JobError(
            f"parallel.vertical_sync: found schedule {plan.schedule.value}, which has one version by itself; "
            f"expected stash"
        )
    arrangement = with_choices(arrange(plan), settings.pipeline)
    if settings.sync.kind != "all-reduce":
        check_columns(settings, arrangement)
    _check_depths(arrangement)
    return arrangement


def _check_depths(arrangement: PipelineLayout) -> None:
    """Refuse depths that would have workers wait for each other for ever.

    Fewer microbatches are the same order with some of them left out, so the most that a run takes without
    draining stand for all; a few rounds of what is in flight stand for a stretch without end.
    """
    layout, schedule = arrangement.layout, arrangement.schedule
    many, batch = max(1, arrangement.local(arrangement.microbatches, 0)), 1
    if not schedule.synchronous:
        many = 4 * len(layout.workers) + 3 * arrangement.most_in_flight()
    if schedule is Schedule.TWO_BUFFERED:
        batch = arrangement.batch_of_two_buffers
        many += 3 * batch
    try:
        operations(schedule, layout, many, arrangement.depths, batch)
    except PlanError as failure:
        raise JobError(f"parallel.depths: {failure}") from None


class PipelineTrainer(StretchTrainer):
    """Trains `parts` as a pipeline on this worker and its peers; `hosts` names the host of each rank."""

    def __init__(
        self,
        worker: Worker,
        settings: TrainSettings,
        parts: Components,
        folder: RunDir,
        hosts: Sequence[str],
    ) -> None:
        super().__init__(worker, settings, parts, folder)
        self._arrangement = check_pipeline(settings, worker.world_size)
        self._hosts = hosts
        self._tied = further_names(parts.model)
        self._gathered: State = ({}, {})
        # A model that no worker holds as a whole: what it goes on from, and what was written of it.
        self._stored: checkpoints.StoredCheckpoint | None = None
        self._written: checkpoints.Written | None = None

    def _make_engine(self) -> None:
        return None

    def _parts_of_a_batch(self) -> int:
        return self._arrangement.microbatches

    def _close(self) -> None:
        self._pipeline.close()
        self._channels.close()

    def begin(self, steps: int) -> None:
        """Get ready to go on: cut the model, with the state it has now, into its stages."""
        super().begin(steps)
        found, self._arrangement = prepare_together(
            self.worker, self.settings, self.parts, self._arrangement, self.folder
        )
        tell_of_verification(self.recorder, found)
        if self.parts.pieces is not None:
            stages = arranged_names(found.traced, self._arrangement)
            fill_pieces(self.worker.rank, self.parts, self.parts.pieces, stages, self._stored)
            self._unused = unused_names(self.parts.model, stages) if self.worker.rank == 0 else []
        self._channels, self._pipeline = open_pipeline(
            self.worker, self.settings, self.parts, found.traced, self._arrangement, self._hosts
        )
        self._pipeline.on_spans = self._record_operations
        self.recorder.begin_steps()

    def _take_up_from(self, path: Path) -> None:
        """A model that no worker holds as a whole has its tensors read later, one by one."""
        if self.parts.pieces is None:
            super()._take_up_from(path)
            return
        stored = checkpoints.open_stored(path)
        names = partial(checkpoints.check_names, self.parts.model, stored.model)
        self._take_up_progress(stored.step, stored.progress, names)
        self._stored = stored

    def _agree_on_start(self) -> None:
        """All workers start from rank 0's state; tensors in pieces follow once it is known who holds what."""
        if self.parts.pieces is None:
            super()._agree_on_start()
            return
        stored = self._stored
        told = broadcast_value(None if stored is None else [stored.step, dict(stored.progress)], 0)
        if told is not None and self.worker.rank != 0:
            self._take_up_progress(told[0], told[1], lambda: None)
        elif told is None:
            self.step, self.position = 0, Position()

    def _take_stretch(self, steps: list[GlobalBatch]) -> bool:
        """Take the steps through the pipeline; it is empty at their end."""
        usual, many = self.settings.data.batch_size, self._arrangement.microbatches
        pieces = [cut_step(self.step + i, b, many, usual) for i, b in enumerate(steps)]
        together = [m for piece in pieces for m in piece]
        if self._arrangement.schedule.synchronous:
            # Read a step later: nobody waits for the sum of the step that has just ended.
            slack = self._arrangement.microbatches
            notes = DeferredStepReduce(self.worker, together, slack, self._recorder_of(steps))
            done = self._take_batches(pieces, notes)
        else:
            notes = DeferredStepReduce(
                self.worker, together, self._arrangement.slack(), self._recorder_of(steps)
            )
            done = self._take_stream(together, notes)
        notes.finish(self.step + done)
        self.step += done
        self.position = steps[done - 1].after if done else self.position
        self._record_operations()
        return notes.stopped or done < len(steps)

    def _take_batches(self, pieces: list[list[Microbatch]], notes: DeferredStepReduce) -> int:
        """One batch after the other, each with its update; how many were taken."""
        rank, arrangement = self.worker.rank, self._arrangement
        contents = self._fetch([m for piece in pieces for m in loaded_by(arrangement, rank, piece)])
        for done, piece in enumerate(pieces):
            if done and notes.stop_before(self.step + done):
                return done
            work = self._work(piece, lambda _: contents, lambda _: False)
            local = arrangement.local(len(piece), arrangement.pipeline_of(rank))
            self._pipeline.run(one_batch(arrangement, rank, local), work)
            notes.give(self.step + done, sum(float(loss) for loss in self._pipeline.losses.values()))
            self._pipeline.losses.clear()
        return len(pieces)

    def _take_stream(self, microbatches: list[Microbatch], notes: DeferredStepReduce) -> int:
        """All steps without draining in between; how many were taken."""
        work = self._work(microbatches, self._fetch, notes.stop_before)
        ops = stream(self._arrangement, self.worker.rank, work)
        # Losses belong to the last of its stages, if to any.
        stage = max(self._arrangement.stages_of(self.worker.rank))
        self._pipeline.run(notes.watch(ops, stage, work, self._pipeline.losses), work)
        self._pipeline.losses.clear()
        return work.end - self.step

    def _work(self, microbatches: list[Microbatch], fetch: Any, stop_before: Any) -> MicrobatchSource:
        return MicrobatchSource(
            self._arrangement,
            self.worker.rank,
            microbatches,
            seed=self.settings.seed,
            fetch=fetch,
            set_lr=self._set_lr,
            stop_before=stop_before,
        )

    def _fetch(self, microbatches: list[Microbatch]) -> Iterator[Any]:
        """The contents of microbatches of the training split, on this worker's device."""
        return self._load(self.parts.train_set, microbatches)

    def _load(self, dataset: Any, microbatches: list[Microbatch]) -> Iterator[Any]:
        parts, data = self.parts, self.settings.data
        found = loader.load(
            dataset,
            (GlobalBatch(m.epoch, tuple(m.samples), Position()) for m in microbatches),
            seed=self.settings.seed,
            rank=0,
            world_size=1,
            loaders=data.loaders if microbatches else 0,
            pin=parts.device.type == "cuda",
        )
        return (loader.to_device(batch.content, parts.device, parts.dtype) for batch in found)

    def _set_lr(self, step: int) -> None:
        factor = self._lr_factor(step)
        for group, base in zip(self._pipeline.optimizer.param_groups, self._pipeline.base_lrs):
            group["lr"] = base * factor

    def _recorder_of(self, steps: list[GlobalBatch]) -> Callable[[int, float, float], None]:
        """Writes each step of a stretch down as its loss becomes known."""
        first = self.step

        def record(step: int, loss: float, ended: float) -> None:
            batch = steps[step - first]
            lr, count = self.parts.base_lrs[0] * self._lr_factor(step), len(batch.samples)
            value = torch.tensor(loss, dtype=torch.float64)
            self.recorder.step(step + 1, batch.epoch, value, lr, count, ended)

        return record

    def _average_buffers(self) -> None:
        self._pipeline.average_buffers()

    def _measure(self) -> dict[str, float]:
        """Mean loss and metric over the test split, sent through the pipeline."""
        settings, arrangement, tests = self.settings, self._arrangement, self.parts.test_set
        assert tests is not None
        size = settings.evaluate.batch_size or settings.data.batch_size
        each = max(1, size // arrangement.microbatches)
        pieces = [
            Microbatch(0, i, 0, batch.samples)
            for i, batch in enumerate(in_order(tests.count(settings.seed), each))
        ]
        work = self._work(pieces, lambda mine: self._load(tests, mine), lambda _: False)
        sums = torch.zeros(4, dtype=torch.float64)

        def measure(output: Any, target: Any, microbatch: int) -> None:
            count = len(work.microbatch(microbatch).samples)
            sums.add_(sums_of(self.parts, output, target, count))

        local = arrangement.local(len(pieces), arrangement.pipeline_of(self.worker.rank))
        self._pipeline.evaluate(local, work, measure)
        return mean_of_all(self.parts, sums, self.worker.world_size)

    def _save(self, metrics: dict[str, float]) -> None:
        super()._save(metrics)
        self._gathered = ({}, {})
        if self._written is not None:
            # A checkpoint has taken them, unless it was not to be written.
            self._written.model.unlink(missing_ok=True)
            self._written.optimizer.unlink(missing_ok=True)
            self._written = None

    def _gather_state(self) -> None:
        super()._gather_state()
        if self.parts.pieces is None:
            self._gathered = self._pipeline.gather_state()
        else:
            self._written = self._write_in_turn()

    def _write_in_turn(self) -> checkpoints.Written | None:
        """Rank 0 writes what all workers hold as it comes, so that nobody holds all of it."""
        model, optimizer = self._pipeline.state()
        if self.worker.rank == 0:
            own = self.parts.model.state_dict()
            model |= {name: own[name] for name in self._unused if name in own}
        folder = self.folder.checkpoints
        paths = folder / ".step-model.part", folder / ".step-optimizer.part"
        for path, tensors in zip(paths, (model, optimizer)):
            specs, found = gather_in_turn(tensors, 0)
            if self.worker.rank == 0:
                checkpoints.write_in_turn(path, specs, found)
        return checkpoints.Written(*paths, self._tied) if self.worker.rank == 0 else None

    def _state(self) -> checkpoints.Checkpoint:
        """What all workers hold together, where they have just brought it here; else the start's."""
        if self._written is not None:
            return replace(super()._state(), model={}, optimizer={}, written=self._written)
        return with_gathered(super()._state(), self._gathered, self._tied)

    def _record_operations(self) -> None:
        """Write down when each operation of the stretch began and ended."""
        event = operations_event(self.step, self._pipeline.spans)
        self._pipeline.spans.clear()
        self._note(event)
        if self._events is not None:
            self._events.flush()
