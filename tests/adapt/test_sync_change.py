"""Workers that change how they agree while they train, and change back."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.core import events
from plait.core.run_events import Changed, Signals
from plait.launcher.run_dir import RunDir
from plait.schema.settings import (
    CheckpointSettings,
    OptimizerSettings,
    PolicySettings,
    SlowSettings,
    SyncSettings,
    TrainSettings,
)
from plait.schema.topology_spec import TopologySpec
from plait.training import components
from plait.training.choose_engine import make_loop
from support.averaging import job_store
from support.training import PlainWorker, largest_difference, train_here, unverified_job
from support.world import run_ranks


def train(
    rank: int, address: str, settings: TrainSettings, folder: Path, resume: bool = False
) -> tuple[Any, Any]:
    torch.set_num_threads(1)
    worker = PlainWorker(address=address)
    parts = components.build(settings, torch.device("cpu"))
    loop = make_loop(worker, settings, parts, RunDir(folder))  # type: ignore[arg-type]
    result = loop.train(resume)
    return result, {name: value.tolist() for name, value in parts.model.state_dict().items()}


def table(changes: dict[int, Any]) -> tuple[PolicySettings, ...]:
    return (PolicySettings("steps", {"changes": changes}),)


def test_workers_change_their_sync_and_back_and_take_the_steps_of_one_process(tmp_path: Path):
    """With plain SGD, averaging weights after every step is averaging gradients."""
    together = {"sync": "local-sgd", "options": {"every": 1}}
    changes = {4: together, 8: {"sync": "all-reduce"}, 12: together, 16: {"sync": "all-reduce"}}
    plain = OptimizerSettings("sgd", {"lr": 0.05})
    settings = unverified_job(steps=20, optimizer=plain, adapt=table(changes))
    with job_store() as address:
        found = run_ranks(2, train, address, settings, tmp_path / "two")
    assert largest_difference(found[0][1], found[1][1]) == 0.0
    _, alone = train_here(unverified_job(steps=20, optimizer=plain), tmp_path / "one")
    assert largest_difference(found[0][1], alone) < 1e-9
    log = [r.event for r in events.read(RunDir(tmp_path / "two").events())]
    kinds = [(e.step, e.change["sync"]) for e in log if isinstance(e, Changed)]
    assert kinds == [(4, "local-sgd"), (8, "all-reduce"), (12, "local-sgd"), (16, "all-reduce")]
    assert {e.sync for e in log if isinstance(e, Signals)} == {"all-reduce", "local-sgd"}


def test_a_resumed_run_goes_on_with_the_sync_that_a_policy_chose_unless_the_job_says_another(tmp_path: Path):
    """With the state of its outer optimizer, too, so it is the run that was never interrupted."""
    outer = {"sync": "local-sgd", "options": {"every": 2, "outer": "nesterov"}}
    settings = unverified_job(steps=12, checkpoint=CheckpointSettings(every_steps=6), adapt=table({4: outer}))

    def syncs(folder: Path) -> set[str]:
        log = [each.event for each in events.read(RunDir(folder).events())]
        return {each.sync for each in log if isinstance(each, Signals) and each.step > 6}

    with job_store() as address:
        whole = run_ranks(2, train, address, settings, tmp_path / "whole")
        run_ranks(2, train, address, replace(settings, steps=6), tmp_path / "two")
        shutil.copytree(tmp_path / "two", tmp_path / "other")
        resumed = run_ranks(2, train, address, settings, tmp_path / "two", True)
        other = replace(settings, sync=SyncSettings("sma"))
        run_ranks(2, train, address, other, tmp_path / "other", True)
    assert largest_difference(resumed[0][1], whole[0][1]) == 0.0
    assert syncs(tmp_path / "two") == syncs(tmp_path / "whole") == {"local-sgd"}
    assert syncs(tmp_path / "other") == {"sma"}


# The sync does above, and a measured topology in sync/test_topology_training.py.
@pytest.mark.extended
def test_a_resumed_run_goes_on_with_the_topology_that_a_policy_chose_unless_the_job_says_another(
    tmp_path: Path,
):
    chosen = table({4: {"topology": "ring"}})
    settings = unverified_job(steps=8, checkpoint=CheckpointSettings(every_steps=6), adapt=chosen)

    def topologies(folder: Path) -> set[str]:
        log = [each.event for each in events.read(RunDir(folder).events())]
        return {each.topology for each in log if isinstance(each, Signals) and each.step > 6}

    with job_store() as address:
        run_ranks(2, train, address, replace(settings, steps=6), tmp_path / "two")
        shutil.copytree(tmp_path / "two", tmp_path / "other")
        run_ranks(2, train, address, settings, tmp_path / "two", True)
        other = replace(settings, topology=TopologySpec("tree"))
        run_ranks(2, train, address, other, tmp_path / "other", True)
    assert topologies(tmp_path / "two") == {"ring"}
    assert topologies(tmp_path / "other") == {"tree"}


def test_a_straggler_leads_to_partial_reduce(tmp_path: Path):
    policy = PolicySettings("sync", {"slow": 3.0, "calm": 2.0, "confirm": 3})
    settings = unverified_job(steps=40, slow=SlowSettings({1: 40.0}), adapt=(policy,))
    with job_store() as address:
        result, _ = run_ranks(3, train, address, settings, tmp_path)[0]
    assert result.step == 40
    log = [r.event for r in events.read(RunDir(tmp_path).events())]
    first = next(e for e in log if isinstance(e, Changed))
    assert first.change["sync"] == "partial-reduce"
    assert "worker 1" in first.why
