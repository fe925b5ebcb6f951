"""One worker's part of a pipeline replica, whose workers run in lockstep and average with other replicas."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plait.adapt.monitors.gradient_noise import GradientMoments
from plait.comm.channels import Channels
from plait.comm.lockstep import Lockstep
from plait.launcher.worker_process import Worker
from plait.pipeline.executor import PipelineExecutor
from plait.pipeline.gradient_sync import MembersOf
from plait.pipeline.layout import PipelineLayout, one_batch
from plait.pipeline.microbatches import Microbatch, MicrobatchSource
from plait.pipeline.named_state import Tensors
from plait.schema.settings import TrainSettings
from plait.schema.sync_options import COLLECTIVE, options_among
from plait.sync.averaging.base import WeightAveraging
from plait.sync.make_averaging import PREFIX, averages_gradients, make_averaging, sources_from, workers_of
from plait.training.engines.averaging_member import sync_states
from plait.training.engines.replica_layout import in_order
from plait.training.engines.train_step import AnyComponents
from plait.training.monitoring.share_monitor import ShareMonitor
from plait.training.monitoring.stage_norms import StageNorms

# A partner that is late by this many steps may itself wait for this replica in another stage.
OVERDUE = 1.0


class PipelineReplica:
    """This worker's part of one of the `replicas`, with its open pipeline; all workers make one together.

    All workers of a replica call `update` together; that of the first stage has the data. Workers with the
    same stages share `prefix` in the store and, where the sync needs one, a process group by `members_of`.
    The run goes on after `step` steps. The optimizer of `components` is the pipeline's. `monitor` measures
    updates, if given.
    """

    def __init__(
        self,
        worker: Worker,
        settings: TrainSettings,
        components: AnyComponents,
        replicas: Sequence[PipelineLayout],
        pipeline: PipelineExecutor,
        channels: Channels,
        prefix: str = PREFIX,
        step: int = 0,
        members_of: MembersOf | None = None,
        monitor: ShareMonitor | None = None,
    ) -> None:
        self._rank, self._settings, self._components = worker.rank, settings, components
        self.number = next(i for i, replica in enumerate(replicas) if worker.rank in replica.workers)
        self.pipeline_layout, self.pipeline = replicas[self.number], pipeline
        workers = in_order(self.pipeline_layout)
        self._first = workers[0]
        self._last = self.pipeline_layout.layout.worker(self.pipeline_layout.last, 0)
        self.lockstep = Lockstep(channels, worker.rank, workers)
        self.position = position = workers.index(worker.rank)
        # The workers that hold the same stages in all replicas.
        self.peers = tuple(in_order(replica)[position] for replica in replicas)
        self._options = options_among(settings.sync.kind, settings.sync.options, len(replicas))
        self._losses = torch.zeros(components.trials, dtype=torch.float64)
        self._monitor, self._samples = monitor, [0] * components.trials
        measures = monitor is not None and monitor.moments
        self._norms = StageNorms(pipeline, components.trials) if measures else None
        if monitor is not None:
            microbatches, averages = replicas[0].microbatches, averages_gradients(self._options)
            advice = f"parallel.microbatches: {2 * len(replicas)}"
            monitor.warn_without_parts(microbatches, advice, averages)
        members = members_of(self.peers) if members_of and settings.sync.kind in COLLECTIVE else None
        group = None if members is None else members.group
        self.averaging = self._open_averaging(worker, f"{prefix}/stage{position}", step, group)

    def _open_averaging(
        self, worker: Worker, prefix: str, step: int, group: dist.ProcessGroup | None
    ) -> WeightAveraging:
        pipeline, options = self.pipeline, self._options
        # A stage without weights averages a number, so that its workers meet like all others.
        weights = list(pipeline.parameters.values()) or [torch.nn.Parameter(torch.zeros(1))]
        buffers = [buffer for module in pipeline.modules.values() for buffer in module.buffers()]
        if averages_gradients(options):
            pipeline.before_update = self._agree
        else:
            pipeline.after_update = self._agree
        return make_averaging(
            workers_of(worker, self.peers, self.number, prefix, group),
            sources_from(weights, buffers, pipeline.optimizer, options),
            options,
            self._settings.seed,
            overdue=OVERDUE,
            step=step,
            when_synchronized=self._components.rest_of_state(worker.store, prefix, weights, buffers),
        )

    def update(
        self, microbatches: Sequence[Microbatch], fetch: Callable[[list[Microbatch]], Iterator[Any]]
    ) -> Tensor:
        """Update on microbatches of a step and average; the trials' losses, on the first worker.

        It has the contents of the microbatches by `fetch`. Without any this worker averages only.
        """
        layout, self._losses = self.pipeline_layout, torch.zeros_like(self._losses)
        if not microbatches:
            if not averages_gradients(self._options):
                self.averaging.after_update()
            return self._losses
        work = MicrobatchSource(
            layout,
            self._rank,
            microbatches,
            seed=self._settings.seed,
            fetch=fetch,
            weights_losses=not self._components.weights_losses,
        )
        operations = one_batch(layout, self._rank, len(microbatches))
        self._samples = [sum(each) for each in zip(*map(work.samples, range(len(microbatches))))]
        if self._norms is not None:
            self._norms.begin_batch(operations, work, self._samples)
        self.pipeline.run(operations, work)
        if self._rank == self._first != self._last:
            (self._losses,) = self.lockstep.receive_from(self._last, "a batch's losses")
        return self._losses

    def _agree(self) -> None:
        """Send what others of the replica wait for, then average with the same stages of other replicas."""
        if self._rank == self._last:
            self._losses = self.pipeline.take_losses().cpu()
            if self._rank != self._first:
                self.lockstep.send_to_first([self._losses])
        with contextlib.ExitStack() as around:
            if self._monitor is not None and self._norms is not None:
                self._add_moments(self._monitor, self._norms.moments.tolist())
                if averages_gradients(self._options):
                    squares = self._norms.whole_squares
                    measured = self._monitor.averaging_gradients(squares, self._samples, self.averaging)
                    around.enter_context(measured)
            self.averaging.after_update()

    def _add_moments(self, monitor: ShareMonitor, moments: Sequence[Sequence[float]]) -> None:
        """Give the monitor what this worker's stages measured of a share."""
        for sums, count, (variance, whole, missing) in zip(monitor.moments, self._samples, moments):
            if count and not missing:
                sums.add(GradientMoments(variance, whole - variance / count), whole)

    def sync_states(self) -> list[Tensors]:
        """What the sync keeps of each trial for this worker's weights, by their names."""
        return sync_states(self._components, list(self.pipeline.parameters), self.averaging)
