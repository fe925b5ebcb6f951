"""`plait train --slow` and `--jitter` say what they set, and what they expected."""

from __future__ import annotations

import pytest

from plait.cli.train import slow_overrides
from plait.core.errors import JobError
from plait.schema.job import make_job
from plait.schema.settings import SlowSettings
from plait.training.engines.straggler_injection import StragglerInjector

JOB = {"name": "t", "model": "m:m", "data": {"kind": "digits", "batch_size": 8}, "steps": 1}


def test_the_flags_reach_the_workers_settings():
    job = make_job({**JOB, "parallel": {"workers": 2}}, slow_overrides(["1:4", "0:1.5"], "0.1:0.5"))
    assert job.settings().slow == SlowSettings({1: 4.0, 0: 1.5}, (0.1, 0.5))


@pytest.mark.parametrize(
    ("slow", "jitter", "words"),
    [
        (["1"], None, "--slow: found '1', expected worker:times"),
        (["x:4"], None, "--slow: found 'x:4'"),
        (["0.5:4"], None, "--slow: found '0.5:4'"),
        ([], "0.1", "--jitter: found '0.1', expected probability:seconds"),
    ],
)
def test_a_wrong_flag_is_answered_with_its_form(slow: list[str], jitter: str | None, words: str):
    with pytest.raises(JobError, match=words):
        slow_overrides(slow, jitter)


def sleeps(settings: SlowSettings, rank: int, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found: list[float] = []
    monkeypatch.setattr("plait.training.engines.straggler_injection.time.sleep", found.append)
    slow = StragglerInjector(settings, rank, seed=3)
    for _ in range(50):
        with slow.slowed():
            pass
    return [round(seconds, 2) for seconds in found]


def test_stumbles_depend_on_the_seed_and_the_rank_alone(monkeypatch: pytest.MonkeyPatch):
    settings = SlowSettings({}, (0.2, 0.5))
    first = sleeps(settings, 0, monkeypatch)
    assert first == sleeps(settings, 0, monkeypatch)
    assert first != sleeps(settings, 1, monkeypatch)
    assert 2 <= first.count(0.5) <= 20
    assert sleeps(SlowSettings(), 0, monkeypatch) == []
