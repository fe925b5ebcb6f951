"""`~` and `$VARIABLES` in paths mean what they mean in a shell, in job files and in flags."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from plait.cli import app
from plait.core.errors import DataError, InputError, JobError
from plait.core.files import expand_path
from plait.launcher.run_dir import RunKind, choose_folder, find_run, new_run
from plait.schema.job import make_job, read_job
from plait.workloads import data

JOB: dict[str, Any] = {
    "name": "t",
    "model": "plait.workloads.mlp:mlp_tiny",
    "data": {"kind": "digits", "batch_size": 8},
    "epochs": 1,
}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SCRATCH", str(tmp_path / "scratch"))
    monkeypatch.delenv("NOWHERE", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_home_and_variables_are_put_into_paths(home: Path):
    assert expand_path("~/runs") == f"{home}/home/runs"
    assert expand_path("$SCRATCH/a-${SCRATCH}") == f"{home}/scratch/a-{home}/scratch"
    assert expand_path("runs/~x/$5/100%") == "runs/~x/$5/100%"
    with pytest.raises(InputError, match=r"^run_dir: found '\$NOWHERE/x', but the variable NOWHERE is not"):
        expand_path("$NOWHERE/x", "run_dir")
    with pytest.raises(InputError, match="no user 'nobody-of-this-name'"):
        expand_path("~nobody-of-this-name/x")


def test_paths_of_a_job_are_expanded_and_its_text_is_kept(home: Path):
    (home / "scratch").mkdir()
    (home / "scratch/graphs.json").write_text(json.dumps({"graphs": [{"reduce": [[1, 0]]}]}))
    parallel = {"workers": 2, "topology": "$SCRATCH/graphs.json"}
    job = make_job({**JOB, "run_dir": "~/runs", "parallel": parallel, "cluster": {"python": "~/bin/python"}})
    assert (job.run_dir, job.cluster.python) == (f"{home}/home/runs", f"{home}/home/bin/python")
    assert job.settings().topology.graphs
    assert "run_dir: ~/runs" in job.text()
    assert make_job(JOB, ["parallel.plan=~/x.plan.json"]).parallel.plan == f"{home}/home/x.plan.json"
    with pytest.raises(JobError, match="run_dir: .* the variable NOWHERE is not set"):
        make_job(JOB, ["run_dir=$NOWHERE/runs"])


def test_a_run_is_made_and_found_where_its_path_leads(home: Path):
    folder = new_run(Path(make_job(JOB, ["run_dir=~/runs"]).run_dir), "t")
    assert folder.path == home / "home/runs/t-001"
    folder.settings.write_text("{}")
    assert find_run("~/runs/t-001").path == folder.path
    own = choose_folder(Path("runs"), "t", False, "$SCRATCH/own", RunKind.TRAIN)
    assert own is not None
    assert own.path == home / "scratch/own"


def test_flags_that_are_paths_are_expanded(home: Path):
    (home / "home").mkdir()
    (home / "home/job.yaml").write_text(json.dumps({**JOB, "steps": 1}))
    with pytest.raises(JobError, match=r"epochs: found epochs: 1 and steps: 1"):
        read_job("~/job.yaml")
    done = CliRunner().invoke(app, ["status", "t", "--run-dir", "~/runs"])
    assert f"there is no such run below {home}/home/runs/" in str(done.exception)
    done = CliRunner().invoke(app, ["plan", "$NOWHERE/graph.txt"])
    assert "the variable NOWHERE is not set" in str(done.exception)


def test_paths_of_data_are_expanded_and_what_ones_own_code_gets_is_not(home: Path):
    with pytest.raises(DataError, match=f"{home}/scratch/images"):
        data.build("image-folder", "train", path="$SCRATCH/images", size=8)
    with pytest.raises(DataError, match=r"data\.path: .*NOWHERE is not set"):
        data.check("text", {"path": "$NOWHERE/x.txt"})
    assert data.check("test_paths:own", {"path": "~/x"})[1] == {"path": "~/x"}


def own(split: str, path: str) -> None:
    """Code of one's own that takes a path."""
