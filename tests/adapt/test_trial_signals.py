"""Signals of trials in a fused array: each trial's are those of the same trial alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from plait.core import events
from plait.core.run_events import TrialSignals
from plait.launch.run_dir import RunDir
from plait.schema.settings import OptimizerSettings
from plait.training import components
from plait.training.choose_engine import make_loop
from support.sweeping import sweep_here, sweep_of
from support.training import PlainWorker, unverified_job

RATES = (0.01, 0.1, 0.001)


def test_each_fused_trial_has_the_signals_that_it_has_alone(tmp_path: Path):
    """Three trials in an array of two, so that the third takes the place of one that has ended."""
    job = unverified_job(steps=8, accumulate=4, monitor=("noise-scale",), clip_norm=0.5, log_every_steps=4)
    sweep_here(sweep_of(f"optimizer.lr={','.join(map(str, RATES))}", width=2, job=job), tmp_path / "sweep")
    log = [r.event for r in events.read(RunDir(tmp_path / "sweep").events())]
    for trial, rate in enumerate(RATES):
        found = [e for e in log if isinstance(e, TrialSignals) and e.trial == trial]
        assert [each.step for each in found] == [4, 8]
        options = {**job.optimizer.options, "lr": rate}
        own = unverified_job(
            steps=8,
            accumulate=4,
            monitor=("noise-scale",),
            clip_norm=0.5,
            optimizer=OptimizerSettings("sgd", options),
        )
        parts = components.build(own, torch.device("cpu"))
        loop = make_loop(PlainWorker(), own, parts, RunDir(tmp_path / f"alone-{trial}"))
        loop.train(resume=False)
        alone = {s.step: s for s in loop.run.trial.signals.newest()}
        for each in found:
            assert each.noise_scale == pytest.approx(alone[each.step].noise_scale, rel=1e-8)
            assert each.variance == pytest.approx(alone[each.step].variance, rel=1e-8)
