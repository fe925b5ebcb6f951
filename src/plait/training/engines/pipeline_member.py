"""Pipelines side by side: each is a member of decentralized training, whose workers run in lockstep."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from plait.core.events import Event
from plait.data import loader
from plait.launch.worker_process import Worker
from plait.pipeline.executor import Pipeline
from plait.pipeline.op_timings import operations_event
from plait.schema.sync_options import COLLECTIVE
from plait.sync.averaging.base import Averaging, NoAveraging
from plait.training.checkpoint import EngineState
from plait.training.engines.averaging import PREFIX
from plait.training.engines.member import Member, MemberInit
from plait.training.engines.pipeline import evaluation_sums
from plait.training.engines.pipeline_replica import PipelineReplica, in_microbatches
from plait.training.engines.replica_layout import in_order
from plait.training.monitoring.share_monitor import ShareMonitor
from plait.training.stages.replica_stages import ReplicaStages


def join_pipelines(
    worker: Worker,
    init: MemberInit,
    stages: ReplicaStages,
    on_event: Callable[[Event], None],
    warn: Callable[[str], None],
    monitor: ShareMonitor | None,
) -> Member:
    """This worker's member: its pipeline, or, where none has a place for it, a worker that waits.

    `on_event` is told of when operations began and ended, `warn` of workers that wait.
    """
    kind = init.trials[0].settings.sync.kind
    pipeline = stages.open_replica(with_groups=kind in COLLECTIVE)
    each = len(stages.replicas[0].workers)
    if waiting := worker.world_size % each:
        warn(f"{waiting} of {worker.world_size} workers wait: each pipeline of the plan has {each}")
    if pipeline is None:
        return WaitingWorker(worker, init, stages)
    try:
        return PipelineMember(worker, init, stages, pipeline, on_event, monitor)
    except BaseException:
        # What it holds may be needed by those that are left.
        with contextlib.suppress(RuntimeError):
            stages.close(pipeline)
        raise


class PipelineMember:
    """A member of decentralized training that is a pipeline of workers, of which this is one."""

    def __init__(
        self,
        worker: Worker,
        init: MemberInit,
        stages: ReplicaStages,
        pipeline: Pipeline,
        on_event: Callable[[Event], None],
        monitor: ShareMonitor | None,
    ) -> None:
        (trial,) = init.trials
        self._trial, self._stages, self._group, self._on_event = trial, stages, init.group, on_event
        self._pipeline, self._replicas = pipeline, len(stages.replicas)
        self._replica = replica = PipelineReplica(
            worker,
            trial.settings,
            stages.components.scaler,
            stages.replicas,
            pipeline,
            stages.channels,
            f"{PREFIX}/{init.name}",
            trial.step,
            stages.group,
        )
        self.place, self.averaging = replica.number, replica.averaging
        self.workers = tuple(worker.memberships.current.members[rank] for rank in replica.peers)
        # Times alone: norms would have to be those of all its stages.
        self.monitor = monitor
        for path, tensor in replica.sync_state().items():
            if path in stages.sync:
                tensor.copy_(stages.sync[path])

    @property
    def is_first(self) -> bool:
        return self._replica.lockstep.is_first

    def from_first(self, find: Callable[[], Any]) -> Any:
        return self._replica.lockstep.from_first(find)

    def update(
        self, steps: Sequence[int], share: int, batches: Sequence[loader.Batch], factors: Sequence[float]
    ) -> Tensor:
        (step,), (batch,), (factor,) = steps, batches, factors
        usual = math.ceil(self._trial.batch.size / self._replicas)
        most = self._replica.pipeline_layout.microbatches
        sizes, contents = in_microbatches(batch, usual, most, self._stages.components)
        loss = self._replica.update(step, share, sizes if batch.count else (), factor, contents)
        return torch.tensor([loss], dtype=torch.float64)

    def weight_sums(self) -> list[float]:
        return []

    def synchronize(self) -> None:
        self._on_event(operations_event(self._trial.step, self._pipeline.timings))
        self._pipeline.timings.clear()
        self.averaging.synchronize()

    def sums_over(self, slots: Sequence[int], share: int, shares: int) -> Tensor:
        return evaluation_sums(self._stages, self._pipeline, [self._trial], slots)

    def state(self, slot: int) -> EngineState | None:
        # All pipelines hold the same.
        local = (self._pipeline.state(), self._replica.sync_state()) if self.place == 0 else (({}, {}), {})
        return self._stages.gather(*local, self._group)

    def leave_to(self, staying: Sequence[int]) -> None:
        self._stages.sync = self._replica.sync_state()
        self._stages.leave_to(staying)

    def held_state(self) -> list[EngineState]:
        return [EngineState({}, {})]

    def close(self) -> None:
        self._stages.sync = self._replica.sync_state()
        try:
            self.averaging.close()
        finally:
            self._stages.close(self._pipeline)


class WaitingWorker:
    """A worker that no pipeline has a place for: it takes no work, and waits until there is one."""

    is_first = False

    def __init__(self, worker: Worker, init: MemberInit, stages: ReplicaStages) -> None:
        self._stages, self._group = stages, init.group
        self.averaging: Averaging = NoAveraging()
        self.monitor: ShareMonitor | None = None
        firsts = [in_order(replica)[0] for replica in stages.replicas]
        self.workers = tuple(worker.memberships.current.members[rank] for rank in firsts)
        self.place = len(self.workers)

    def from_first(self, find: Callable[[], Any]) -> Any:
        raise AssertionError

    def update(
        self, steps: Sequence[int], share: int, batches: Sequence[loader.Batch], factors: Sequence[float]
    ) -> Tensor:
        raise AssertionError

    def weight_sums(self) -> list[float]:
        return []

    def synchronize(self) -> None:
        return

    def sums_over(self, slots: Sequence[int], share: int, shares: int) -> Tensor:
        return torch.zeros(len(slots), 4, dtype=torch.float64)

    def state(self, slot: int) -> EngineState | None:
        return self._stages.gather(({}, {}), {}, self._group)

    def leave_to(self, staying: Sequence[int]) -> None:
        self._stages.leave_to(staying)

    def held_state(self) -> list[EngineState]:
        return [EngineState({}, {})]

    def close(self) -> None:
        self._stages.close_alone()
