"""Signals of trials in a fused array: each trial's are those of the same trial alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.core import events
from plait.core.run_events import TrialSignals
from plait.launcher.run_dir import RunDir
from plait.planner.schedules.in_flight import Schedule
from plait.schema.settings import ModelSettings, OptimizerSettings, TrainSettings
from plait.sweeping.settings import SweepSettings
from plait.sweeping.trial_settings import with_values
from plait.training import components
from plait.training.choose_engine import make_loop
from support.plans import in_stages, straight_layout
from support.sweeping import sweep_here, sweep_of, sweep_rank
from support.training import PlainWorker, unverified_job
from support.world import run_ranks

MONITORED: dict[str, Any] = {"steps": 8, "monitor": ("noise-scale",), "clip_norm": 0.5, "log_every_steps": 4}


def check_signals(sweep: SweepSettings, folder: Path, alone: TrainSettings) -> None:
    """Check what a sweep in `folder` recorded against its trials alone, as `alone` with their values."""
    log = [r.event for r in events.read(RunDir(folder / "sweep").events())]
    (dimension,) = sweep.over
    for trial, value in enumerate(dimension.values):
        found = [e for e in log if isinstance(e, TrialSignals) and e.trial == trial]
        assert [each.step for each in found] == [4, 8]
        own = with_values(alone, {dimension.key: value})
        parts = components.build(own, torch.device("cpu"))
        loop = make_loop(PlainWorker(), own, parts, RunDir(folder / f"alone-{trial}"))
        loop.train(resume=False)
        signals = {s.step: s for s in loop.run.trial.signals.newest()}
        for each in found:
            assert each.noise_scale == pytest.approx(signals[each.step].noise_scale, rel=1e-8)
            assert each.variance == pytest.approx(signals[each.step].variance, rel=1e-8)


def test_each_fused_trial_has_the_signals_that_it_has_alone(tmp_path: Path):
    """Three trials in an array of two, so that the third takes the place of one that has ended."""
    job = unverified_job(accumulate=4, **MONITORED)
    sweep = sweep_of("optimizer.lr=0.01,0.1,0.001", width=2, job=job)
    sweep_here(sweep, tmp_path / "sweep")
    check_signals(sweep, tmp_path, job)


def test_so_has_one_in_stages_each_of_which_sees_a_part_of_its_gradient(tmp_path: Path):
    """Of unlike batches, so that the first microbatch is another share of each."""
    whole = unverified_job(
        **MONITORED, model=ModelSettings("support.sweeping:Halves"), optimizer=OptimizerSettings("adamw", {})
    )
    job = in_stages(whole, straight_layout((1, 1)), Schedule.FLUSH, microbatches=4)
    sweep = sweep_of("data.batch_size=30,64,50", width=2, job=job)
    run_ranks(2, sweep_rank, sweep, tmp_path / "sweep")
    check_signals(sweep, tmp_path, replace(whole, accumulate=4))
