"""Changing how workers agree while they train: the engine of one sync hands over to that of another.

At the end of an interval all workers are in the same state under any sync, so the next engine goes on from
the model and the optimizer as they are. Links are made anew. The process group stays, so unlike in a run that
only ever averages, the loss of a worker ends the run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from plait.adapt.changes import Change, SyncChange
from plait.schema.settings import SyncSettings, TrainSettings
from plait.schema.sync_options import read_options
from plait.training.checkpoint import Checkpoint
from plait.training.engine import Engine, EngineState, Trained
from plait.training.engines.data_parallel import DataParallelEngine
from plait.training.engines.decentralized import DecentralizedEngine, WholeModel
from plait.training.run import Run

ALL_REDUCE = "all-reduce"


def may_change_sync(settings: TrainSettings) -> bool:
    """Whether a policy of the job may ask for another sync; a user's own may ask for anything."""
    return any(
        policy.kind == "sync"
        or ":" in policy.kind
        or any("sync" in entry for entry in dict(policy.options.get("changes", {})).values())
        for policy in settings.adapt
    )


class SwitchingEngine:
    """Steps on whole models under one sync after the other; `hosts` names the host of each rank."""

    def __init__(self, run: Run, hosts: Sequence[str]) -> None:
        self._run = run
        self._hosts = hosts
        self._count = 0
        self._engine = self._make()
        self.sees_end_of_data = self._engine.sees_end_of_data

    def _make(self) -> Engine:
        run = self._run
        if run.settings.sync.kind == ALL_REDUCE:
            return DataParallelEngine(run)
        # What an earlier engine left in the store is not this one's.
        name = f"/{self._count}" if self._count else ""
        return DecentralizedEngine(run, WholeModel(run, self._hosts, name), name, keep_world=True)

    @property
    def parts_of_a_batch(self) -> int:
        return self._engine.parts_of_a_batch

    def read(self, path: Path) -> Checkpoint:
        return self._engine.read(path)

    def load(self, state: Checkpoint) -> None:
        self._engine.load(state)

    def start_state(self) -> EngineState:
        return self._engine.start_state()

    def broadcast_start(self) -> None:
        self._engine.broadcast_start()

    def open(self) -> None:
        self._engine.open()

    def train(self, steps: int) -> Trained:
        return self._engine.train(steps)

    def evaluate(self) -> dict[str, float]:
        return self._engine.evaluate()

    def state(self) -> EngineState | None:
        return self._engine.state()

    def finish(self, save: Callable[[], None]) -> None:
        self._engine.finish(save)

    def apply(self, change: Change) -> None:
        if not isinstance(change, SyncChange):
            self._engine.apply(change)
        elif change.sync != self._run.settings.sync.kind:
            self._switch(change)

    def _switch(self, change: SyncChange) -> None:
        run = self._run
        read_options(change.sync, change.options, run.worker.world_size)
        self._engine.synchronize()
        self._engine.close()
        run.settings = replace(run.settings, sync=SyncSettings(change.sync, change.options))
        self._count += 1
        self._engine = self._make()
        self._engine.open()

    def synchronize(self) -> None:
        self._engine.synchronize()

    def close(self) -> None:
        self._engine.close()
