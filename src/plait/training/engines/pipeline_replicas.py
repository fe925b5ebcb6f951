"""Pipelines side by side: each is a member of decentralized training, whose workers run in lockstep."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from plait.data import loader
from plait.data.sampler import share
from plait.pipeline.layout import PipelineLayout
from plait.pipeline.named_state import tied_aliases
from plait.pipeline.op_timings import operations_event
from plait.sync.averaging.base import Averaging
from plait.training.checkpoint import Checkpoint, EngineState
from plait.training.engines.pipeline_replica import PipelineReplica
from plait.training.engines.pipeline_setup import report_verification, with_gathered
from plait.training.engines.replica_layout import replica_layouts
from plait.training.engines.whole_model import load_whole
from plait.training.evaluate import in_order
from plait.training.monitoring.asked import is_monitored, wants_norms
from plait.training.monitoring.own_pace import ShareMonitor
from plait.training.run import Run


class PipelineMember:
    """A member of decentralized training that is a pipeline of workers, of which this is one."""

    averaging: Averaging

    def __init__(self, run: Run, hosts: Sequence[str], layout: PipelineLayout) -> None:
        self._run = run
        self._hosts = hosts
        self._layout = layout
        self._pipelines = [replica.workers for replica in replica_layouts(layout)]
        self.place = next(i for i, workers in enumerate(self._pipelines) if run.worker.rank in workers)
        self.places = len(self._pipelines)
        self._tied = tied_aliases(run.parts.model)
        # Times alone: norms would have to be those of all its stages.
        self.monitor = ShareMonitor(run) if is_monitored(run.settings) else None

    @property
    def is_first(self) -> bool:
        return self._replica.lockstep.is_first

    def from_first(self, find: Callable[[], Any]) -> Any:
        return self._replica.lockstep.from_first(find)

    def workers_at(self, place: int) -> tuple[int, ...]:
        return self._pipelines[place]

    def load(self, state: Checkpoint) -> None:
        load_whole(self._run.parts, state)

    def held_state(self) -> EngineState:
        return self._run.parts.state()

    def open(self) -> bool:
        run = self._run
        self._replica = PipelineReplica(
            run.worker, run.settings, run.parts, self._layout, self._hosts, folder=run.folder
        )
        self.averaging = self._replica.averaging
        report_verification(self._run.metrics, self._replica.checked)
        if self.monitor is not None and wants_norms(self._run.settings):
            self._run.metrics.warn("monitor: pipelines side by side have no noise scale and no variance")
        # Links between workers of different hosts go through the world's process group.
        return len(set(self._hosts)) > 1

    def update(self, step: int, share: int, batch: loader.Batch, factor: float) -> Tensor:
        if not batch.count:
            return torch.zeros((), dtype=torch.float64)
        replica, contents = self._replica, iter(())
        if self.is_first:
            pieces = loader.cut(batch.content, batch.count, replica.microbatch_count(batch.count))
            contents = self._on_device(content for content, _ in pieces)
        loss = replica.update(step, share, batch.count, factor, contents)
        return torch.tensor(loss, dtype=torch.float64)

    def _on_device(self, contents: Iterator[Any]) -> Iterator[Any]:
        parts = self._run.parts
        return (loader.to_device(content, parts.device, parts.dtype) for content in contents)

    def weight_sums(self) -> list[float]:
        return []

    def synchronize(self) -> tuple[int, ...]:
        step, pipeline = self._run.trial.step, self._replica.pipeline
        self._run.note(operations_event(step, pipeline.timings))
        pipeline.timings.clear()
        return self.averaging.synchronize()

    def sums_over(self, share_: int, shares: int) -> Tensor:
        settings, tests = self._run.settings, self._run.parts.test_set
        assert tests is not None
        size = settings.evaluate.batch_size or settings.data.batch_size
        batches = [b for b in in_order(tests.count(settings.seed), size) if share(b.samples, share_, shares)]
        counts = [len(share(batch.samples, share_, shares)) for batch in batches]
        own = iter(batches) if self.is_first else iter(())
        found = self._run.load(tests, own, share_, shares)
        return self._replica.evaluate(counts, self._on_device(batch.content for batch in found))

    def state(self) -> EngineState:
        return with_gathered(self._run.parts.state(), self._replica.gather_state(), self._tied)

    def close(self) -> None:
        self._replica.close()
