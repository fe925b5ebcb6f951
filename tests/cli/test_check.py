"""`plait check` tries a job out as it would run; `plait new` writes one that works."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from plait.cli import app
from plait.core.errors import InputError, PlaitError
from plait.core.events import read
from plait.core.run_events import CheckpointSaved, Evaluated, Step
from plait.core.yaml_text import dump_yaml
from plait.jobs.check import check
from plait.jobs.train import train
from plait.launcher.run_dir import RunDir
from plait.schema.job import make_job

pytestmark = pytest.mark.usefixtures("forked_commands")

JOB: dict[str, Any] = {
    "name": "t",
    "model": "support.training:small_net",
    "data": {"kind": "support.training:digits", "batch_size": 60},
    "optimizer": {"kind": "sgd", "lr": 0.05},
    "epochs": 2,
    "precision": "float64",
    "device": "cpu",
    "parallel": {"workers": 2},
}


def test_the_steps_that_are_tried_are_those_of_the_run_and_its_time_is_theirs(tmp_path: Path) -> None:
    often = {"evaluate": {"every_steps": 2}, "checkpoint": {"every_steps": 3}, "log_every_steps": 1}
    run: dict[str, Any] = {**JOB, **often, "run_dir": str(tmp_path / "run")}
    # 1442 digits in batches of 300.
    run |= {"data": {**JOB["data"], "batch_size": 300}, "epochs": 1}
    report = check({**run, "run_dir": str(tmp_path / "tried")}, steps=5)
    assert not (tmp_path / "tried").exists()
    result = train(make_job(run))
    events = [each.event for each in read(RunDir(Path(result.run)).events())]
    losses = [event.loss for event in events if isinstance(event, Step)]
    assert report.losses == (losses[0], losses[-1])
    assert report.test == result.test
    assert (report.samples, report.workers, report.steps, report.run_steps) == (1442, 2, 5, 5)
    assert report.audited_steps == 2
    counts = [sum(isinstance(event, kind) for event in events) for kind in (Evaluated, CheckpointSaved)]
    times = (report.step_s, report.evaluation_s or 0.0, report.checkpoint_s)
    assert report.run_s == pytest.approx(sum(n * each for n, each in zip((5, *counts), times)))
    assert report.memory_bytes > 10**7


def test_what_is_wrong_is_named_by_its_key_and_nothing_stays(tmp_path: Path) -> None:
    path = tmp_path / "t.yaml"
    path.write_text(dump_yaml({**JOB, "run_dir": str(tmp_path / "runs")}))
    for override, why in (
        ("optimizer.lr=much", "optimizer.lr"),
        ("model=support.training:no_net", "no_net"),
        ("evaluate.metric=operator:is_", "evaluate.metric"),
        ("callbacks=[support.training:NanAtFirst]", "callbacks"),
    ):
        done = CliRunner().invoke(app, ["check", str(path), "--set", override, "--json"])
        assert isinstance(done.exception, PlaitError)
        assert done.exception.exit_status == 2
        assert why in str(done.exception)
        assert [each.name for each in tmp_path.iterdir()] == ["t.yaml"]
    failed = CliRunner().invoke(app, ["check", str(path), "--set", "evaluate.metric=torch:mul", "--json"])
    assert isinstance(failed.exception, PlaitError)
    assert failed.exception.exit_status == 1
    assert Path(str(failed.exception).partition("its log: ")[2]).exists()


def test_a_new_job_passes_its_check_and_is_never_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = CliRunner()
    assert json.loads(run.invoke(app, ["new", "circles", "--json"]).stdout)["files"] == [
        "circles.py",
        "circles.yaml",
    ]
    done = run.invoke(app, ["check", "circles.yaml", "-np", "2"])
    assert done.exit_code == 0, done.exception
    assert "for 400 steps" in done.stdout
    assert "the same on all 2 workers" in done.stdout
    (tmp_path / "circles.yaml").unlink()
    (tmp_path / "circles.py").write_text("mine")
    for name, why in (("circles", "exists already"), ("queue", "another one"), ("a-b", "can import")):
        refused = run.invoke(app, ["new", name])
        assert isinstance(refused.exception, InputError)
        assert why in str(refused.exception)
    assert [each.read_text() for each in tmp_path.iterdir() if each.is_file()] == ["mine"]
