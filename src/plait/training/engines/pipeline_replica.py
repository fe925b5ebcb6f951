"""One worker's part of a pipeline replica, whose workers run in lockstep and average with other replicas."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from plait.comm.channels import Channels
from plait.comm.lockstep import Lockstep
from plait.core.splits import split
from plait.data import loader
from plait.data.loader import Batch
from plait.launch.worker_process import Worker
from plait.pipeline.executor import Pipeline
from plait.pipeline.layout import PipelineLayout, one_batch
from plait.pipeline.microbatches import Microbatch, MicrobatchSource, microbatch_count
from plait.pipeline.named_state import Tensors
from plait.schema.settings import TrainSettings
from plait.schema.sync_options import options_among
from plait.sync.averaging.base import Averaging
from plait.sync.averaging.optimizer_state import rest_of_state
from plait.training.components import Components
from plait.training.engines.averaging import PREFIX, averages_gradients, make_averaging, sources_from
from plait.training.engines.replica_layout import in_order
from plait.training.optimizers.lr_schedule import set_lr

# A partner that is late by this many steps may itself wait for this replica in another stage.
OVERDUE = 1.0


def in_microbatches(
    batch: Batch, usual: int, most: int, components: Components
) -> tuple[list[int], Iterator[Any]]:
    """The sizes of the microbatches of a pipeline's batch, and their contents, for the first stage only.

    A batch of `usual` samples has `most` microbatches.
    """
    count = microbatch_count(batch.count, usual, most)
    cut = (content for content, _ in loader.cut(batch.content, batch.count, count))
    contents = (loader.to_device(each, components.device, components.dtype) for each in cut)
    return [len(rows) for rows in split(batch.count, count)], contents


def take_batch(
    pipeline: Pipeline, step: int, share: int, sizes: Sequence[int], seed: int, contents: Iterable[Any]
) -> None:
    """Update on microbatches of `sizes` samples, which are `share` of a step.

    The worker of the first stage has their `contents`.
    """
    layout, first = pipeline.pipeline_layout, share * pipeline.pipeline_layout.microbatches
    microbatches = [Microbatch(step, first + i, 0, range(count)) for i, count in enumerate(sizes)]
    work = MicrobatchSource(
        layout, pipeline.rank, microbatches, seed=seed, fetch=lambda local: iter(contents)
    )
    pipeline.run(one_batch(layout, pipeline.rank, len(sizes)), work)


class PipelineReplica:
    """This worker's part of one of the `replicas`, with its open pipeline; all workers make one together.

    All workers of a replica call `update` together; that of the first stage has the data. Workers with the
    same stages share `prefix` in the store and, where the sync needs one, a process `group`. The run goes on
    after `step` steps.
    """

    def __init__(
        self,
        worker: Worker,
        settings: TrainSettings,
        scaler: torch.amp.GradScaler,
        replicas: Sequence[PipelineLayout],
        pipeline: Pipeline,
        channels: Channels,
        prefix: str = PREFIX,
        step: int = 0,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._rank, self._settings = worker.rank, settings
        self.number = next(i for i, replica in enumerate(replicas) if worker.rank in replica.workers)
        self.pipeline_layout, self.pipeline = replicas[self.number], pipeline
        workers = in_order(self.pipeline_layout)
        self._first = workers[0]
        self._last = self.pipeline_layout.layout.worker(self.pipeline_layout.last, 0)
        self.lockstep = Lockstep(channels, worker.rank, workers)
        position = workers.index(worker.rank)
        # The workers that hold the same stages in all replicas.
        self.peers = tuple(in_order(replica)[position] for replica in replicas)
        self._options = options_among(settings.sync.kind, settings.sync.options, len(replicas))
        self._loss = 0.0
        self.averaging = self._open_averaging(worker, scaler, f"{prefix}/stage{position}", step, group)

    def _open_averaging(
        self,
        worker: Worker,
        scaler: torch.amp.GradScaler,
        prefix: str,
        step: int,
        group: dist.ProcessGroup | None,
    ) -> Averaging:
        pipeline, options = self.pipeline, self._options
        # A stage without weights averages a number, so that its workers meet like all others.
        weights = list(pipeline.parameters.values()) or [torch.nn.Parameter(torch.zeros(1))]
        buffers = [buffer for module in pipeline.modules.values() for buffer in module.buffers()]
        if averages_gradients(options):
            pipeline.before_update = self._agree
        else:
            pipeline.after_update = self._agree
        return make_averaging(
            worker,
            [worker.hosts[peer] for peer in self.peers],
            sources_from(weights, buffers, pipeline.optimizer, options),
            options,
            self._settings.seed,
            prefix,
            self.number,
            OVERDUE,
            step,
            rest_of_state(worker.store, prefix, weights, buffers, pipeline.optimizer, scaler),
            self.peers,
            group,
        )

    def update(
        self, step: int, share: int, sizes: Sequence[int], factor: float, contents: Iterable[Any] = ()
    ) -> float:
        """Update on microbatches of `sizes` samples and average; the loss, on the first worker.

        It has the `contents` of the microbatches. The learning rates are the job's times `factor`. Without
        samples this worker averages only.
        """
        if not sizes:
            if not averages_gradients(self._options):
                self.averaging.after_update()
            return 0.0
        set_lr(self.pipeline.optimizer, self.pipeline.base_lrs, factor)
        take_batch(self.pipeline, step, share, sizes, self._settings.seed, contents)
        if self._rank == self._first != self._last:
            self._loss = float(self.lockstep.receive_from(self._last, "a batch's loss")[0][0])
        return self._loss

    def _agree(self) -> None:
        """Send what others of the replica wait for, then average with the same stages of other replicas."""
        if self._rank == self._last:
            self._loss = sum(float(loss) for loss in self.pipeline.losses.values())
            self.pipeline.losses.clear()
            if self._rank != self._first:
                self.lockstep.send_to_first([torch.tensor([self._loss], dtype=torch.float64)])
        self.averaging.after_update()

    def sync_state(self) -> Tensors:
        """What the sync keeps for this worker's weights, by their names."""
        return {
            f"{name}/{key}": tensor
            for key, tensors in self.averaging.state().items()
            for name, tensor in zip(self.pipeline.parameters, tensors)
        }
