"""Worker groups of a sweep: workers that train one array together, on shares of every batch or in stages."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from plait.comm.groups import new_group
from plait.comm.rpc import Answer, Client
from plait.core.errors import InputError
from plait.launch.worker import Worker
from plait.sweeping.engines.stages import link_stages
from plait.sweeping.settings import SweepSettings
from plait.training.worker_group import WorkerGroup

# The first member may wait for trials for any time; its end is noticed at once all the same.
ANSWER_TIMEOUT = timedelta(days=365)


class GroupClient:
    """Questions that a group has in common: its first member asks, and all have the answer."""

    def __init__(self, workers: WorkerGroup, client: Client | None) -> None:
        self._workers = workers
        self._client = client

    def ask(self, **question: Any) -> Answer:
        answer: Answer = self._workers.from_first(lambda: self._asked(question))
        return answer

    def _asked(self, question: dict[str, Any]) -> Answer:
        assert self._client is not None
        return self._client.ask(**question)


def check_worker_groups(settings: SweepSettings, workers: int) -> None:
    """Refuse a number of workers that groups of this size do not divide."""
    size = settings.workers_per_array
    if workers % size:
        few = f"-np {size}" if workers < size else f"-np {workers - workers % size}"
        there = f"the {workers} worker{'s' if workers > 1 else ''}; use {few}"
        if settings.train.pipeline is not None:
            raise InputError(f"--plan: found {size} stages, which do not divide {there}, or another plan")
        raise InputError(
            f"--replicas: found {size}, which does not divide {there}, or another number of replicas"
        )


def make_worker_group(worker: Worker, settings: SweepSettings, device: torch.device) -> WorkerGroup:
    """This worker's group; all workers call it together, in the process group of all."""
    found = None
    for first in range(0, worker.world_size, settings.workers_per_array):
        ranks = list(range(first, first + settings.workers_per_array))
        sums = new_group(worker.rendezvous, ranks)
        answers = new_group(worker.rendezvous, ranks, ANSWER_TIMEOUT, backend="gloo")
        if worker.rank in ranks:
            found = WorkerGroup(ranks, worker.rank, sums, answers)
    assert found is not None
    if settings.train.pipeline is not None:
        found.pipeline = link_stages(worker, settings.train, worker.rank - found.place, device)
    return found
