"""Trainers of pipelines side by side: heads take work at their own pace, the others follow their head."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from plait.core import run_events
from plait.core.events import EventLog
from plait.data import loader
from plait.data.sampler import share
from plait.launch.run_dir import RunDir
from plait.launch.worker import Worker
from plait.pipeline.layout import PipelineLayout
from plait.pipeline.op_timings import operations_event
from plait.schema.settings import TrainSettings
from plait.sync.averaging.base import Averaging
from plait.training import checkpoint as checkpoints
from plait.training.components import Components
from plait.training.engines.decentralized import OwnPaceTrainer, leave_world
from plait.training.engines.pipeline_replica import PipelineReplica
from plait.training.engines.pipeline_setup import State, further_names, tell_of_verification, with_gathered
from plait.training.engines.replica_layout import columns_of
from plait.training.engines.throughput import ThroughputMeter
from plait.training.evaluate import in_order
from plait.training.interval_loop import StretchTrainer
from plait.training.loop import Trainer, keep_what_was_built


class HeadTrainer(OwnPaceTrainer):
    """Trains a pipeline of workers, of which this is the first, beside other pipelines."""

    def __init__(
        self,
        worker: Worker,
        settings: TrainSettings,
        parts: Components,
        folder: RunDir,
        hosts: Sequence[str],
        arrangement: PipelineLayout,
    ) -> None:
        self._whole = arrangement
        self._columns = [column.workers for column in columns_of(arrangement)]
        super().__init__(worker, settings, parts, folder, hosts)
        self._tied = further_names(parts.model)
        self._gathered: State = ({}, {})

    def _seat(self) -> tuple[int, int]:
        places = [place for place, workers in enumerate(self._columns) if self.worker.rank in workers]
        return places[0], len(self._columns)

    def _workers_at(self, place: int) -> tuple[int, ...]:
        return self._columns[place]

    def _make_engine(self) -> None:
        return None

    def begin(self, steps: int) -> None:
        """Get ready to go on: tell of the whole model, then cut it."""
        StretchTrainer.begin(self, steps)
        self._link()
        self.recorder.begin_steps()

    def _open(self) -> Averaging:
        self._column = PipelineReplica(
            self.worker, self.settings, self.parts, self._whole, self._hosts, folder=self.folder
        )
        tell_of_verification(self.recorder, self._column.checked)
        return self._column.averaging

    def _links_by_world(self) -> bool:
        return len(set(self._hosts)) > 1

    def _close(self) -> None:
        self._column.tell("end")
        self._column.close()

    def _update(self, step: int, share: int, batch: loader.Batch, factor: float) -> Tensor:
        if not batch.count:
            return torch.zeros((), dtype=torch.float64)
        self._column.tell("update", step=step, share=share, count=batch.count, lr=factor)
        pieces = loader.cut(batch.content, batch.count, self._column.pieces_of(batch.count))
        loss = self._column.update(step, share, batch.count, factor, self._on_device(c for c, _ in pieces))
        return torch.tensor(loss, dtype=torch.float64)

    def _on_device(self, contents: Iterator[Any]) -> Iterator[Any]:
        return (loader.to_device(content, self.parts.device, self.parts.dtype) for content in contents)

    def _settle(self) -> tuple[int, ...]:
        self._column.tell("settle", step=self.step)
        self._note(operations_event(self.step, self._column.pipeline.spans))
        self._column.pipeline.spans.clear()
        return self._averaging.settle()

    def _sums_over(self, share_: int, shares: int) -> Tensor:
        settings, tests = self.settings, self.parts.test_set
        assert tests is not None
        size = settings.evaluate.batch_size or settings.data.batch_size
        batches = [b for b in in_order(tests.count(settings.seed), size) if share(b.samples, share_, shares)]
        counts = [len(share(batch.samples, share_, shares)) for batch in batches]
        found = loader.load(
            tests,
            iter(batches),
            seed=settings.seed,
            rank=share_,
            world_size=shares,
            loaders=settings.data.loaders,
            pin=self.parts.device.type == "cuda",
        )
        self._column.tell("evaluate", counts=counts)
        return self._column.evaluate(counts, self._on_device(batch.content for batch in found))

    def _gather_state(self) -> None:
        if self._writes():
            self._column.tell("gather")
            self._gathered = self._column.gather_state()

    def _save(self, metrics: dict[str, float]) -> None:
        super()._save(metrics)
        self._gathered = ({}, {})

    def _state(self) -> checkpoints.Checkpoint:
        return with_gathered(super()._state(), self._gathered, self._tied)


class FollowerTrainer(Trainer):
    """Does what the head of this worker's pipeline orders, until it orders the end."""

    def __init__(
        self,
        worker: Worker,
        settings: TrainSettings,
        parts: Components,
        folder: RunDir,
        hosts: Sequence[str],
        arrangement: PipelineLayout,
    ) -> None:
        super().__init__(worker, settings, parts, folder)
        self._whole = arrangement
        self._hosts = hosts
        self._events = EventLog(folder.events(worker.rank), worker.rank)
        self._pace = ThroughputMeter()

    def _make_engine(self) -> None:
        return None

    def run(self, resume: bool) -> dict[str, Any]:
        """Follow the head to the end of the run; the record is kept elsewhere."""
        if resume:
            self._restore()
        self._agree_on_start()
        column = PipelineReplica(
            self.worker, self.settings, self.parts, self._whole, self._hosts, folder=self.folder
        )
        leave_world(needed=len(set(self._hosts)) > 1)
        keep_what_was_built()
        while (order := column.next_order())["kind"] != "end":
            self._carry_out(column, order)
        column.close()
        self._events.close()
        return {}

    def _carry_out(self, column: PipelineReplica, order: dict[str, Any]) -> None:
        match order["kind"]:
            case "update":
                column.update(order["step"], order["share"], order["count"], order["lr"])
                self._pace.count(order["step"] + 1, order["count"])
                if self._pace.is_due():
                    self._events.record(self._pace.event(column.averaging.tally))
            case "settle":
                self._settle(column, order["step"])
            case "evaluate":
                column.evaluate(order["counts"])
            case "gather":
                column.gather_state()

    def _settle(self, column: PipelineReplica, step: int) -> None:
        self._events.record(operations_event(step, column.pipeline.spans))
        column.pipeline.spans.clear()
        members = column.averaging.settle()
        tally = column.averaging.tally
        self._events.record(self._pace.event(tally))
        peers = tuple(column.peers[place] for place in members)
        self._events.record(run_events.Settled(step, peers, tally.distances[-1]))
        self._events.flush()
