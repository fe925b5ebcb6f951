"""The files that `plait report` writes, those that it leaves alone, and folders that it refuses."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from plait.core.errors import InputError
from support.recorded_run import T0, make_run, plait


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return make_run(tmp_path / "two-stages")


def test_a_trace_tables_and_a_picture_are_written_too(run: Path):
    options = ("-o", "r.html", "--trace", "t.json", "--csv", "tables", "--png", "p.png", "--json")
    files = json.loads(plait("report", str(run), *options))["files"]
    bars = [each for each in json.loads(Path("t.json").read_text())["traceEvents"] if each["ph"] == "X"]
    assert len(bars) == 200
    times = {"ts": 1_100_000, "dur": 1_000_000}
    third = {"name": "forward 0", "cat": "F", "ph": "X", "pid": 0, "tid": 1, "args": {"stage": 1}}
    assert bars[2] == {**third, **times}
    lines = {path.name: path.read_text().splitlines() for path in Path("tables").iterdir()}
    assert {name: len(each) - 1 for name, each in lines.items()} == {
        "curves.csv": 42,
        "idle.csv": 2,
        "stages.csv": 2,
        "adaptations.csv": 2,
        "faults.csv": 1,
        "operations.csv": 200,
    }
    assert Path("p.png").read_bytes().startswith(b"\x89PNG")
    assert set(files) == {"r.html", "t.json", "p.png", *(f"tables/{name}" for name in lines)}
    plait("report", str(run), *options)  # each is known as Plait's


@pytest.mark.parametrize("option", ["-o", "--trace", "--png", "--csv"])
def test_what_plait_did_not_write_is_replaced_only_when_asked(option: str, run: Path):
    path = Path("mine/curves.csv" if option == "--csv" else "mine")
    path.parent.mkdir(exist_ok=True)
    path.write_text("my notes")
    with pytest.raises(
        InputError, match="exists and is no report of Plait's; name another file, or say --force"
    ):
        plait("report", str(run), option, "mine")
    assert path.read_text() == "my notes"
    assert not Path("two-stages.report.html").exists()
    if option != "--png":  # which takes long to draw
        plait("report", str(run), option, "mine", "--force")
        assert "my notes" not in path.read_text()


def test_two_outputs_in_one_file_are_refused(run: Path):
    with pytest.raises(InputError, match="found one file for two of them, expected a file for each"):
        plait("report", str(run), "-o", "one.html", "--trace", "./one.html")
    assert not Path("one.html").exists()


@pytest.mark.parametrize("option", ["-o", "--trace", "--png"])
def test_a_folder_in_the_place_of_a_file_is_refused_before_anything_is_written(option: str, run: Path):
    Path("there").mkdir()
    with pytest.raises(InputError, match=rf"{option}: found 'there', a folder, expected a file"):
        plait("report", str(run), option, "there", "--csv", "tables")
    assert not Path("tables").exists()
    assert not Path("two-stages.report.html").exists()


def test_a_reader_that_has_read_enough_is_no_error_and_nothing_is_added_to_a_stream(run: Path):
    reading, writing = os.pipe()
    os.close(reading)
    assert plait("report", str(run), "-o", f"/dev/fd/{writing}") == ""
    os.close(writing)
    assert plait("report", str(run), "-o", "/dev/null") == ""


def test_tables_of_another_version_are_replaced(run: Path):
    Path("tables").mkdir()
    Path("tables/idle.csv").write_text("worker,computing,resting\n0,1.0,2.0\n")
    plait("report", str(run), "--csv", "tables")
    assert "resting" not in Path("tables/idle.csv").read_text()


def broken(run: Path) -> None:
    with (run / "events" / "rank1.jsonl").open("a") as file:
        file.write(
            json.dumps({"t": T0, "rank": 1, "kind": "operations", "letters": "FB", "stages": [1]}) + "\n"
        )


def no_folder(run: Path) -> None:
    shutil.rmtree(run / "events")
    (run / "events").touch()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda run: (run / "status.json").unlink(), "expected a run's folder or name"),
        (no_folder, r"two-stages/events: Not a directory; name another place"),
        (lambda run: shutil.rmtree(run / "events"), r"no events \(finished\); .* a script does not"),
        (
            broken,
            r"rank1.jsonl:21: expected operations, each with a letter, stage, microbatch, start and end",
        ),
    ],
)
def test_a_folder_that_has_no_record_is_refused(change: Any, message: str, run: Path):
    change(run)
    with pytest.raises(InputError, match=message):
        plait("report", str(run))
    assert not list(Path.cwd().glob("*.html"))
