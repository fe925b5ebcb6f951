"""Policies are asked once, on the first worker: whatever they decide by, all workers change alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from plait.adapt.changes import BatchSizeChange
from plait.core import events
from plait.core.errors import JobError
from plait.core.run_events import Changed, Signals
from plait.launcher.run_dir import RunDir
from plait.schema.settings import PolicySettings, SyncSettings, TrainSettings
from plait.training import components
from plait.training.choose_engine import make_loop
from support.averaging import job_store
from support.further import but_further
from support.training import PlainWorker, unverified_job
from support.world import run_ranks

asked = 0
rank_here = 0


def by_rank(signals: list[Signals], state: Any) -> tuple[list[Any], Any]:
    """Another batch size on each worker; its state counts how often it was asked."""
    global asked
    asked += 1
    state = (state or 0) + 1
    return ([BatchSizeChange(48 * (1 + rank_here))] if signals[-1].batch_size == 64 else []), state


def nonsense(signals: list[Signals]) -> Any:
    return BatchSizeChange(48) if rank_here == 0 else []


def train(rank: int, address: str, settings: TrainSettings, folder: Path) -> tuple[Any, ...]:
    global rank_here
    torch.set_num_threads(1)
    rank_here = rank
    worker = PlainWorker(address=address)
    parts = components.build(settings, torch.device("cpu"))
    loop = make_loop(worker, settings, parts, RunDir(folder))  # type: ignore[arg-type]
    try:
        loop.train(resume=False)
    except JobError as failure:
        return str(failure), asked
    (source,) = loop.run.trial.sources
    return loop.run.batch_size, asked, source.state()


@pytest.mark.parametrize("sync", but_further(("all-reduce", "partial-reduce", "local-sgd"), "local-sgd"))
def test_a_policy_that_decides_by_rank_changes_all_workers_alike(sync: str, tmp_path: Path):
    settings = unverified_job(
        steps=30, sync=SyncSettings(sync), adapt=(PolicySettings("test_asked_once:by_rank", {}),)
    )
    with job_store() as address:
        found = run_ranks(2, train, address, settings, tmp_path)
    assert [each[0] for each in found] == [48, 48]
    assert found[0][1] > 0
    assert found[1][1] == 0
    # Should the first worker be lost, another goes on with the policy's state.
    assert found[0][2] == found[1][2] == {"0/test_asked_once:by_rank": found[0][1]}
    log = [r.event for r in events.read(RunDir(tmp_path).events())]
    assert {e.change["batch_size"] for e in log if isinstance(e, Changed)} == {48}


def test_what_a_policy_returns_wrongly_is_said_alike_on_all_workers(tmp_path: Path):
    settings = unverified_job(steps=5, adapt=(PolicySettings("test_asked_once:nonsense", {}),))
    with job_store() as address:
        found = run_ranks(2, train, address, settings, tmp_path)
    words = (
        "adapt: test_asked_once:nonsense returned BatchSizeChange(batch_size=48, lr_factor=1.0), expected a "
        "list of BatchSizeChange, TopologyChange, WorkersChange, SyncChange"
    )
    assert found == [(words, 0)] * 2
