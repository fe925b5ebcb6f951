"""A sweep that is killed loses nothing: resumed, it comes to the table of one that was left alone."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from plait.schema.settings import CheckpointSettings, EvaluateSettings, ModelSettings
from support.sweeping import killed_sweep, same_table, sweep_here, sweep_of
from support.training import unverified_job

JOB = unverified_job(
    steps=12,
    model=ModelSettings("support.sweeping:norm_net"),
    evaluate=EvaluateSettings(every_steps=4),
    checkpoint=CheckpointSettings(every_steps=5),
    log_every_steps=None,
)
SWEEPS = {
    "grid": sweep_of("optimizer.lr=log:1e-3:0.3:3", "seed=0,1", width=4, job=JOB),
    "asha": sweep_of(
        "optimizer.lr=log:1e-3:0.3", "optimizer.momentum=0,0.9", width=3, job=JOB, kind="asha", trials=6
    ),
    "halving": sweep_of("optimizer.lr=log:1e-3:0.3", width=3, job=JOB, kind="halving", trials=6, eta=2),
    "pbt": sweep_of("optimizer.lr=log:1e-3:0.3", width=3, job=JOB, kind="pbt", trials=5, least_steps=4),
}


class Killed(Exception):
    """Stands for a kill: nothing after it runs."""


# A grid is killed below; trials of a population begin from others' weights, and rungs end trials, too.
MORE = {"grid", "halving", "asha"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.extended] * (name in MORE)) for name in SWEEPS]
)
def test_a_sweep_killed_at_any_write_resumes_to_the_same_table(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    settings = SWEEPS[name]
    # Without a clock, records are written where the sweep asks for it, not after a second besides.
    monkeypatch.setattr("plait.core.events.time", SimpleNamespace(time=time.time, monotonic=lambda: 0.0))
    writes = _count_flushes(monkeypatch)
    expected = sweep_here(settings, tmp_path / "whole")
    total = len(writes)
    assert total > 10
    for number in (total // 2, total - 2):
        folder = tmp_path / f"killed-{number}"
        with pytest.MonkeyPatch.context() as patch:
            _kill_at(patch, number)
            with pytest.raises(Killed):
                sweep_here(settings, folder)
            _kill_at(patch, 2 + number // 3)
            with contextlib.suppress(Killed):
                sweep_here(settings, folder, resume=True)
        found = sweep_here(settings, folder, resume=True)
        assert same_table(expected, found), (number, total)


def _count_flushes(patch: pytest.MonkeyPatch) -> list[int]:
    from plait.core.events import EventLog

    seen: list[int] = []
    flush = EventLog.flush

    def counted(self: EventLog) -> None:
        seen.append(1)
        flush(self)

    patch.setattr(EventLog, "flush", counted)
    return seen


def _kill_at(patch: pytest.MonkeyPatch, number: int) -> None:
    """Let the process 'die' right before or after it makes its `number`th record last."""
    from plait.core.events import EventLog

    seen = 0
    flush = EventLog.flush

    def deadly(self: EventLog) -> None:
        nonlocal seen
        seen += 1
        if seen > number:
            raise Killed
        flush(self)
        if seen == number:
            raise Killed

    patch.setattr(EventLog, "flush", deadly)


def test_kill_minus_nine_in_its_first_and_last_arrays_loses_nothing(tmp_path: Path):
    expected = sweep_here(SWEEPS["grid"], tmp_path / "whole")
    folder = killed_sweep(1, SWEEPS["grid"], tmp_path, 0, 5)
    assert same_table(expected, sweep_here(SWEEPS["grid"], folder, resume=True))
