"""Pipelines as a person runs them: a plan file or `auto` in the job, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from plait.config import make_job
from plait.core.errors import JobError

JOB: dict[str, Any] = {
    "name": "digits",
    "model": "plait.workloads.mlp:mlp",
    "model_args": {"inputs": 64, "hidden": [32, 32]},
    "data": {"kind": "digits", "batch_size": 64},
    "optimizer": {"kind": "sgd", "lr": 0.05},
    "steps": 30,
}


def plait(*arguments: str, folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "plait", *arguments, "--json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_profile_plan_train_and_evaluate_follow_each_other(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(json.dumps(JOB))
    plait("profile", "job.yaml", "--batch", "16", "--no-links", "--repeats", "1", folder=tmp_path)
    options = ("--devices", "2", "--bandwidth", "1e9", "--straight", "--microbatches", "4")
    plan = plait("plan", "digits.profile.json", *options, folder=tmp_path)
    assert len(plan["stages"]) == 2
    result = plait("train", "job.yaml", "--plan", plan["plan"], folder=tmp_path)
    assert (result["reason"], result["workers"], result["step"]) == ("finished", 2, 30)
    judged = plait("evaluate", result["run"], folder=tmp_path)
    assert judged["metrics"]["accuracy"] == result["test"]["accuracy"] > 0.5


@pytest.mark.parametrize(
    ("parallel", "words"),
    [
        ({"plan": "dta-parallel"}, "did you mean 'data-parallel'"),
        ({"schedule": "flush"}, "parallel.schedule: belongs to a pipeline"),
        ({"plan": "auto", "schedule": "1f1b"}, "parallel.schedule: found '1f1b', expected stash or"),
        ({"plan": "auto", "microbatches": 0}, "parallel.microbatches: found 0"),
    ],
)
def test_a_wrong_wish_for_a_plan_is_answered_with_the_right_one(parallel: Any, words: str) -> None:
    with pytest.raises(JobError, match=words):
        make_job({**JOB, "parallel": parallel})
