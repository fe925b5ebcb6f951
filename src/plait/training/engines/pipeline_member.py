"""Pipelines side by side: each is a member of decentralized training, whose workers run in lockstep."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

from torch import Tensor

from plait.comm.channels import Channels
from plait.core.events import Event
from plait.data import loader
from plait.launcher.worker_process import Worker
from plait.pipeline.executor import PipelineExecutor
from plait.pipeline.gradient_sync import MembersOf
from plait.pipeline.layout import PipelineLayout
from plait.pipeline.microbatches import Microbatch
from plait.pipeline.named_state import Tensors
from plait.sync.averaging.base import NoAveraging, WeightAveraging
from plait.sync.make_averaging import PREFIX
from plait.training.checkpoint import EngineState
from plait.training.engines.averaging_member import Member, MemberInit, MemberState, load_sync
from plait.training.engines.pipeline import evaluation_totals
from plait.training.engines.pipeline_replica import PipelineReplica
from plait.training.engines.pipeline_setup import State
from plait.training.engines.replica_layout import in_order
from plait.training.evaluate import Totals
from plait.training.monitoring.share_monitor import ShareMonitor
from plait.training.stages.replica_stages import ReplicaStages
from plait.training.worker_group import WorkerGroup


class StagesSideBySide(MemberState, Protocol):
    """The stages of this worker where the pipelines `replicas` average; see `TrialStages` for the rest.

    The workers with the same stages have a process group by `members_of`, where the sync needs one.
    """

    layout: PipelineLayout
    replicas: tuple[PipelineLayout, ...]

    @property
    def channels(self) -> Channels: ...

    @property
    def members_of(self) -> MembersOf: ...

    def cut_share(
        self, steps: Sequence[int], share: int, batches: Sequence[loader.Batch], usual: Sequence[int]
    ) -> list[Microbatch]:
        """The microbatches of a share of the trials' steps, which usually have `usual` samples.

        A smaller share has fewer (`microbatch_count`), one without samples none.
        """

    def contents(self, microbatches: list[Microbatch]) -> Iterator[Any]: ...

    def local_state(self, slot: int, pipeline: PipelineExecutor) -> State: ...

    def gather(self, slot: int, local: State, group: WorkerGroup) -> EngineState | None: ...

    def leave_to(self, staying: Sequence[int]) -> None: ...

    def close(self, pipeline: PipelineExecutor) -> None: ...


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
    pipeline = stages.open_replica()
    each = len(stages.replicas[0].workers)
    if waiting := worker.world_size % each:
        warn(f"{waiting} of {worker.world_size} workers wait: each pipeline of the plan has {each}")
    if pipeline is None:
        return WaitingWorker(worker, init, stages, monitor)
    try:
        return PipelineMember(worker, init, stages, pipeline, on_event, monitor)
    except BaseException:
        # What it holds may be needed by those that are left.
        with contextlib.suppress(RuntimeError):
            stages.close(pipeline)
        raise


class PipelineMember:
    """A member of decentralized training that is a pipeline of workers, of which this is one.

    `pipeline` is this worker's part of it, of one trial or of fused trials; `monitor` measures its updates,
    if given.
    """

    def __init__(
        self,
        worker: Worker,
        init: MemberInit,
        stages: StagesSideBySide,
        pipeline: PipelineExecutor,
        on_event: Callable[[Event], None] = lambda event: None,
        monitor: ShareMonitor | None = None,
    ) -> None:
        self._trials, self._stages, self._group, self._on_event = init.trials, stages, init.group, on_event
        self._pipeline, first = pipeline, init.trials[0]
        self._replica = replica = PipelineReplica(
            worker,
            first.settings,
            stages.components,
            stages.replicas,
            pipeline,
            stages.channels,
            f"{PREFIX}/{init.name}",
            first.step,
            stages.members_of,
            monitor,
        )
        self.place, self.position, self.averaging = replica.number, replica.position, replica.averaging
        self._members = worker.memberships.current.members
        self.workers = tuple(self._members[rank] for rank in replica.peers)
        self.monitor = monitor
        load_sync(replica.sync_states(), stages.sync)

    @property
    def is_first(self) -> bool:
        return self._replica.lockstep.is_first

    def from_first(self, find: Callable[[], Any]) -> Any:
        return self._replica.lockstep.from_first(find)

    def update(
        self, steps: Sequence[int], share: int, batches: Sequence[loader.Batch], factors: Sequence[float]
    ) -> Tensor:
        stages = self._stages
        stages.components.set_lr(factors)
        usual = [math.ceil(trial.batch.size / len(stages.replicas)) for trial in self._trials]
        return self._replica.update(stages.cut_share(steps, share, batches, usual), stages.contents)

    def weight_sums(self) -> list[float]:
        return []

    def synchronize(self) -> None:
        for event in self._pipeline.timings.take(self._trials[0].step, self._members):
            self._on_event(event)
        self.averaging.synchronize()

    def totals_over(self, slots: Sequence[int], share: int, shares: int) -> list[Totals]:
        stages = self._stages
        return evaluation_totals(stages.layout, stages.components, self._pipeline, self._trials, slots)

    def state(self, slot: int) -> EngineState | None:
        # All pipelines hold the same.
        if self.place != 0:
            return gathered(self._stages, slot, ({}, {}), {}, self._group)
        local, sync = self._stages.local_state(slot, self._pipeline), self._replica.sync_states()[slot]
        return gathered(self._stages, slot, local, sync, self._group)

    def leave_to(self, staying: Sequence[int]) -> None:
        self._stages.sync = self._replica.sync_states()
        self._stages.leave_to(staying)

    def close(self) -> None:
        self._stages.sync = self._replica.sync_states()
        try:
            self.averaging.close()
        finally:
            self._stages.close(self._pipeline)


def gathered(
    stages: StagesSideBySide, slot: int, local: State, sync: Tensors, group: WorkerGroup
) -> EngineState | None:
    """The state of a trial, and of the sync, on the first worker, of what each has of it."""
    state, sync = stages.gather(slot, local, group), group.gather(sync)
    return None if state is None else replace(state, sync=sync)


class WaitingWorker:
    """A worker that no pipeline has a place for: it takes no work, and waits until there is one."""

    is_first, position = False, 0

    def __init__(
        self, worker: Worker, init: MemberInit, stages: ReplicaStages, monitor: ShareMonitor | None
    ) -> None:
        self._stages, self._group = stages, init.group
        self.averaging: WeightAveraging = NoAveraging()
        # It learns what the others measure.
        self.monitor = monitor
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

    def totals_over(self, slots: Sequence[int], share: int, shares: int) -> list[Totals]:
        return [Totals(self._stages.components.of_trial(slot)) for slot in slots]

    def state(self, slot: int) -> EngineState | None:
        return gathered(self._stages, slot, ({}, {}), {}, self._group)

    def leave_to(self, staying: Sequence[int]) -> None:
        self._stages.leave_to(staying)

    def close(self) -> None:
        self._stages.close_alone()
