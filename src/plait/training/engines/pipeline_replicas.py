"""Pipelines side by side: each is a member of decentralized training, whose workers run in lockstep."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from plait.core.errors import LostPeer
from plait.core.events import Event
from plait.data import loader
from plait.data.sampler import share
from plait.launch.run_dir import RunDir
from plait.launch.worker_process import Worker
from plait.pipeline.layout import PipelineLayout
from plait.pipeline.named_state import tied_aliases
from plait.pipeline.op_timings import operations_event
from plait.training.change.members import CannotGoOn
from plait.training.checkpoint import EngineState
from plait.training.components import Components
from plait.training.engines.averaging import PREFIX
from plait.training.engines.member import MemberInit
from plait.training.engines.pipeline_replica import PipelineReplica
from plait.training.engines.pipeline_setup import report_verification, with_gathered
from plait.training.engines.replica_layout import among
from plait.training.evaluate import in_order
from plait.training.metrics import MetricsLogger
from plait.training.monitoring.asked import wants_norms
from plait.training.monitoring.share_monitor import ShareMonitor


class PipelineMember:
    """A member of decentralized training that is a pipeline of workers, of which this is one.

    `layout` is that of all pipelines. `on_event` is told of when operations began and ended.
    """

    def __init__(
        self,
        worker: Worker,
        init: MemberInit,
        layout: PipelineLayout,
        folder: RunDir,
        recorder: MetricsLogger,
        on_event: Callable[[Event], None],
        monitor: ShareMonitor | None,
    ) -> None:
        (trial,), components = init.trials, init.components
        assert isinstance(components, Components)
        layout = among(layout, worker.memberships.current.members)
        if worker.rank not in layout.workers:
            raise CannotGoOn("another worker of this one's pipeline is lost", LostPeer.GONE)
        self._trial, self._components, self._on_event = trial, components, on_event
        self._replica = PipelineReplica(
            worker, trial.settings, components, layout, worker.hosts, f"{PREFIX}/{init.name}", folder
        )
        self.place, self.averaging = self._replica.number, self._replica.averaging
        self.workers = tuple(worker.memberships.current.members[rank] for rank in self._replica.peers)
        self._tied = tied_aliases(components.model)
        report_verification(recorder, self._replica.checked)
        # Times alone: norms would have to be those of all its stages.
        self.monitor = monitor
        if monitor is not None and wants_norms(trial.settings):
            recorder.warn("monitor: pipelines side by side have no noise scale and no variance")

    @property
    def is_first(self) -> bool:
        return self._replica.lockstep.is_first

    def from_first(self, find: Callable[[], Any]) -> Any:
        return self._replica.lockstep.from_first(find)

    def update(
        self, steps: Sequence[int], share: int, batches: Sequence[loader.Batch], factors: Sequence[float]
    ) -> Tensor:
        (step,), (batch,), (factor,) = steps, batches, factors
        if not batch.count:
            return torch.zeros(1, dtype=torch.float64)
        replica, contents = self._replica, iter(())
        if self.is_first:
            microbatches = loader.cut(batch.content, batch.count, replica.microbatch_count(batch.count))
            contents = self._on_device(content for content, _ in microbatches)
        loss = replica.update(step, share, batch.count, factor, contents)
        return torch.tensor([loss], dtype=torch.float64)

    def _on_device(self, contents: Iterator[Any]) -> Iterator[Any]:
        device, dtype = self._components.device, self._components.dtype
        return (loader.to_device(content, device, dtype) for content in contents)

    def weight_sums(self) -> list[float]:
        return []

    def synchronize(self) -> None:
        pipeline = self._replica.pipeline
        self._on_event(operations_event(self._trial.step, pipeline.timings))
        pipeline.timings.clear()
        self.averaging.synchronize()

    def sums_over(self, slots: Sequence[int], share_: int, shares: int) -> Tensor:
        settings, tests = self._trial.settings, self._components.test_set
        assert tests is not None
        size = settings.evaluate.batch_size or settings.data.batch_size
        batches = [b for b in in_order(tests.count(settings.seed), size) if share(b.samples, share_, shares)]
        counts = [len(share(batch.samples, share_, shares)) for batch in batches]
        own = iter(batches) if self.is_first else iter(())
        loaders, pin = settings.data.loaders, self._components.device.type == "cuda"
        found = loader.load(
            tests, own, seed=settings.seed, rank=share_, world_size=shares, loaders=loaders, pin=pin
        )
        return self._replica.evaluate(counts, self._on_device(batch.content for batch in found)).unsqueeze(0)

    def state(self, slot: int) -> EngineState:
        return with_gathered(self._components.state(), self._replica.gather_state(), self._tied)

    def held_state(self) -> list[EngineState]:
        """The stages of this worker: what has trained of its model and optimizer."""
        return [EngineState(*self._replica.pipeline.state())]

    def close(self) -> None:
        self._replica.close()
