"""Arrays whose workers average weights: each trial is what these workers make of it in a run of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from plait.comm.collectives import broadcast_value
from plait.schema.settings import (
    UNVERIFIED,
    EvaluateSettings,
    ModelSettings,
    OptimizerSettings,
    SyncSettings,
    TrainSettings,
)
from plait.sweeping.settings import SweepSettings
from plait.sweeping.trial_settings import with_values
from support.averaging import job_store
from support.sweeping import sweep_of, sweep_rank
from support.training import digits_job, largest_difference, saved_weights, train_rank
from support.world import run_ranks

ADAM = OptimizerSettings("adamw", {"lr": 0.01})
# Workers synchronize when something is due, so what is due must be due at the same steps.
EVERY = 5
NORM = ModelSettings("support.sweeping:norm_net")


def averaged(sync: str, options: dict[str, Any] | None = None, **changes: Any) -> TrainSettings:
    values = {
        "steps": 13,
        "sync": SyncSettings(sync, options or {}),
        "evaluate": EvaluateSettings(every_steps=EVERY),
        "log_every_steps": EVERY,
        "verify": UNVERIFIED,
        **changes,
    }
    return digits_job(**values)


LOCAL = {"every": 3}
# Under these syncs all workers take the same steps, so a run has one outcome.
EQUAL = {
    "local SGD": sweep_of("optimizer.lr=0.01,0.1", job=averaged("local-sgd", LOCAL, optimizer=ADAM)),
    "DiLoCo": sweep_of(
        "optimizer.lr=0.01,0.03", job=averaged("local-sgd", {"every": 2, "outer": "nesterov"})
    ),
    "SMA": sweep_of("optimizer.lr=0.01,0.1", job=averaged("sma", clip_norm=0.3, accumulate=2)),
    "pairs": sweep_of("optimizer.lr=0.01,0.1", job=averaged("pair-sync", {"state": True}, optimizer=ADAM)),
    # One worker has none of the last of 1,442 samples in batches of 131, and its trial skips the step.
    "an empty share": sweep_of(
        "data.batch_size=131,200", job=averaged("local-sgd", LOCAL, optimizer=ADAM, steps=18)
    ),
    "batch norms": sweep_of("optimizer.lr=0.01,0.1", job=averaged("local-sgd", LOCAL, model=NORM)),
    "one by one": sweep_of("optimizer.lr=0.01,0.1", job=averaged("local-sgd", LOCAL), width=1),
    "unlike seeds": sweep_of("seed=0,1,2", job=averaged("local-sgd", LOCAL, optimizer=ADAM)),
}


def sweep_and_trials(rank: int, sweep: SweepSettings, folder: Path, address: str) -> list[Any]:
    """A sweep by one group of all workers; and each of its trials as a run of these workers."""
    settings = replace(sweep, replicas=dist.get_world_size())
    result = sweep_rank(rank, settings, folder / "sweep")
    alone = []
    for row in broadcast_value(result.get("trials"), 0):
        own = with_values(sweep.train, row["values"])
        run, _ = train_rank(rank, own, folder / f"trial{row['trial']}", address=address)
        dist.barrier()
        alone.append(run.test)
    return [result, alone]


@pytest.mark.parametrize("name", EQUAL)
def test_a_trial_equals_the_run_of_the_same_workers_under_the_same_sync(name: str, tmp_path: Path) -> None:
    with job_store() as address:
        result, alone = run_ranks(2, sweep_and_trials, EQUAL[name], tmp_path, address)[0]
    assert result["reason"] == "finished"
    for row, test in zip(result["trials"], alone):
        assert row["metrics"] == pytest.approx(test, abs=1e-10)
    best = saved_weights(tmp_path / "sweep")
    assert largest_difference(best, saved_weights(tmp_path / f"trial{result['best']['trial']}")) < 1e-10
