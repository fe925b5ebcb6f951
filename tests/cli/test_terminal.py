"""The live view of a run on a real pseudo-terminal, and the plain lines elsewhere."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import termios
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plait.adapt.progress_values import progress_of
from plait.cli.sweep import SweepDisplay
from plait.core.run_events import Changed, Operations, Pace, Signals, WorkersChanged
from plait.launcher.display import WorkerState
from plait.report.terminal import RunDisplay, describe_workers
from support.elastic_loop import await_event

WORKERS = (WorkerState(0, "localhost", 4_000_000), WorkerState(1, "localhost", 4_000_001))
PROGRESS: dict[str, Any] = {
    "step": 40,
    "steps": 120,
    "loss": 0.41,
    "samples_per_s": 5120.0,
    "left_s": 2.1,
    "idle_share": 0.12,
    "memory_bytes": 512_000_000,
    "stages": [[0], [1]],
    "pipelines": 1,
    "change": "step 30: batch size 128 (\x1b[2Jnoise\nscale)",
}
HIDE, SHOW = b"\x1b[?25l", b"\x1b[?25h"


class Terminal:
    """A pseudo-terminal; what is written to it is collected by a thread."""

    def __init__(self) -> None:
        self.main, self.end = pty.openpty()
        termios.tcsetwinsize(self.end, (24, 100))
        self.settings = termios.tcgetattr(self.end)
        self.file = os.fdopen(os.dup(self.end), "w")
        self.written = b""
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            while data := os.read(self.main, 1 << 16):
                self.written += data
        except OSError:  # the other end is closed
            pass

    def close(self) -> bytes:
        """Close it; returns all that was written."""
        assert termios.tcgetattr(self.end) == self.settings
        self.file.close()
        os.close(self.end)
        self._thread.join(30)
        assert not self._thread.is_alive()
        os.close(self.main)
        return self.written


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Terminal]:
    """Opens a terminal as standard error; within the test, because pytest replaces it before."""
    monkeypatch.setenv("TERM", "xterm")

    def make() -> Terminal:
        made = Terminal()
        monkeypatch.setattr(sys, "stderr", made.file)
        return made

    return make


@pytest.mark.parametrize("ending", [None, KeyboardInterrupt, RuntimeError("worker 1 failed")])
def test_a_live_view_shows_the_run_and_leaves_the_terminal_as_it_was(
    opened: Callable[[], Terminal], ending: Any
):
    terminal = opened()
    try:
        with RunDisplay() as display:
            display.printed("runs/digits-001: 2 workers on localhost")
            display.started(WORKERS)
            display.progressed(PROGRESS)
            display.printed("a line of a worker [bold]")
            if ending is not None:
                raise ending
    except (KeyboardInterrupt, RuntimeError):
        pass
    written = terminal.close()
    for text in (
        "step 40/120  loss 0.41  5,120 samples/s  2.1 s left",
        "2 workers on localhost  12% idle  512 MB a worker",
        "2 stages on workers 0 | 1",
        "last change: step 30: batch size 128 (\\x1b[2Jnoise scale)",
        "a line of a worker [bold]",
    ):
        assert text.encode() in written
    assert 0 <= written.rfind(HIDE) < written.rfind(SHOW)
    # The view is erased; what was printed stays.
    assert written.rfind(b"\x1b[2K") > written.rfind(b"last change")


def test_a_closed_terminal_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch):
    main, end = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", os.fdopen(end, "w", buffering=1))
    with RunDisplay() as display:
        display.started(WORKERS)
        os.close(main)
        with pytest.raises(OSError, match="Input/output error"):  # the run's status file ignores it
            display.printed("a line")
        display.progressed(PROGRESS)


def test_a_sweep_has_its_workers_and_its_last_change_above_the_trials(opened: Callable[[], Terminal]):
    terminal = opened()
    row = {"trial": 3, "values": {"optimizer.lr": 0.1}, "step": 7, "state": "running"}
    rest = {"metrics": {}, "train_loss": 0.5, "why": ""}
    progress = {"step": 9, "steps": 40, "trials": 4, "ended": 1, "rows": [row | rest], "change": "step 5: c"}
    with SweepDisplay() as display:
        display.started((WorkerState(0, "localhost", os.getpid()),))
        display.progressed(progress)
    written = terminal.close().decode()
    assert "1/4 trials ended  step 9/40" in written
    assert "1 worker on localhost" in written
    assert "MB of memory" in written
    assert written.index("last change: step 5: c") < written.index("0.1")


@pytest.mark.parametrize("variable", ["FORCE_COLOR", "TTY_COMPATIBLE", ""])
def test_a_file_gets_plain_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str):
    if variable:
        monkeypatch.setenv(variable, "1")
    with (tmp_path / "err").open("w") as file:
        monkeypatch.setattr(sys, "stderr", file)
        with RunDisplay() as display:
            display.progressed(PROGRESS)
    assert (tmp_path / "err").read_text() == "step 40/120  loss 0.41  5,120 samples/s  2.1 s left\n"


def test_a_terminal_that_cannot_move_its_cursor_gets_plain_lines(
    opened: Callable[[], Terminal], monkeypatch: pytest.MonkeyPatch
):
    terminal = opened()
    monkeypatch.setenv("TERM", "dumb")
    with RunDisplay() as display:
        display.progressed(PROGRESS)
    assert terminal.close() == b"step 40/120  loss 0.41  5,120 samples/s  2.1 s left\r\n"


def test_workers_are_named_by_host():
    two = (WorkerState(0, "w0", 1), WorkerState(1, "w0", 2), WorkerState(4, "w1", 3))
    assert describe_workers(two) == "3 workers on w0 (0-1), w1 (4)"
    assert describe_workers([WorkerState(n, f"w{n}", n) for n in range(9)]) == "9 workers on 9 hosts"


def test_progress_has_the_idle_share_and_the_last_change_of_a_run():
    operations = Operations(3, "FB", (0, 0), (0, 0), (10.0, 11.0), (10.5, 12.0))
    assert progress_of(operations) == {"idle_share": 0.25}
    assert progress_of(Pace(1, 1, 1, 1.0, 1.0, 0.4, 0, None, 0)) == {"idle_share": 0.4}
    signals = Signals(1, 0.5, 8, 1.0, 2, "all-reduce", "ring", step_s=0.2, work_s=(0.1, 0.2))
    assert progress_of(signals) == {"idle_share": 0.25}
    change = Changed(5, "BatchSizeChange", {"batch_size": 64}, "policy", "it grew")
    assert progress_of(change) == {"change": "step 5: batch size 64 (policy: it grew)"}
    lost = WorkersChanged(5, 2, (0,), (), (), (1,), 0.5, "supervisor", "worker 1 was lost")
    text = "step 5: 1 worker (version 2) (supervisor: worker 1 was lost; paused 500 ms)"
    assert progress_of(lost) == {"change": text}


# How the display ends is shown above for each way; here it is the display of a real run.
@pytest.mark.extended
@pytest.mark.parametrize("ending", ["Ctrl-C", "kill"])
def test_a_real_run_that_is_stopped_or_loses_a_worker_leaves_the_terminal_as_it_was(
    tmp_path: Path, forked_commands: None, ending: str
):
    terminal = Terminal()
    job = Path(__file__).parents[2] / "examples" / "digits.yaml"
    command = [sys.executable, "-m", "plait", "train", str(job), "--set", "epochs=10000"]
    process = subprocess.Popen(
        [*command, "--run", "run"],
        stdin=terminal.end,
        stdout=terminal.end,
        stderr=terminal.end,
        cwd=tmp_path,
        env={**os.environ, "TERM": "xterm"},
        start_new_session=True,
    )
    await_event(lambda: b"samples/s" in terminal.written and b" a worker" in terminal.written, 240)
    if ending == "Ctrl-C":
        os.killpg(process.pid, signal.SIGINT)
    else:
        status = json.loads((tmp_path / "run" / "status.json").read_text())
        os.kill(status["workers"][1]["pid"], signal.SIGKILL)
    assert process.wait(120) == (130 if ending == "Ctrl-C" else 1)
    written = terminal.close()
    assert 0 <= written.rfind(HIDE) < written.rfind(SHOW)
    assert (b"stopped; go on with:" if ending == "Ctrl-C" else b"ended by SIGKILL") in written
