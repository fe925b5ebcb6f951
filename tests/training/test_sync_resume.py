"""Runs that average with equal steps go on from a checkpoint bitwise as if they had never been cut."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from plait.pipeline import named_state
from plait.schema.settings import (
    CheckpointSettings,
    DataSettings,
    EvaluateSettings,
    ModelSettings,
    OptimizerSettings,
    TrainSettings,
)
from plait.training import checkpoint
from support.averaging import job_store
from support.syncs import settings_of
from support.training import PlainWorker, train_with
from support.world import run_ranks

MOMENTUM = OptimizerSettings("sgd", {"lr": 0.05, "momentum": 0.9})
ADAM = OptimizerSettings("adam", {"lr": 0.01})
SYNCS: dict[str, tuple[str, dict[str, Any]]] = {
    "pair-sync": ("pair-sync", {}),
    "pair-sync with state": ("pair-sync", {"state": True}),
    "sma": ("sma", {}),
    "local-sgd": ("local-sgd", {"every": 4}),
    "DiLoCo": ("local-sgd", {"every": 4, "outer": "nesterov"}),
}


def job(sync: str, optimizer: OptimizerSettings, **changes: Any) -> TrainSettings:
    """Twelve steps with a checkpoint in the middle, which is in the middle of a period of local SGD."""
    values = {
        "steps": 12,
        "precision": "float64",
        "model": ModelSettings("support.training:norm_net"),
        "optimizer": optimizer,
        "checkpoint": CheckpointSettings(every_steps=6, keep_last=9),
        "evaluate": EvaluateSettings(every_steps=3, batch_size=400),
        **changes,
    }
    return settings_of(*SYNCS[sync], **values)


def train(rank: int, port: int, settings: TrainSettings, folder: Path, resume: bool) -> dict[str, Tensor]:
    """The whole state of a worker at the end of a run."""
    _, parts = train_with(PlainWorker(address=port), settings, folder, resume)
    model = {f"model/{name}": value for name, value in parts.model.state_dict().items()}
    return model | named_state.optimizer_state(parts.optimizer, parts.names)


def cut_and_resume(rank: int, ports: list[int], jobs: dict[str, TrainSettings], folder: Path) -> list[str]:
    """The jobs whose resumed runs end with another state than those that were never cut, and where."""
    torch.set_num_threads(1)
    found = []
    for number, (name, settings) in enumerate(jobs.items()):
        whole, cut = folder / f"{number}-whole", folder / f"{number}-cut"
        expected = train(rank, ports[2 * number], settings, whole, resume=False)
        if rank == 0:
            shutil.copytree(whole, cut)
            shutil.rmtree(cut / "checkpoints" / "step-000000012")
        dist.barrier()
        state = train(rank, ports[2 * number + 1], settings, cut, resume=True)
        assert state.keys() == expected.keys()
        found += [f"{name}: {key}" for key in state if not torch.equal(state[key], expected[key])]
    return found


def differences(workers: int, jobs: dict[str, TrainSettings], folder: Path) -> list[list[str]]:
    with contextlib.ExitStack() as stack:
        ports = [stack.enter_context(job_store()) for _ in range(2 * len(jobs))]
        return run_ranks(workers, cut_and_resume, ports, jobs, folder)


@pytest.mark.parametrize(
    ("workers", "optimizer"), [pytest.param(2, MOMENTUM, marks=pytest.mark.extended), (3, ADAM)]
)
def test_a_run_cut_at_a_checkpoint_ends_with_the_bits_of_one_that_was_not(
    workers: int, optimizer: OptimizerSettings, tmp_path: Path
):
    # The others keep less: with momentum all are tried.
    tried = ("DiLoCo", "pair-sync with state", "sma") if optimizer is ADAM else SYNCS
    jobs = {sync: job(sync, optimizer) for sync in tried}
    assert differences(workers, jobs, tmp_path) == [[]] * workers
    if optimizer is ADAM:
        assert_holds_the_outer_optimizer(tmp_path / "0-whole" / "checkpoints" / "step-000000006")


def assert_holds_the_outer_optimizer(path: Path) -> None:
    """By name."""
    state = checkpoint.load(path)
    names = [name for name in state.model if "running" not in name and "tracked" not in name]
    assert sorted(state.sync) == sorted(f"{name}/{key}" for name in names for key in ("anchor", "momentum"))
    for name in names:
        assert torch.equal(state.sync[f"{name}/anchor"], state.model[name])
        assert state.sync[f"{name}/momentum"].abs().max() > 0


def test_so_does_one_in_which_some_worker_never_gets_a_sample(tmp_path: Path):
    jobs = {sync: job(sync, ADAM, data=DataSettings("digits", 2)) for sync in ("DiLoCo", "pair-sync")}
    assert differences(3, jobs, tmp_path) == [[]] * 3
