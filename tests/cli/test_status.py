"""`plait status` and `stop` on runs that failed, whose files are damaged, or that belong to others."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from plait.cli import app
from plait.cli.status_file import list_runs
from plait.core.errors import InputError, PlaitError
from plait.launcher.run_dir import RunDir
from plait.report.terminal import runs_table

GOOD: dict[str, Any] = {
    "state": "running",
    "pid": 4,
    "started": 1.7e9,
    "updated": 1.7e9,
    "workers": [{"rank": 0, "host": "localhost", "pid": 4000000}],
    "progress": {"step": 3, "steps": 20, "loss": 0.5, "samples_per_s": 0.34, "left_s": 0.0},
}


def plait(*words: str) -> str:
    done = CliRunner().invoke(app, list(words))
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.output


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    folder = RunDir(tmp_path / "run")
    folder.path.mkdir()
    folder.status.write_text(json.dumps(GOOD))
    return folder


def test_a_run_that_nobody_holds_has_died_and_its_numbers_read_well(run: RunDir):
    shown = plait("status", str(run.path))
    assert f"{run.path}: died, last update" in shown
    assert "step 3/20  loss 0.5  0.34 samples/s\n" in shown  # and no time that is left
    assert "worker 0 on localhost: pid 4000000, ended" in shown


def test_a_stream_without_length_has_a_step_and_no_end_and_shows_a_metric_of_ones_own(run: RunDir):
    progress = {"step": 7, "steps": None, "loss": 0.5, "test_loss": 0.25, "test_error": 0.125}
    run.status.write_text(json.dumps({**GOOD, "state": "stopped", "progress": progress}))
    assert "step 7  loss 0.5  test error 0.125" in plait("status", str(run.path))
    assert json.loads(plait("status", str(run.path), "--json"))["progress"]["steps"] is None
    run.status.write_text(json.dumps({**GOOD, "progress": {**progress, "test_error": "x"}}))
    with pytest.raises(InputError, match="test_error: found 'x', expected a number or null"):
        plait("status", str(run.path))


@pytest.mark.parametrize(
    ("failure", "cause"),
    [
        (
            "Traceback (most recent call last):\n  File x\nValueError: no\n"
            "worker 1 on localhost failed: ValueError: no\nits log: runs/x/logs/rank1.err\n",
            "worker 1 on localhost failed: ValueError: no",
        ),
        (
            "the agent on w0 ended with status 255; it printed:\nssh: connect to host w0\nNo route to host\n",
            "the agent on w0 ended with status 255; it printed:",
        ),
        ("stopped at once, at a second request\n", "stopped at once, at a second request"),
        ("", None),
        ("\xff\x00\n", "ÿ"),
    ],
)
def test_a_failed_run_shows_its_cause(run: RunDir, failure: str, cause: str | None):
    run.status.write_text(json.dumps({**GOOD, "state": "failed"}))
    run.failure.write_text(failure)
    shown = plait("status", str(run.path))
    assert ("it ended with: " in shown) == (cause is not None)
    assert cause is None or f"it ended with: {cause}" in shown


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"state": None}, "state: found None, expected text"),
        ({"updated": "now"}, "updated: found 'now', expected seconds"),
        ({"updated": float("nan")}, "updated: found nan, expected seconds"),
        ({"progress": ".."}, "progress: found '..', expected an object"),
        ({"progress": {"step": 3}}, "steps: missing, expected a whole number"),
        ({"progress": {"step": "3", "steps": 4}}, "step: found '3', expected a whole number"),
        ({"progress": {"step": 3, "steps": 4, "left_s": [1]}}, "left_s: found [1], expected a number"),
        ({"progress": {"step": 3, "steps": 4, "loss": "x"}}, "loss: found 'x', expected a number or null"),
        ({"progress": {"step": 3, "steps": 4, "trials": 2}}, "ended: missing, expected a whole number"),
        ({"progress": {"step": 3, "steps": 4, "failed": 5}}, "failed: found 5, expected an object"),
        ({"workers": 3}, "workers: found 3, expected a list"),
        ({"workers": [3]}, "workers: found [3], expected an object for each worker"),
        ({"workers": [{"rank": 0, "host": "localhost"}]}, "pid: missing, expected a whole number"),
        ({"workers": [{"rank": 0, "host": None, "pid": 3}]}, "host: found None, expected text"),
    ],
)
@pytest.mark.parametrize("flag", ["--no-json", "--json"])
def test_a_damaged_status_is_answered_in_words(run: RunDir, change: dict[str, Any], words: str, flag: str):
    run.status.write_text(json.dumps({**GOOD, **change}))
    with pytest.raises(InputError) as caught:
        plait("status", str(run.path), *([flag] if flag == "--json" else []))
    assert str(caught.value).startswith(f"{run.status}: {words}; the file is damaged")


@pytest.mark.parametrize("text", ['{"state": "running"}', "{", "[]", "[" * 100_000, "\0"])
def test_what_is_no_status_at_all_is_refused(run: RunDir, text: str):
    run.status.write_text(text)
    with pytest.raises(InputError, match="status"):
        plait("status", str(run.path))
    with pytest.raises(InputError, match=r"not running \(its status file is damaged\); nothing to stop"):
        plait("stop", str(run.path))


@pytest.mark.parametrize("name", ["status.json", "failure.txt", ".lock"])
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(run: RunDir, name: str):
    run.status.write_text(json.dumps({**GOOD, "state": "failed"}))
    path = run.path / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    listed: list[str] = []

    def ask() -> None:
        with contextlib.suppress(InputError):
            plait("status", str(run.path))
        listed.append(plait("status", "--run-dir", str(run.path.parent)))

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(60)
    assert listed, "it waits for who writes to the pipe"
    assert ("no regular file" in listed[0]) == (name == "status.json")


def test_to_print_the_list_of_runs_takes_less_than_to_read_them(tmp_path: Path):
    for number in range(400):
        folder = RunDir(tmp_path / f"run-{number:03d}")
        folder.path.mkdir()
        folder.status.write_text(json.dumps(GOOD))
    began = time.process_time()
    rows = list_runs(tmp_path)
    read_s = time.process_time() - began
    printed = runs_table(rows, 1.7e9)
    assert len(printed.splitlines()) == 401
    assert time.process_time() - began - read_s < read_s


@pytest.mark.parametrize("timeout", ["nan", "inf", "-1", "1e300"])
def test_only_a_time_to_wait_is_taken_for_one(run: RunDir, timeout: str):
    with pytest.raises(InputError, match="--timeout: found .*, expected seconds"):
        plait("stop", str(run.path), f"--timeout={timeout}")


def test_a_run_of_another_user_is_not_stopped(run: RunDir, monkeypatch: pytest.MonkeyPatch):
    def refuse(pid: int, number: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "kill", refuse)
    with run.lock(), pytest.raises(InputError, match="belongs to another user"):
        plait("stop", str(run.path))


def test_a_run_that_ended_meanwhile_is_stopped(run: RunDir, monkeypatch: pytest.MonkeyPatch):
    lock = contextlib.ExitStack()
    lock.enter_context(run.lock())

    def end(pid: int, number: int) -> None:
        lock.close()
        raise ProcessLookupError(3, "No such process")

    monkeypatch.setattr(os, "kill", end)
    assert f"{run.path}: died at step 3" in plait("stop", str(run.path))


@pytest.mark.parametrize("text", ["", "{", '{"host": "%h", "pid": -1}', '{"host": "%h"}', "[]"])
def test_a_lock_that_names_no_process_signals_nobody(run: RunDir, text: str, monkeypatch: pytest.MonkeyPatch):
    signalled: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: signalled.append(pid))
    with run.lock():
        (run.path / ".lock").write_text(text.replace("%h", socket.gethostname()))
        with pytest.raises(PlaitError):
            plait("stop", str(run.path))
        assert f"{run.path}: running" in plait("status", str(run.path))
    assert signalled == []


def test_a_lock_that_names_a_process_which_does_not_hold_it_signals_nobody(run: RunDir):
    with subprocess.Popen(["sleep", "60"]) as other:
        try:
            since = psutil.Process(other.pid).create_time()
            with run.lock():
                (run.path / ".lock").write_text(
                    json.dumps({"host": socket.gethostname(), "pid": other.pid, "since": since})
                )
                with pytest.raises(InputError, match="its lock does not name the process"):
                    plait("stop", str(run.path), "--timeout", "0")
            assert other.poll() is None
        finally:
            other.kill()


def test_what_a_file_of_a_run_holds_does_not_reach_the_terminal_as_commands(run: RunDir):
    wild = "\x1b]0;mine\x07\x1b[2J\x9b31m\u202egnip"
    workers = [{"rank": 0, "host": wild, "pid": 4000000}]
    run.status.write_text(json.dumps({**GOOD, "state": "failed", "workers": workers}))
    run.failure.write_text(f"x {wild}\ny {wild}\n")
    shown = plait("status", str(run.path))
    assert all(letter.isprintable() or letter == "\n" for letter in shown)
    assert shown.count("\\x1b]0;mine\\x07") == 2
    run.status.write_text(json.dumps({**GOOD, "state": wild}))
    assert all(letter.isprintable() or letter == "\n" for letter in plait("status", str(run.path)))


def test_a_run_of_another_user_is_evaluated_only_where_they_are_trusted(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
):
    run.settings.write_text("{}")
    if os.geteuid() == 0:
        os.chown(run.settings, 65534, 65534)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(InputError, match="belongs to another user .* executes the code .* then say --trust"):
        plait("evaluate", str(run.path))
    with pytest.raises(InputError, match=r"settings.json: field 'name' is missing"):
        plait("evaluate", str(run.path), "--trust")


def test_without_a_run_all_runs_are_listed_newest_first_and_unreadable_ones_are_named(tmp_path: Path):
    progress = {"step": 9, "steps": 40, "trials": 8, "ended": 2, "loss": 0.5, "test_accuracy": 0.931}
    older = RunDir(tmp_path / "runs" / "digits-001")
    newer = RunDir(tmp_path / "runs" / "[red]team" / "sweep-001")
    damaged = RunDir(tmp_path / "runs" / "odd\x1b[2J-001")
    for folder, text in (
        (older, json.dumps({**GOOD, "state": "finished"})),
        (newer, json.dumps({**GOOD, "updated": 1.8e9, "state": "stopped", "progress": progress})),
        (damaged, "{"),
    ):
        folder.path.mkdir(parents=True)
        folder.status.write_text(text)
    os.utime(damaged.path, (1.6e9, 1.6e9))
    # Not within a run, nor through a link.
    (older.path / "trials" / "run").mkdir(parents=True)
    (older.path / "trials" / "run" / "status.json").write_text("{")
    (tmp_path / "runs" / "latest").symlink_to(older.path)

    lines = plait("status", "--run-dir", str(tmp_path / "runs")).splitlines()
    assert [line.split()[0] for line in lines[1:4]] == [
        "[red]team/sweep-001",
        "digits-001",
        "odd\\x1b[2J-001",
    ]
    assert "9/40  2/8 trials ended  loss 0.5  test accuracy 93.1%  1" in " ".join(lines[1].split(" "))
    assert lines[2].split()[1:5] == ["finished", "3/20", "loss", "0.5"]
    assert lines[4].startswith("cannot read odd\\x1b[2J-001: ")
    assert len(lines) == 5

    listed = json.loads(plait("status", "--run-dir", str(tmp_path / "runs"), "--json"))["runs"]
    assert [row["state"] for row in listed] == ["stopped", "finished", "unreadable"]
    assert listed[1]["progress"]["step"] == 3
    assert listed[1]["run"] == str(older.path)


def test_a_run_that_is_being_started_is_starting_until_it_has_a_status(tmp_path: Path):
    folder = RunDir(tmp_path / "runs" / "digits-001")
    folder.path.mkdir(parents=True)
    folder.record.write_text("{}")
    everything = ("status", "--run-dir", str(tmp_path / "runs"))
    assert "never started" in plait(*everything)
    with pytest.raises(InputError, match="no such file; expected a status file"):
        plait("status", str(folder.path))
    with folder.lock():
        assert plait(*everything).splitlines()[1].split()[:2] == ["digits-001", "starting"]
        assert plait("status", str(folder.path)).startswith(f"{folder.path}: starting, last update ")
    assert "never started" in plait(*everything)


def test_without_a_run_an_empty_or_missing_folder_is_one_sentence(tmp_path: Path):
    assert plait("status", "--run-dir", str(tmp_path)).startswith(f"no runs: {tmp_path}/ has no runs (")
    assert "does not exist" in plait("status", "--run-dir", str(tmp_path / "none"))
    assert json.loads(plait("status", "--run-dir", str(tmp_path / "none"), "--json"))["runs"] == []
