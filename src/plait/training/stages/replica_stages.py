"""The stages of this worker where pipelines average side by side; whole pipelines come and go."""

from __future__ import annotations

from dataclasses import replace

import torch.distributed as dist

from plait.comm.channels import connect
from plait.comm.clock import clock_offset
from plait.comm.collectives import all_gather_values
from plait.comm.groups import new_group
from plait.pipeline.executor import Pipeline
from plait.pipeline.gradient_sync import check_untied
from plait.pipeline.layout import PipelineLayout
from plait.pipeline.named_state import Tensors
from plait.training.checkpoint import EngineState
from plait.training.checks.pipeline import check_pipeline
from plait.training.engines.pipeline_setup import State
from plait.training.engines.replica_layout import among, in_order, replica_layouts
from plait.training.stages.model_stages import ModelStages
from plait.training.worker_group import WorkerGroup


class ReplicaStages(ModelStages):
    """The stages that this worker holds in its pipeline, one of several that average.

    The stages are those of the job's plan, however many workers there are: each pipeline has as many as in
    the plan. Workers left over hold no stage, and are there when others are lost.
    """

    # Where this worker is in its pipeline; None while it is in none.
    _position: int | None = None
    # The pipelines, and the process group of the workers with the same stages, where the sync needs one.
    replicas: tuple[PipelineLayout, ...] = ()
    group: dist.ProcessGroup | None = None

    def _arrange(self) -> PipelineLayout:
        worker, has_layers = self._worker, self._held is not None and bool(self._held.model)
        position = self._position if has_layers else None
        positions = all_gather_values(position) if worker.world_size > 1 else [position]
        return among(check_pipeline(self._settings, None), positions)

    def _summed(self) -> PipelineLayout:
        return replica_layouts(self.layout)[0]

    def open_replica(self, with_groups: bool) -> Pipeline | None:
        """This worker's part of its pipeline; None if it is in none. All workers call it together.

        `with_groups` has the workers that hold the same stages make a process group.
        """
        traced, rank = self._distribute(), self._worker.rank
        self.replicas = replica_layouts(self.layout)
        check_untied(traced, self.replicas[0], "which average apart from each other under this sync")
        own = next((each for each in self.replicas if rank in each.workers), None)
        self._position = None if own is None else in_order(own).index(rank)
        if with_groups:
            same_stages = zip(*map(in_order, self.replicas))
            groups = [new_group(self._worker.rendezvous, ranks) for ranks in same_stages]
            self.group = None if self._position is None else groups[self._position]
        if own is not None:
            return self._open(traced, own)
        self._link_alone()
        return None

    def _link_alone(self) -> None:
        """Take part in what all workers do together when pipelines open."""
        worker = self._worker
        self.channels = connect(worker.rendezvous, (), device=self.components.device)
        clock_offset(worker.rank, worker.hosts)
        self._forget_held()

    def close_alone(self) -> None:
        """Close a worker that is in no pipeline."""
        self._close(lambda: None)

    def gather(self, local: State, sync: Tensors, group: WorkerGroup) -> EngineState | None:
        """The state of the whole model, and of the sync, on the first worker of what each has of it."""
        state, sync = self._gather(local, group), group.gather(sync)
        return None if state is None else replace(state, sync=sync)
