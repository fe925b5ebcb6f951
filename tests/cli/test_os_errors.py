"""What the system refuses ends a verb with one message."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from plait.cli import app
from plait.cli.os_errors import os_errors_as_messages
from plait.core.errors import InputError, PlaitError
from support.further import but_further
from support.graphs import PROFILES

JOB = "name: t\nmodel: plait.workloads.mlp:mlp_tiny\ndata: {kind: digits, batch_size: 8}\nsteps: 1\n"
LONG = "a" * 300


@pytest.mark.parametrize(
    "words",
    [
        ["train", "{job}", "--set", "run_dir=/proc/nope"],
        ["train", "{job}", "--set", f"run_dir={LONG}"],
        ["train", "{job}", "--run", f"{LONG}/x"],
        ["sweep", "{job}", "--over", "optimizer.lr=0.1,0.2", "--set", "run_dir=/proc/nope"],
        ["status", LONG],
        ["stop", LONG],
        ["evaluate", LONG],
        ["plan", "{graph}", "--bandwidth", "1e9", "-o", "/proc/nope/x.plan.json"],
        ["plan", "{graph}", "--bandwidth", "1e9", "-o", "{folder}/x.json", "--timeline", "/proc/nope/x.png"],
    ],
    ids=lambda words: " ".join(words[:1] + words[-1:])[:60],
)
def test_a_path_that_cannot_be_used_is_bad_input(words: list[str], tmp_path: Path):
    (tmp_path / "job.yaml").write_text(JOB)
    names = {"job": tmp_path / "job.yaml", "graph": PROFILES / "alexnet.txt", "folder": tmp_path}
    done = CliRunner().invoke(app, [word.format(**names) for word in words])
    assert isinstance(done.exception, PlaitError), done.exception
    assert done.exception.exit_status == 2
    assert 0 < len(str(done.exception)) < 700


@pytest.mark.parametrize(
    ("failure", "kind", "message"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device", "x"),
            PlaitError,
            "x: No space left on device; make room",
        ),
        (OSError(errno.EROFS, "Read-only file system", "runs"), InputError, "runs: Read-only file system"),
        (OSError(errno.EACCES, "Permission denied", "a", None, "b"), InputError, "a to b: Permission denied"),
        (OSError("odd"), PlaitError, "OSError: odd"),
        (TimeoutError(), PlaitError, "TimeoutError: "),
    ],
)
def test_a_failure_of_the_system_becomes_one_message(failure: OSError, kind: type[PlaitError], message: str):
    with pytest.raises(PlaitError) as caught, os_errors_as_messages():
        raise failure
    assert type(caught.value) is kind
    assert message in str(caught.value)
    with pytest.raises(BrokenPipeError), os_errors_as_messages():
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")


@pytest.mark.parametrize(
    "closed", but_further((">&-", ">&- 2>&-", "<&- >&- 2>&-", "<&-"), ">&-", ">&- 2>&-", "<&-")
)
def test_a_verb_without_standard_streams_does_its_work_and_writes_into_no_other_file(
    closed: str, tmp_path: Path
):
    """A file that is opened next would get the number of the stream that is missing."""
    script = (
        "import sys, plait.cli; from rich.table import Table; from plait.report.terminal import print_table\n"
        "def app():\n"
        "    with open(sys.argv[1], 'w') as file:\n"
        "        print_table(Table('column')); print('words', flush=True); print('words', file=sys.stderr)\n"
        "        file.write('own')\n"
        "plait.cli.app = app; plait.cli.main()\n"
    )
    words = ["sh", "-c", f'exec "$0" -c "$1" "$2" {closed}', sys.executable, script, str(tmp_path / "file")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    assert (tmp_path / "file").read_text() == "own"
