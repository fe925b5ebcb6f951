"""Several runs one after the other on the same workers: processes start once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from plait.comm.groups import join_world
from plait.comm.rendezvous import Rendezvous
from plait.launch.run_dir import RunDir
from plait.launch.worker import Worker
from plait.schema.results import RunResult
from plait.schema.settings import CheckpointSettings, TrainSettings
from plait.training import components
from plait.training.worker import make_loop


class GuestWorker:
    """A worker as one of several runs sees it: with a store and a process group of its own."""

    def __init__(self, worker: Worker, name: str) -> None:
        self.rank, self.world_size, self.local_rank = worker.rank, worker.world_size, worker.local_rank
        self.id, self.memberships = worker.id, None
        self.host, self.hosts, self.timeout_s = worker.host, worker.hosts, worker.timeout_s
        self.store = dist.PrefixStore(f"bench/{name}", worker.store)
        secret = worker.rendezvous.secret
        self.rendezvous = Rendezvous(self.store, secret, self.rank, self.hosts, timeout_s=self.timeout_s)
        if self.world_size > 1:
            join_world("gloo", self.rendezvous)

    def stop_requested(self) -> bool:
        return False

    def ask_to_stop(self) -> None:
        """A run that diverges is measured to its end."""

    def report(self, progress: dict[str, Any]) -> None:
        """Nobody watches."""


def train_as_guest(
    worker: Worker,
    name: str,
    settings: TrainSettings,
    folder: Path,
) -> RunResult:
    """Train a run in `folder` together with the other workers; `name` is given once."""
    settings = replace(settings, checkpoint=CheckpointSettings(every_steps=10**9), device="cpu")
    guest: Any = GuestWorker(worker, name)
    parts = components.build(settings, torch.device("cpu"))
    loop = make_loop(guest, settings, parts, RunDir(folder))
    result = loop.train(resume=False)
    if dist.is_initialized():
        dist.destroy_process_group()
    done = f"bench/{name}/done"
    worker.store.set(f"{done}/{worker.rank}", "")
    # The first worker holds the store of the run, which the others use to their end.
    worker.store.wait([f"{done}/{rank}" for rank in range(worker.world_size)])
    assert result is not None
    return result
