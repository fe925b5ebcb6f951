"""A fused trial takes steps alone, too, while a sweep runs: both are the same, or the sweep ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from plait.core import events, run_events
from plait.core.logs import kept_warnings
from plait.fusion.optim.optimizer import FusedOptimizer
from plait.launch.run_dir import RunDir
from plait.schema.settings import UNVERIFIED, ModelSettings, OptimizerSettings, VerifySettings
from plait.training.audit.record import DifferenceError
from support.sweeping import sweep_here, sweep_of
from support.training import digits_job

JOBS = {
    "sgd": digits_job(steps=9),
    "adamw, accumulated and clipped": digits_job(
        optimizer=OptimizerSettings("adamw", {"lr": 0.003}), accumulate=3, clip_norm=0.5, steps=5
    ),
    "batch norm and dropout": digits_job(
        model=ModelSettings("support.training:norm_net"), precision="float32", steps=9
    ),
    "bf16": digits_job(model=ModelSettings("support.training:norm_net"), precision="bf16", steps=5),
    "batches of two sizes": digits_job(steps=5),
}


def audited(folder: Path) -> list[run_events.Audited]:
    found = [recorded.event for recorded in events.read(RunDir(folder).events())]
    return [event for event in found if isinstance(event, run_events.Audited)]


@pytest.mark.parametrize("name", JOBS)
def test_one_trial_in_turn_is_what_it_is_alone(name: str, tmp_path: Path) -> None:
    job = JOBS[name]
    over = ["data.batch_size=20,33"] if "sizes" in name else ["optimizer.lr=0.01,0.02,0.05"]
    result = sweep_here(sweep_of(*over, job=job), tmp_path)
    found = audited(tmp_path)
    expected = [1, 2, 4, 8][: 4 if job.steps == 9 else 3]
    assert [event.step for event in found] == expected
    assert [event.trial for event in found] == [
        (step - 1) % (2 if "sizes" in name else 3) for step in expected
    ]
    assert all(event.differences == () for event in found)
    assert result["audited_steps"] == len(found)
    assert result["largest_difference"] < (1e-12 if job.precision == "float64" else 0.05)


def wrong_for_the_second(self: FusedOptimizer, *args: Any, **kwargs: Any) -> Any:
    """A step after which the second trial's weights are a little off."""
    done = _STEP(self, *args, **kwargs)
    for parameter in self.parameters:
        parameter.data[1] *= 1.001
    return done


_STEP = FusedOptimizer.step


def test_a_trial_that_is_not_what_it_is_alone_ends_the_sweep_or_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FusedOptimizer, "step", wrong_for_the_second)
    job = digits_job(steps=5, verify=VerifySettings(start="off"))
    with pytest.raises(DifferenceError, match="step 2 of trial 1 .*: the parameter or buffer .*: off"):
        sweep_here(sweep_of("optimizer.lr=0.01,0.02,0.05", job=job), tmp_path / "stops")
    warned = digits_job(steps=5, verify=VerifySettings(start="off", on_difference="warn"))
    with kept_warnings() as told:
        result = sweep_here(sweep_of("optimizer.lr=0.01,0.02,0.05", job=warned), tmp_path / "warned")
    assert result["reason"] == "finished"
    assert "step 2 of trial 1 is not what it is alone" in told[0]
    off = digits_job(steps=5, verify=UNVERIFIED)
    assert (
        sweep_here(sweep_of("optimizer.lr=0.01,0.02", job=off), tmp_path / "off").get("audited_steps") is None
    )
