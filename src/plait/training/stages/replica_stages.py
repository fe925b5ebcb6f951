"""The stages of this worker where pipelines average side by side; whole pipelines come and go."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from plait.comm.channels import connect
from plait.comm.clock import clock_offset
from plait.comm.collectives import all_gather_values
from plait.comm.groups import new_group_of_members
from plait.data import loader
from plait.data.loader import Batch
from plait.pipeline.executor import PipelineExecutor
from plait.pipeline.gradient_sync import check_untied
from plait.pipeline.layout import PipelineLayout
from plait.pipeline.microbatches import Microbatch, microbatch_count
from plait.sync.allreduce.reducers import Members
from plait.training.checks.plan_settings import check_pipeline
from plait.training.engines.replica_layout import among, in_order, replica_layouts
from plait.training.engines.train_step import AnyComponents
from plait.training.stages.model_stages import ModelStages


class ReplicaStages(ModelStages):
    """The stages that this worker holds in its pipeline, one of several that average.

    The stages are those of the job's plan, however many workers there are: each pipeline has as many as in
    the plan. Workers left over hold no stage, and are there when others are lost.
    """

    # Where this worker is in its pipeline; None while it is in none.
    _position: int | None = None
    replicas: tuple[PipelineLayout, ...] = ()

    def _arrange(self) -> PipelineLayout:
        worker, has_layers = self._worker, self._held is not None and bool(self._held.model)
        position = self._position if has_layers else None
        positions = all_gather_values(position) if worker.world_size > 1 else [position]
        return among(check_pipeline(self._settings, None), positions)

    def _summed(self) -> PipelineLayout:
        return replica_layouts(self.layout)[0]

    def open_replica(self) -> PipelineExecutor | None:
        """This worker's part of its pipeline; None if it is in none. All workers call it together."""
        traced, rank = self._distribute(), self._worker.rank
        self.replicas = replica_layouts(self.layout)
        check_untied(traced, self.replicas[0])
        own = next((each for each in self.replicas if rank in each.workers), None)
        self._position = None if own is None else in_order(own).index(rank)
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

    def members_of(self, ranks: Sequence[int]) -> Members:
        """The workers with the same stages and their process group, which all of them call for."""
        rendezvous = self._worker.rendezvous
        return Members(rendezvous, tuple(ranks), new_group_of_members(rendezvous, ranks))

    def cut_share(
        self, steps: Sequence[int], share: int, batches: Sequence[Batch], usual: Sequence[int]
    ) -> list[Microbatch]:
        """The microbatches of a share of the trial's step, which usually has `usual` samples."""
        (step,), (batch,), (size,), most = steps, batches, usual, self.replicas[0].microbatches
        if not batch.count:
            return []
        cut, self._contents = in_microbatches(batch, size, most, self.components)
        return [Microbatch(step, share * most + i, 0, range(count)) for i, count in enumerate(cut)]


def in_microbatches(
    batch: Batch, usual: int, most: int, components: AnyComponents
) -> tuple[list[int], Iterator[Any]]:
    """The sizes of a batch's microbatches, and their contents; a batch of `usual` samples has `most`."""
    cut = list(loader.cut(batch.content, batch.count, microbatch_count(batch.count, usual, most)))
    contents = (components.stacked([content], count) for content, count in cut)
    return [count for _, count in cut], contents
