"""A fault in an evaluation costs no step: a checkpoint is written before it, and events reach the disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from plait.core import events as core_events
from plait.core import run_events
from plait.core.codec import encode
from plait.core.errors import PlaitError
from plait.launcher.run_dir import RunDir
from plait.launcher.workers.worker_failure import describe_failure
from plait.schema.settings import (
    CheckpointSettings,
    DataSettings,
    EarlyStopSettings,
    EvaluateSettings,
    ModelSettings,
    TrainSettings,
)
from plait.training import checkpoint as checkpoints
from plait.training.worker import train
from plait.workloads import data
from support.training import PlainWorker, train_here, train_rank, unverified_job
from support.world import run_ranks

HERE = "test_evaluation_faults"


class Truncated(Dataset[Any]):
    """The digits, with a test sample far behind that cannot be read as long as the file `broken` is there."""

    def __init__(self, split: str, broken: str) -> None:
        self.digits, self.broken = data.build("digits", split), Path(broken)
        self.last = len(self.digits) - 1 if split == "test" else -1

    def __len__(self) -> int:
        return len(self.digits)

    def __getitem__(self, index: int) -> Any:
        if index == self.last and self.broken.exists():
            raise OSError("the last image is truncated")
        return self.digits[index]


def job(broken: Path, **changes: Any) -> TrainSettings:
    values = {
        "data": DataSettings(f"{HERE}:Truncated", 64, {"broken": str(broken)}),
        "checkpoint": CheckpointSettings(every_steps=1000),
        "steps": 9,
    }
    return unverified_job(**{**values, **changes})


def steps_kept(folder: Path) -> list[int]:
    return [int(path.name[5:]) for path in checkpoints.list_checkpoints(RunDir(folder).checkpoints)]


def events_of(folder: Path) -> list[Any]:
    return [recorded.event for recorded in core_events.read(RunDir(folder).events())]


def as_worker(settings: TrainSettings, folder: Path, resume: bool = False) -> dict[str, Any]:
    return train(PlainWorker(), {"settings": encode(settings), "folder": str(folder), "resume": resume})


def test_a_fault_in_the_last_evaluation_leaves_the_trained_weights_and_a_resume_evaluates_them(
    tmp_path: Path,
):
    broken = tmp_path / "broken"
    expected, weights = train_here(job(broken), tmp_path / "fine")
    broken.touch()
    with pytest.raises(OSError, match="the last image is truncated") as caught:
        as_worker(job(broken, log_every_steps=None), tmp_path / "run")
    assert steps_kept(tmp_path / "run") == [9]
    assert "the evaluation after step 9" in caught.value.__notes__[-1]
    assert "--resume" in caught.value.__notes__[-1]
    # Steps within a second of the fault are on disk, too.
    assert max(e.step for e in events_of(tmp_path / "run") if isinstance(e, run_events.Step)) == 9
    saved = checkpoints.load(checkpoints.list_checkpoints(RunDir(tmp_path / "run").checkpoints)[0])
    assert all(torch.equal(saved.model[name], weights[name]) for name in weights)
    broken.unlink()
    found = as_worker(job(broken), tmp_path / "run", resume=True)
    assert found["test"] == dict(expected.test)


def test_a_fault_in_the_middle_loses_no_step_and_counts_for_patience_once_it_is_mended(tmp_path: Path):
    broken = tmp_path / "broken"
    rules: dict[str, Any] = {
        "evaluate": EvaluateSettings(every_steps=3),
        "early_stop": EarlyStopSettings(patience=2, min_change=100),
        "checkpoint": CheckpointSettings(every_steps=1000, keep_best="accuracy"),
        "steps": 30,
    }
    expected, _ = train_here(job(broken, **rules), tmp_path / "fine")
    assert (expected.reason, expected.step) == ("early-stop", 9)
    broken.touch()
    with pytest.raises(OSError, match="truncated"):
        as_worker(job(broken, **rules), tmp_path / "run")
    assert steps_kept(tmp_path / "run") == [3]
    broken.unlink()
    found = as_worker(job(broken, **rules), tmp_path / "run", resume=True)
    assert (found["reason"], found["step"]) == ("early-stop", 9)
    assert (found["best"], found["test"]) == (expected.best, expected.test)
    evaluated = [e.step for e in events_of(tmp_path / "run") if isinstance(e, run_events.Evaluated)]
    assert evaluated == [3, 6, 9, 9]


def fault_on_one(rank: int, settings: TrainSettings, folder: Path) -> str:
    try:
        train_rank(rank, settings, folder)
        return "finished"
    except (OSError, RuntimeError) as failure:
        return type(failure).__name__


def test_a_fault_on_one_of_two_workers_leaves_a_checkpoint_of_the_step(tmp_path: Path):
    (tmp_path / "broken").touch()
    settings = job(tmp_path / "broken", evaluate=EvaluateSettings(every_steps=4))
    assert run_ranks(2, fault_on_one, settings, tmp_path / "run")[1] == "OSError"
    assert steps_kept(tmp_path / "run") == [4]


def test_what_was_going_on_when_a_worker_failed_is_part_of_its_message():
    failure = PlaitError("the metric is wrong")
    failure.add_note("This was the evaluation after step 9.")
    assert describe_failure(0, "w0", failure).summary == (
        "the metric is wrong\nThis was the evaluation after step 9."
    )


def test_the_best_checkpoint_is_pointed_to_once_it_is_known(tmp_path: Path):
    settings = unverified_job(
        model=ModelSettings("plait.workloads.mlp:mlp_tiny"),
        steps=6,
        evaluate=EvaluateSettings(every_steps=2),
        checkpoint=CheckpointSettings(every_steps=100, keep_best="loss"),
    )
    result, _ = train_here(settings, tmp_path)
    best = checkpoints.load(RunDir(tmp_path).checkpoints / "best")
    assert result.best is not None
    assert (best.step, best.progress["best"]) == (result.best["step"], result.best)
    saved = [e for e in events_of(tmp_path) if isinstance(e, run_events.CheckpointSaved)]
    assert [e.step for e in saved if e.best][-1] == best.step
