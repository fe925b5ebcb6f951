"""One worker's part of a pipeline replica, whose workers run in lockstep."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plait.comm.lockstep import Lockstep
from plait.core.splits import split
from plait.data.sampler import mix
from plait.launch.run_dir import RunDir
from plait.launch.worker_process import Worker
from plait.pipeline.gradient_sync import check_untied
from plait.pipeline.layout import PipelineLayout, one_batch
from plait.pipeline.microbatches import microbatch_count
from plait.planner.schedules.operations import Update
from plait.schema.settings import TrainSettings
from plait.schema.sync_options import options_among
from plait.sync.averaging.base import Averaging
from plait.sync.averaging.optimizer_state import rest_of_state
from plait.training.components import Components
from plait.training.engines.averaging import PREFIX, averages_gradients, make_averaging, sources_from
from plait.training.engines.pipeline_setup import State, open_pipeline, prepare_together
from plait.training.engines.replica_layout import replica_layouts
from plait.training.evaluate import sums_of
from plait.training.optimizers.lr_schedule import set_lr

# A partner that is late by this many steps may itself wait for this replica in another stage.
OVERDUE = 1.0


@dataclass
class ReplicaWork:
    """The microbatches of one update of a replica: samples of each, and the seeds of random numbers."""

    sizes: Sequence[int]
    seeds: tuple[int, ...]
    contents: Iterator[Any]

    def content(self, microbatch: int) -> tuple[Any, Any]:
        inputs, target = next(self.contents)
        return inputs, target

    def weight(self, microbatch: int) -> float:
        return self.sizes[microbatch] / sum(self.sizes)

    def samples(self, microbatch: int) -> tuple[int, ...]:
        return (self.sizes[microbatch],)

    def seed(self, microbatch: int, stage: int) -> int:
        return mix(*self.seeds, microbatch, stage)

    def set_rate(self, update: Update) -> None:
        pass

    def factor(self, update: Update) -> float:
        return 1.0


class PipelineReplica:
    """This worker's part of a pipeline replica; all workers of the world make one together.

    All workers of the replica call each method together. The worker of the first stage has the data.
    """

    def __init__(
        self,
        worker: Worker,
        settings: TrainSettings,
        parts: Components,
        pipeline_layout: PipelineLayout,
        hosts: Sequence[str],
        prefix: str = PREFIX,
        folder: RunDir | None = None,
    ) -> None:
        replicas = replica_layouts(pipeline_layout)
        self.number = next(i for i, replica in enumerate(replicas) if worker.rank in replica.workers)
        self.pipeline_layout = replicas[self.number]
        self._first = self.pipeline_layout.layout.worker(0, 0)
        self._last = self.pipeline_layout.layout.worker(self.pipeline_layout.last, 0)
        self._rank, self._settings, self._parts = worker.rank, settings, parts
        self._loss = 0.0
        self.checked, self.pipeline_layout = prepare_together(
            worker, settings, parts, self.pipeline_layout, folder
        )
        traced = self.checked.traced
        check_untied(traced, self.pipeline_layout, "which average apart from each other under this sync")
        self._channels, self.pipeline = open_pipeline(
            worker, settings, parts, traced, self.pipeline_layout, hosts
        )
        others = [w for w in self.pipeline_layout.workers if w != self._first]
        self.lockstep = Lockstep(self._channels, worker.rank, [self._first, *others])
        stages = self.pipeline_layout.stages_of(worker.rank)
        # The workers that hold the same stage in the other replicas.
        self.peers = tuple(replica.layout.worker(stages[0], 0) for replica in replicas)
        near = [hosts[peer] for peer in self.peers]
        self.averaging = self._open_averaging(worker, near, f"{prefix}/stage{stages[0]}")

    def _open_averaging(self, worker: Worker, hosts: Sequence[str], prefix: str) -> Averaging:
        settings, pipeline = self._settings, self.pipeline
        options = options_among(settings.sync.kind, settings.sync.options, len(hosts))
        # A stage without weights averages a number, so that its workers meet like all others.
        weights = list(pipeline.parameters.values()) or [torch.nn.Parameter(torch.zeros(1))]
        buffers = [buffer for module in pipeline.modules.values() for buffer in module.buffers()]
        sources = sources_from(weights, buffers, pipeline.optimizer, options)
        if averages_gradients(options):
            pipeline.before_update = self._agree
        else:
            pipeline.after_update = self._agree
        rest = rest_of_state(worker.store, prefix, weights, buffers, pipeline.optimizer, self._parts.scaler)
        return make_averaging(
            worker,
            hosts,
            sources,
            options,
            settings.seed,
            prefix,
            self.number,
            OVERDUE,
            when_synchronized=rest,
            ranks=self.peers,
        )

    def update(self, step: int, share: int, count: int, lr: float, contents: Iterable[Any] = ()) -> float:
        """Update on `count` samples and average; the loss, on the first worker, which has the `contents`."""
        pieces = self.microbatch_count(count)
        sizes = [len(own) for own in split(count, pieces)]
        set_lr(self.pipeline.optimizer, self.pipeline.base_lrs, lr)
        work = ReplicaWork(sizes, (self._settings.seed, step, share), iter(contents))
        self.pipeline.run(one_batch(self.pipeline_layout, self._rank, pieces), work)
        if self._rank == self._first != self._last:
            self._loss = float(self.lockstep.receive_from(self._last, "a batch's loss")[0][0])
        return self._loss

    def microbatch_count(self, count: int) -> int:
        """How many microbatches a share of `count` samples makes."""
        usual = math.ceil(self._settings.data.batch_size / len(self.peers))
        return microbatch_count(count, usual, self.pipeline_layout.microbatches)

    def _agree(self) -> None:
        """Send what others of the replica wait for, then average with the same stage of other replicas."""
        if self._rank == self._last:
            self._loss = sum(float(loss) for loss in self.pipeline.losses.values())
            self.pipeline.losses.clear()
            if self._rank != self._first:
                self.lockstep.send_to_first([torch.tensor([self._loss], dtype=torch.float64)])
        self.averaging.after_update()

    def evaluate(self, counts: Sequence[int], contents: Iterable[Any] = ()) -> Tensor:
        """The sums over pieces of the test split with `counts` samples, on the first worker."""
        sums = torch.zeros(4, dtype=torch.float64)

        def measure(output: Any, target: Any, microbatch: int) -> None:
            sums.add_(sums_of(self._parts, output, target, counts[microbatch]))

        self.pipeline.evaluate(len(counts), ReplicaWork(counts, (0,), iter(contents)), measure)
        if self._rank == self._last != self._first:
            self.lockstep.send_to_first([sums])
        elif self._rank == self._first != self._last:
            sums = self.lockstep.receive_from(self._last, "the sums of an evaluation")[0][0]
        return sums

    def gather_state(self) -> State:
        """The model's and the optimizer's state by name; of the whole model on the first worker."""
        model, optimizer = self.pipeline.state()
        if self._rank != self._first:
            note = json.dumps([list(model), list(optimizer)])
            self.lockstep.send_to_first([*model.values(), *optimizer.values()], note)
            return model, optimizer
        for other in self.lockstep.others:
            tensors, note = self.lockstep.receive_from(other, "the state of its stage")
            names, paths = json.loads(note)
            model |= dict(zip(names, tensors))
            optimizer |= dict(zip(paths, tensors[len(names) :]))
        return model, optimizer

    def close(self) -> None:
        """End the links to the other workers."""
        self.averaging.close()
        self._channels.close()
