"""Changes that policies request while a run trains: who is asked for them, and how they are applied."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from plait.adapt.changes import (
    BatchSizeChange,
    ChangeRequest,
    ChangeSource,
    SavedSource,
    SyncChange,
    WorkersChange,
)
from plait.core.errors import JobError
from plait.launch.worker_process import Worker
from plait.schema.settings import SyncSettings
from plait.schema.sync_options import read_options
from plait.training.change.members import RunMembers
from plait.training.engine import Engine, ask_rank_0
from plait.training.run import Run


def find_requests(worker: Worker, sources: Sequence[ChangeSource], step: int) -> list[ChangeRequest]:
    """The changes that sources request after `step`: rank 0 asks them and broadcasts the answer."""
    due = [source for source in sources if source.next_due(step - 1) == step]
    if not due:
        return []
    local: Any = None

    def ask() -> Any:
        nonlocal local
        local = _ask(due, step)
        return local

    answer = ask_rank_0(worker, ask)
    if answer["failed"] is not None:
        raise JobError(answer["failed"])
    if answer != local:
        for source, state in zip(due, answer["states"]):
            if isinstance(source, SavedSource):
                source.load(state)
    return [ChangeRequest.from_values(values) for values in answer["requests"]]


def _ask(sources: Sequence[ChangeSource], step: int) -> dict[str, Any]:
    """The requests of sources and their states, or the error message, as plain values for all workers."""
    try:
        requests = [request.as_values() for source in sources for request in source.due(step)]
    except JobError as failure:
        return {"failed": str(failure)}
    states = [source.state() if isinstance(source, SavedSource) else None for source in sources]
    return {"failed": None, "requests": requests, "states": states}


def apply_change(
    request: ChangeRequest,
    run: Run,
    engine: Engine,
    members: RunMembers,
    make_engine: Callable[[], Engine] | None,
) -> Engine:
    """Apply a change between two steps; returns the engine to continue with.

    `make_engine` builds an engine for the current settings, where the sync may change. JobError if the run
    does not support the change.
    """
    change = request.change
    if isinstance(change, SyncChange) and make_engine is not None:
        return _change_sync(change, run, engine, make_engine)
    if isinstance(change, WorkersChange):
        _ask_for_workers(change, f"{request.by}: {request.why}", members)
        return engine
    if isinstance(change, BatchSizeChange):
        _change_batch(change, run)
    engine.apply(change)
    return engine


def _ask_for_workers(change: WorkersChange, why: str, members: RunMembers) -> None:
    if not members.can_grow:
        raise JobError(
            f"adapt: cannot apply {change}: the job's workers are fixed; set parallel.elastic: true"
        )
    if members.worker.rank == 0:
        members.worker.ask_to_resize(change.workers, why)


def _change_sync(change: SyncChange, run: Run, engine: Engine, make_engine: Callable[[], Engine]) -> Engine:
    """Switch to another sync from the next step on.

    At the end of an interval all workers have the same state under any sync, so the new engine continues with
    the same model and optimizer. Connections are opened again.
    """
    if change.sync == run.settings.sync.kind:
        return engine
    read_options(change.sync, change.options, run.worker.world_size)
    engine.synchronize(range(run.worker.world_size))
    engine.close()
    run.settings = replace(run.settings, sync=SyncSettings(change.sync, change.options))
    engine = make_engine()
    engine.open()
    return engine


def _change_batch(change: BatchSizeChange, run: Run) -> None:
    """Use another batch size from the next step on; the order of samples is unchanged."""
    workers = run.worker.world_size
    if change.batch_size < workers or not math.isfinite(change.lr_factor) or change.lr_factor <= 0:
        raise JobError(
            f"adapt: found {change} for {workers} workers; expected at least one sample a worker, and a "
            f"factor above 0 on the learning rate"
        )
    run.trial.batch = run.trial.batch.changed(
        change, run.trial.step, by_samples=run.settings.epochs is not None
    )
    run.metrics.batch_size = run.batch_size
