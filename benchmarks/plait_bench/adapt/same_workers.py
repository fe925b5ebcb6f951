"""Several runs one after the other on the same workers: processes start once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from plait.comm.groups import join_world
from plait.comm.rendezvous import Rendezvous
from plait.launcher.membership import fixed_memberships
from plait.launcher.run_dir import RunDir
from plait.launcher.worker_process import Worker
from plait.schema.settings import CheckpointSettings, TrainSettings
from plait.training import components
from plait.training.choose_engine import make_loop
from plait.training.optimizers.eager import use_eager_optimizers


class GuestWorker:
    """A worker as one of several runs sees it: with a store and a process group of its own.

    A run with a target for its test loss is over once it is there.
    """

    def __init__(self, worker: Worker, name: str, target: float | None) -> None:
        self.rank, self.world_size, self.local_rank = worker.rank, worker.world_size, worker.local_rank
        self.id, self.memberships = worker.id, fixed_memberships(worker.rank, worker.hosts)
        self.host, self.hosts, self.timeout_s = worker.host, worker.hosts, worker.timeout_s
        self.store: dist.Store = dist.PrefixStore(f"bench/{name}", worker.store)
        secret = worker.rendezvous.secret
        self.rendezvous = Rendezvous(self.store, secret, self.rank, self.hosts, timeout_s=self.timeout_s)
        self._target, self._reached = target, False
        self.join("gloo")

    def stop_requested(self) -> bool:
        return self._reached

    def ask_to_stop(self) -> None:
        """A run that diverges is measured to its end, unless it is one to a target."""
        self._reached = self._target is not None

    def ask(self, question: Mapping[str, Any]) -> Mapping[str, Any]:
        raise NotImplementedError("runs have no coordinator")

    def join(self, backend: str) -> None:
        join_world(backend, self.rendezvous)

    def report(self, progress: dict[str, Any]) -> None:
        """Take note of progress; only the first worker reports, and its stop ends the run for all."""
        loss = progress.get("test_loss")
        if self._target is not None and loss is not None:
            self._reached = self._reached or loss <= self._target


def train_on_same_workers(
    worker: Worker, name: str, settings: TrainSettings, folder: Path, target: float | None = None
) -> None:
    """Train a run in `folder` together with the other workers, to its `target`; `name` is given once."""
    use_eager_optimizers()  # as the workers of a job do
    settings = replace(settings, checkpoint=CheckpointSettings(every_steps=10**9), device="cpu")
    guest = GuestWorker(worker, name, target)
    parts = components.build(settings, torch.device("cpu"))
    make_loop(guest, settings, parts, RunDir(folder)).train(resume=False)
    if dist.is_initialized():
        dist.destroy_process_group()
    done = f"bench/{name}/done"
    worker.store.set(f"{done}/{worker.rank}", "")
    # The first worker holds the store of the run, which the others use to their end.
    worker.store.wait([f"{done}/{rank}" for rank in range(worker.world_size)])
