"""What first runs meet, with real workers: warnings in results, unlike data, a run that had ended."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import plait
from plait.cli.train import show_warnings
from plait.core.errors import InputError, JobError, PlaitError
from plait.jobs.run_script import run_script
from plait.launcher.display import Silent
from plait.schema.settings import CheckpointSettings
from support.training import digits_job, train_here

pytestmark = pytest.mark.usefixtures("forked_commands")

MINE = """
import os
import torch
from torch.utils.data import TensorDataset

def points(count=40):
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(count, 4, generator=generator), torch.arange(count) % 2)

def same_for_both(split):
    return points()

def half_copied(split):
    return points(40 if os.environ.get("RANK") == "1" else 64)

def error(output, target):
    return (output.argmax(-1) != target).sum(), len(target)
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SCRATCH", str(tmp_path / "scratch"))
    return {
        "name": "first",
        "model": "torch.nn:Linear",
        "model_args": {"in_features": 4, "out_features": 2},
        "data": {"kind": "mine:same_for_both", "batch_size": 8},
        "optimizer": {"kind": "sgd", "lr": 0.1},
        "evaluate": {"metric": "mine:error", "every_steps": 2},
        "steps": 4,
        "parallel": {"workers": 2},
        "run_dir": "$SCRATCH/runs",
    }


def test_a_result_carries_the_warnings_of_its_workers_and_a_run_that_had_ended_says_so(
    job: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    result = plait.train(job)
    assert result.run == str(tmp_path / "scratch/runs/first-001")
    assert result.mode == {"loss": "min"}
    (leak,) = result.warnings
    # How many samples are looked at in the time given to it depends on the machine.
    assert re.match(r"data: \d+ of the \d+ test samples looked at are among the \d+ training samples", leak)
    assert result.to_dict()["warnings"] == [leak]
    assert json.loads((Path(result.run) / "result.json").read_text())["warnings"] == [leak]
    again = plait.train(job, resume=True)
    assert (again.step, again.test, again.train_loss) == (4, result.test, result.train_loss)
    # It looks at the data again, and says so again where it had time for more samples.
    assert any("had already ended, at step 4: nothing was trained" in words for words in again.warnings)
    assert leak in again.warnings
    show_warnings(again.warnings, quiet=True)
    assert capsys.readouterr().err.count("warning: ") == len(again.warnings)
    show_warnings(again.warnings, quiet=False)
    assert capsys.readouterr().err == ""
    status = json.loads((Path(result.run) / "status.json").read_text())["progress"]
    assert (status["step"], status["steps"]) == (4, 4)


def test_workers_with_unlike_data_are_refused_before_anything_is_trained(job: dict[str, Any], tmp_path: Path):
    job["data"]["kind"] = "mine:half_copied"
    with pytest.raises(
        PlaitError, match=r"data: worker [01] on localhost has \d+ samples in the train"
    ) as caught:
        plait.train(job)
    assert caught.value.exit_status == InputError.exit_status
    assert not (tmp_path / "scratch/runs").exists()


def test_going_on_to_an_end_that_the_run_is_beyond_is_refused(tmp_path: Path):
    settings = digits_job(steps=6, checkpoint=CheckpointSettings(every_steps=100))
    train_here(settings, tmp_path)
    with pytest.raises(JobError, match="steps: found 5, but the run has made 6 steps; give 6 or more"):
        train_here(digits_job(steps=5), tmp_path, resume=True)
    epochs = digits_job(steps=None, epochs=2)
    train_here(epochs, tmp_path / "epochs")
    with pytest.raises(JobError, match="epochs: found 1, but the run has come through 2; give"):
        train_here(digits_job(steps=None, epochs=1), tmp_path / "epochs", resume=True)


class Lines(Silent):
    """Keeps what is printed."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def printed(self, line: str) -> None:
        self.lines.append(line)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            ["--lr", "3"],
            "--lr: plait run has no such option; options of the script follow it: .*script.py --lr",
        ),
        (["--nproc-per-node=2"], "the number of workers is -np"),
        (["--elastc"], "did you mean '--elastic'"),
        (["python3", "loop.py"], "found the interpreter 'python3'.*leave it out: plait run -np 2 loop.py"),
    ],
)
def test_options_before_a_script_are_those_of_plait_run(given: list[str], words: str, tmp_path: Path):
    with pytest.raises(InputError, match=words):
        run_script(Path(given[0]), given[1:], None, None, None, "1", tmp_path, Silent())


def test_options_of_plait_run_behind_the_script_are_warned_of(tmp_path: Path):
    (script := tmp_path / "script.py").touch()
    display = Lines()
    with pytest.raises(InputError, match="such as .1:4."):
        run_script(script, ["-np", "2"], None, None, None, "none", tmp_path, display)
    assert ["-np comes after" in line for line in display.lines] == [True]
