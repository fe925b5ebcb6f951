"""Changes that policies request while a run trains: who is asked for them, and how they are applied."""

from __future__ import annotations

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
from plait.adapt.members import ElasticMembers
from plait.adapt.policies.policy import Policy
from plait.adapt.policies.registry import make_policy
from plait.core.errors import JobError
from plait.schema.settings import SyncSettings, TrainSettings
from plait.schema.sync_options import read_options
from plait.training.engine import Engine
from plait.training.run import Run

# Steps between two requests to policies where workers must stop for them: in pipelines, and in decentralized
# training.
APART_STEPS = 25


def policies_of(settings: TrainSettings) -> list[tuple[str, Policy]]:
    """The policies of a job, by their names in it."""
    return [(each.kind, make_policy(each.kind, each.options)) for each in settings.adapt]


def asked_every(settings: TrainSettings, workers: int) -> int:
    """Steps between two requests to policies: several where workers must come together for it."""
    at_once = not settings.in_stages and settings.sync.kind == "all-reduce"
    return 1 if at_once or workers == 1 else APART_STEPS


def is_due(source: ChangeSource, step: int) -> bool:
    """Whether to ask a source for changes after `step` steps."""
    return source.next_due(step - 1) == step


def find_requests(
    from_first: Callable[[Callable[[], Any]], Any], due: Sequence[tuple[ChangeSource, int]]
) -> list[list[ChangeRequest] | JobError]:
    """The changes that each source requests after its step, or the error of a source that fails.

    The first worker asks them; `from_first` gives all workers what it finds.
    """
    local: Any = None

    def ask() -> Any:
        nonlocal local
        local = [_ask(source, step) for source, step in due]
        return local

    answers = from_first(ask) if due else []
    for (source, _), answer in zip(due, answers):
        if answers != local and isinstance(source, SavedSource) and answer["failed"] is None:
            source.load(answer["state"])
    return [
        [ChangeRequest.from_values(values) for values in answer["requests"]]
        if answer["failed"] is None
        else JobError(answer["failed"])
        for answer in answers
    ]


def _ask(source: ChangeSource, step: int) -> dict[str, Any]:
    """The requests of a source and its state, or the error message, as plain values for all workers."""
    try:
        requests = [request.as_values() for request in source.due(step)]
    except JobError as failure:
        return {"failed": str(failure)}
    state = source.state() if isinstance(source, SavedSource) else None
    return {"failed": None, "requests": requests, "state": state}


def apply_change(
    request: ChangeRequest,
    run: Run,
    engine: Engine,
    members: ElasticMembers,
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
        if not run.worker.memberships.can_grow:
            raise JobError(
                f"adapt: cannot apply {change}: the job's workers are fixed; set parallel.elastic: true"
            )
        if members.worker.rank == 0:
            members.worker.ask_to_resize(change.workers, f"{request.by}: {request.why}")
        return engine
    if isinstance(change, BatchSizeChange):
        run.trial.change_batch(change, run.worker.world_size)
        run.metrics.batch_size = run.batch_size
    engine.apply(change)
    return engine


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
