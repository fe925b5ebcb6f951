"""`plait resize`: what a person types is answered by the job, or refused in one sentence."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from plait.cli import app
from plait.core.errors import PlaitError
from plait.launcher.run_dir import RunDir
from support.control import endpoint


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDir]:
    with endpoint(tmp_path / "run") as found:
        found.settings.write_text("{}")
        yield found


def resize(*words: str) -> str:
    done = CliRunner().invoke(app, ["resize", *words], catch_exceptions=True)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.output


def test_it_tells_of_the_workers_that_a_job_has(run: RunDir):
    output = resize(str(run.path))
    assert f"{run.path}: 2 workers (version 1)\nworkers 0, 1; next: plait status {run.path}" in output


def test_it_asks_for_workers_and_prints_what_the_job_answers(run: RunDir):
    found = json.loads(resize(str(run.path), "4", "--wait", "0", "--if-version", "1", "--json"))
    assert (found["run"], found["workers"], found["version"]) == (str(run.path), 4, 2)
    assert not found["is_settled"]
    output = resize(str(run.path), "-H", "w0:1,w1:2", "--wait", "0")
    assert "2 workers, 3 wanted (version 3)" in output


def test_it_waits_until_a_worker_that_is_to_leave_has_left(run: RunDir):
    found = json.loads(resize(str(run.path), "2", "--without", "0", "--wait", "0", "--json"))
    assert (found["members"], found["is_settled"]) == ([0, 1], False)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["9"], "workers: found 9, expected 1 to 4"),
        (["3", "--if-version", "7"], "version: found 7, but the number of workers has changed"),
        (["1", "--without", "5"], "without: found 5, expected workers of the job"),
        (["-H", "w9:1"], "hosts: found 'w9', expected hosts that the job has: w0, w1"),
        (["3", "-H", "w0:2"], "WORKERS and -H: found both"),
        (["--without", "0"], "--without: expected the number of workers"),
        (["3", "--wait", "-1"], "--wait: found -1, expected seconds"),
    ],
)
def test_what_makes_no_sense_is_refused(run: RunDir, words: list[str], expected: str):
    with pytest.raises(PlaitError, match=expected) as caught:
        resize(str(run.path), *words)
    assert caught.value.exit_status == 2


def test_a_job_that_does_not_run_is_refused(tmp_path: Path):
    (tmp_path / "settings.json").write_text("{}")
    with pytest.raises(PlaitError, match="not running; only a running job has workers to change"):
        resize(str(tmp_path), "3")


def test_its_help_has_an_example():
    assert "Example: plait resize digits 4" in resize("--help")
