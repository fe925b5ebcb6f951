"""Pipelines side by side: their first workers take work at their own pace, the others follow."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from plait.core import run_events
from plait.data import loader
from plait.data.sampler import share
from plait.pipeline.layout import PipelineLayout
from plait.pipeline.named_state import further_names
from plait.pipeline.op_timings import operations_event
from plait.sync.averaging.base import Averaging
from plait.training.engine import EngineState, whole_state
from plait.training.engines.data_parallel import WholeModelStart
from plait.training.engines.decentralized import leave_world
from plait.training.engines.pipeline_replica import PipelineReplica
from plait.training.engines.pipeline_setup import report_verification, with_gathered
from plait.training.engines.replica_layout import replica_layouts
from plait.training.engines.throughput import ThroughputMeter
from plait.training.evaluate import in_order
from plait.training.monitoring.asked import is_monitored, wants_norms
from plait.training.monitoring.own_pace import ShareMonitor
from plait.training.run import Run


class LeadPipeline(WholeModelStart):
    """A member of decentralized training that is a pipeline of workers, of which this is the first."""

    averaging: Averaging

    def __init__(self, run: Run, hosts: Sequence[str], layout: PipelineLayout) -> None:
        super().__init__(run)
        self._hosts = hosts
        self._layout = layout
        self._pipelines = [replica.workers for replica in replica_layouts(layout)]
        self.place = next(i for i, workers in enumerate(self._pipelines) if run.worker.rank in workers)
        self.places = len(self._pipelines)
        self._tied = further_names(run.parts.model)
        # Times alone: norms would have to be those of all its stages.
        self.monitor = ShareMonitor(run) if is_monitored(run.settings) else None

    def workers_at(self, place: int) -> tuple[int, ...]:
        return self._pipelines[place]

    def open(self) -> bool:
        self._replica = _open(self._run, self._layout, self._hosts)
        self.averaging = self._replica.averaging
        report_verification(self._run.metrics, self._replica.checked)
        if self.monitor is not None and wants_norms(self._run.settings):
            self._run.metrics.warn("monitor: pipelines side by side have no noise scale and no variance")
        return _needs_world(self._hosts)

    def update(self, step: int, share: int, batch: loader.Batch, factor: float) -> Tensor:
        if not batch.count:
            return torch.zeros((), dtype=torch.float64)
        replica = self._replica
        replica.commands.send("update", step=step, share=share, count=batch.count, lr=factor)
        pieces = loader.cut(batch.content, batch.count, replica.pieces_of(batch.count))
        loss = replica.update(step, share, batch.count, factor, self._on_device(c for c, _ in pieces))
        return torch.tensor(loss, dtype=torch.float64)

    def _on_device(self, contents: Iterator[Any]) -> Iterator[Any]:
        parts = self._run.parts
        return (loader.to_device(content, parts.device, parts.dtype) for content in contents)

    def weight_sums(self) -> list[float]:
        return []

    def synchronize(self) -> tuple[int, ...]:
        step, pipeline = self._run.step, self._replica.pipeline
        self._replica.commands.send("synchronize", step=step)
        self._run.note(operations_event(step, pipeline.spans))
        pipeline.spans.clear()
        return self.averaging.synchronize()

    def sums_over(self, share_: int, shares: int) -> Tensor:
        settings, tests = self._run.settings, self._run.parts.test_set
        assert tests is not None
        size = settings.evaluate.batch_size or settings.data.batch_size
        batches = [b for b in in_order(tests.count(settings.seed), size) if share(b.samples, share_, shares)]
        counts = [len(share(batch.samples, share_, shares)) for batch in batches]
        found = self._run.load(tests, iter(batches), share_, shares)
        self._replica.commands.send("evaluate", counts=counts)
        return self._replica.evaluate(counts, self._on_device(batch.content for batch in found))

    def state(self) -> EngineState:
        self._replica.commands.send("gather")
        return with_gathered(whole_state(self._run.parts), self._replica.gather_state(), self._tied)

    def close(self) -> None:
        self._replica.commands.send("end")
        self._replica.close()


class FollowerEngine(WholeModelStart):
    """Carries out the commands of the first worker of this worker's pipeline, until that ends."""

    def __init__(self, run: Run, hosts: Sequence[str], layout: PipelineLayout) -> None:
        super().__init__(run)
        self._hosts = hosts
        self._layout = layout
        self._throughput = ThroughputMeter()

    def follow(self, ready: Callable[[], None]) -> None:
        """Link up with the other workers, call `ready`, and follow to the end of the run."""
        replica = _open(self._run, self._layout, self._hosts)
        leave_world(_needs_world(self._hosts))
        ready()
        while (command := replica.commands.receive())["kind"] != "end":
            self._carry_out(replica, command)
        replica.close()

    def _carry_out(self, replica: PipelineReplica, command: dict[str, Any]) -> None:
        match command["kind"]:
            case "update":
                replica.update(command["step"], command["share"], command["count"], command["lr"])
                self._throughput.count(command["step"] + 1, command["count"])
                if self._throughput.is_due():
                    self._run.note(self._throughput.event(replica.averaging.stats))
            case "synchronize":
                self._synchronize(replica, command["step"])
            case "evaluate":
                replica.evaluate(command["counts"])
            case "gather":
                replica.gather_state()

    def _synchronize(self, replica: PipelineReplica, step: int) -> None:
        run = self._run
        run.note(operations_event(step, replica.pipeline.spans))
        replica.pipeline.spans.clear()
        members = replica.averaging.synchronize()
        stats = replica.averaging.stats
        run.note(self._throughput.event(stats))
        peers = tuple(replica.peers[place] for place in members)
        run.note(run_events.Settled(step, peers, stats.distances[-1]))
        run.flush_events()


def _open(run: Run, layout: PipelineLayout, hosts: Sequence[str]) -> PipelineReplica:
    return PipelineReplica(run.worker, run.settings, run.parts, layout, hosts, folder=run.folder)


def _needs_world(hosts: Sequence[str]) -> bool:
    """Whether links between workers of different hosts go through the world's process group."""
    return len(set(hosts)) > 1
