"""Worker groups of a sweep: workers that train one array together, on shares of every batch or in stages."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch

from plait.comm.groups import new_group
from plait.core.codec import decode, encode
from plait.core.errors import InputError
from plait.launcher.worker_process import Worker
from plait.schema.settings import TrainSettings
from plait.schema.topology_spec import build_topology
from plait.sweeping.datasets import DataSets
from plait.sweeping.engines.array_plans import averages, layout_from
from plait.sweeping.settings import SweepSettings
from plait.sync.allreduce.reducers import Members
from plait.training.worker_group import StageLinks, WorkerGroup

# The first member may wait for trials for any time; its loss is still detected at once.
ANSWER_TIMEOUT = timedelta(days=365)

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class ArrayWorkers:
    """The workers that train arrays together, as this `worker` of them has them, and what they all know.

    The first of its `group` asks the coordinator, and all get the answer. The coordinator reads no data:
    where it has to know a data set, the worker that asked describes it.
    """

    worker: Worker
    group: WorkerGroup
    settings: SweepSettings
    sets: DataSets
    device: torch.device
    # The warnings given so far.
    _warned: set[str] = field(default_factory=set)

    def ask(self, **question: Any) -> Mapping[str, Any]:
        """The answer to a question; all workers of the group call it together."""
        answer: Mapping[str, Any] = self.group.from_first(lambda: self._asked(question))
        return answer

    def _asked(self, question: Mapping[str, Any]) -> Mapping[str, Any]:
        while "describe" in (answer := self.worker.ask(question)):
            settings = decode(TrainSettings, answer["describe"], "settings")
            self.worker.ask({"ask": "data", **encode(self.sets.describe(settings))})
        return answer

    def warn_once(self, message: str) -> None:
        """Warn the user, once per message."""
        if message not in self._warned and self.group.is_first:
            self._warned.add(message)
            log.warning("%s", message)

    @property
    def is_pipelined(self) -> bool:
        """Whether arrays are cut into the stages of a pipeline."""
        return self.settings.train.in_stages

    @property
    def averages(self) -> bool:
        """Whether the workers of the group update separately and average weights."""
        return not self.group.is_alone and averages(self.settings)

    @property
    def averages_gradients(self) -> bool:
        """Whether they average gradients too, before the update."""
        return self.averages and self.settings.train.sync.options.get("average") == "gradients"


def check_worker_groups(settings: SweepSettings, workers: int) -> None:
    """Refuse a number of workers that groups of this size do not divide."""
    size = settings.workers_per_array
    if workers % size:
        few = f"-np {size}" if workers < size else f"-np {workers - workers % size}"
        there = f"the {workers} worker{'s' if workers > 1 else ''}; use {few}"
        if settings.train.in_stages:
            times = f"{settings.replicas} times " if settings.replicas > 1 else ""
            raise InputError(
                f"--plan: found a plan for {times}{size // settings.replicas} workers, which do not divide "
                f"{there}, or another plan"
            )
        raise InputError(
            f"--replicas: found {size}, which does not divide {there}, or another number of replicas"
        )


def make_worker_group(worker: Worker, settings: SweepSettings, device: torch.device) -> WorkerGroup:
    """This worker's group; all workers call it together, in the process group of all."""
    group, topology = None, settings.train.topology
    for first in range(0, worker.world_size, settings.workers_per_array):
        ranks = range(first, first + settings.workers_per_array)
        if not topology.by_name:
            # A user's function may fail: it does so on all workers, before trials are asked for.
            build_topology(topology, [worker.rendezvous.hosts[rank] for rank in ranks])
        sums = new_group(worker.rendezvous, ranks)
        answers = new_group(worker.rendezvous, ranks, ANSWER_TIMEOUT, backend="gloo")
        if worker.rank in ranks:
            members = Members(worker.rendezvous, tuple(ranks), sums)
            group = WorkerGroup(ranks, worker.rank, sums, answers, members)
    assert group is not None
    if settings.train.in_stages:
        group.links = _link_stages(worker, settings, device)
    return group


def _link_stages(worker: Worker, settings: SweepSettings, device: torch.device) -> StageLinks:
    """What connects the workers of this worker's group, for all of its arrays."""
    from plait.training.engines.pipeline_setup import link  # slow to import, with all that tracing needs

    layout = layout_from(worker.rank - worker.rank % settings.workers_per_array, settings)
    return StageLinks(link(worker, layout, device), worker.rendezvous, worker.rank in layout.holders(0))
