"""A run touches only what it made: folders of others are refused, and runs and sweeps keep apart."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import plait
from plait.core.errors import InputError
from plait.launcher.run_dir import FILES, FOLDERS, RunDir, RunKind, find_run, latest_run, new_run
from plait.sweeping.worker import check_shared


def job(folder: Path, **changes: Any) -> dict[str, Any]:
    content = {
        "name": "t",
        "model": "plait.workloads.mlp:mlp_tiny",
        "data": {"kind": "digits", "batch_size": 64},
        "steps": 2,
        "run_dir": str(folder / "runs"),
    }
    return {**content, **changes}


def claimed(path: Path, kind: RunKind) -> RunDir:
    folder = RunDir(path)
    folder.claim(kind, resume=False)
    return folder


def content_of(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", ["job.yaml", "settings.json", ".lock", "logs/mine.txt", "checkpoints/best"])
@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_in_which_a_run_would_write_over_something_is_refused_and_left_alone(
    name: str, resume: bool, tmp_path: Path
):
    mine = tmp_path / "mine"
    (mine / name).parent.mkdir(parents=True)
    (mine / name).write_text("# kept\n")
    words = f"has {name.partition('/')[0]}, which a run would write over; name a new folder, such as"
    with pytest.raises(InputError, match="holds no run that can go on|expected a run" if resume else words):
        plait.train(job(tmp_path), run_folder=str(mine), resume=resume)
    with pytest.raises(InputError):
        plait.sweep(job(tmp_path), {"seed": [0, 1]}, **{"resume" if resume else "run_folder": str(mine)})
    assert content_of(tmp_path) == {mine / name: b"# kept\n"}


@pytest.mark.parametrize("resume", [False, True])
def test_an_empty_name_of_a_folder_is_no_folder(
    resume: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="found '', expected a folder; is the variable .* unset"):
        plait.train(job(tmp_path), run_folder="", resume=resume)
    with pytest.raises(InputError, match="found ''"):
        find_run("")
    assert os.listdir(tmp_path) == []


def test_what_a_launch_takes_back_is_what_it_made(tmp_path: Path):
    (tmp_path / "notes.txt").write_text("kept")
    folder = claimed(tmp_path, RunKind.TRAIN)
    for name in FILES:
        (tmp_path / name).write_text("{}")
    for name in FOLDERS:
        (tmp_path / name).mkdir()
    (folder.logs / "rank0.err").write_text("x")
    (folder.logs / "mine.txt").write_text("kept too")
    folder.remove_untrained()
    assert set(content_of(tmp_path)) == {tmp_path / "notes.txt", folder.logs / "mine.txt"}


def test_the_folders_above_a_new_run_go_with_it(tmp_path: Path):
    claimed(tmp_path / "a" / "b" / "c", RunKind.TRAIN).remove_untrained()
    new = new_run(tmp_path / "d" / "runs", "t")
    new.claim(RunKind.SWEEP, resume=False)
    new.remove_untrained()
    assert os.listdir(tmp_path) == []


def test_a_new_run_is_not_disturbed_by_one_that_takes_its_empty_folder_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    runs, mkdir = tmp_path / "runs", Path.mkdir
    others = [new_run(runs, "other")]

    def make(self: Path, *given: Any, **options: Any) -> None:
        if self.name == "t-001" and others:
            others.pop().remove_made()
        mkdir(self, *given, **options)

    monkeypatch.setattr(Path, "mkdir", make)
    assert new_run(runs, "t").path.is_dir()


def test_a_folder_is_claimed_once(tmp_path: Path):
    claimed(tmp_path, RunKind.SWEEP)
    with pytest.raises(InputError, match="holds a sweep already; go on with --resume .plait sweep JOB"):
        claimed(tmp_path, RunKind.TRAIN)


def test_training_goes_on_in_no_sweep_and_a_sweep_in_no_training(tmp_path: Path):
    runs = tmp_path / "runs"
    claimed(runs / "t-002", RunKind.SWEEP)
    sweep, train = f"plait sweep JOB --resume {runs}/t-002", f"plait train JOB --resume --run {runs}/t-001"
    for named in (None, "t-002", "t", str(runs / "t-002")):
        with pytest.raises(InputError, match="holds a sweep, expected a training run; go on with it by") as e:
            plait.train(job(tmp_path), resume=True, run_folder=named)
        assert sweep in str(e.value)
    claimed(runs / "t-001", RunKind.TRAIN)
    with pytest.raises(InputError, match="holds a training run, expected a sweep") as caught:
        plait.sweep(job(tmp_path), resume="t-001")
    assert train in str(caught.value)
    assert {path.name for path in content_of(tmp_path)} == {"run.json"}
    for kind, name in ((RunKind.TRAIN, "t-001"), (RunKind.SWEEP, "t-002"), (None, "t-002")):
        assert find_run("t", runs, kind).path == runs / name
        latest = latest_run(runs, "t", kind)
        assert latest is not None
        assert latest.path == runs / name


def test_a_run_whose_record_is_damaged_is_passed_over_and_refused_by_name(tmp_path: Path):
    claimed(tmp_path / "t-001", RunKind.TRAIN)
    claimed(tmp_path / "t-002", RunKind.TRAIN).record.write_text("")
    assert find_run("t", tmp_path, RunKind.TRAIN).path == tmp_path / "t-001"
    with pytest.raises(InputError, match=r"t-002/run.json:1: not JSON"):
        find_run("t-002", tmp_path, RunKind.TRAIN)


def test_a_run_takes_no_file_for_its_own_that_came_later(tmp_path: Path):
    folder = claimed(tmp_path, RunKind.TRAIN)
    record = json.loads(folder.record.read_text())
    folder.record.write_text(json.dumps({**record, "entries": ["job.yaml"]}))
    folder.claim(RunKind.TRAIN, resume=True)
    (tmp_path / "tensorboard").mkdir()
    with pytest.raises(InputError, match="has tensorboard, which its run did not make; move them away"):
        folder.claim(RunKind.TRAIN, resume=True)


def test_a_job_file_that_a_person_has_changed_is_not_rewritten(tmp_path: Path):
    folder = claimed(tmp_path, RunKind.TRAIN)
    folder.write_job("steps: 1\n")
    folder.write_job("steps: 2\n")
    assert folder.job.read_text() == "steps: 2\n"
    folder.job.write_text("steps: 2  # enough\n")
    folder.write_job("steps: 3\n")
    assert folder.job.read_text() == "steps: 2  # enough\n"


def test_a_host_that_does_not_see_the_folder_of_a_sweep_is_refused(tmp_path: Path):
    run = claimed(tmp_path / "run", RunKind.SWEEP)
    check_shared("w1", run, run.read_record().id)
    others = claimed(tmp_path / "others", RunKind.SWEEP)
    for folder in (others, RunDir(tmp_path / "nowhere")):
        with pytest.raises(InputError, match="run_dir: w1 does not see .* set run_dir to one"):
            check_shared("w1", folder, run.read_record().id)
