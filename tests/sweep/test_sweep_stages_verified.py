"""Before its first step an array in stages is compared with its trials alone, whatever its code does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd.function import _SingleLevelFunction as Function

from plait.core import events as core_events
from plait.core import run_events
from plait.core.errors import InputError
from plait.fusion.dispatch import torch_patches
from plait.fusion.verify import FusionReport, verifier
from plait.pipeline.layout import arrange
from plait.planner.schedules.in_flight import Schedule
from plait.schema.settings import ModelSettings, OptimizerSettings
from plait.sweeping.datasets import DataSets
from plait.sweeping.engines.verified_stages import prepare_trials, verify_stages
from plait.sweeping.search.space import combinations
from plait.sweeping.settings import SweepSettings
from plait.sweeping.trial_settings import with_values
from plait.sweeping.trials.assigned_trials import make_entry
from plait.verification.verify import Mismatch
from support.plans import planned
from support.sweeping import same_table, sweep_here, sweep_of, sweep_rank
from support.world import run_ranks

MICROBATCHES = 2
SGD = OptimizerSettings("sgd", {"lr": 0.1})


def in_stages(
    *over: str, model: str = "support.odd_models:Blocks", replicas: tuple[int, ...] = (1, 1), **args: Any
) -> SweepSettings:
    own = ModelSettings(model, args)
    job = planned(replicas, Schedule.FLUSH, MICROBATCHES, steps=4, model=own, optimizer=SGD)
    return sweep_of(*over, job=job, width=3)


def on_one(settings: SweepSettings) -> SweepSettings:
    return replace(settings, train=replace(settings.train, pipeline=None, accumulate=MICROBATCHES))


def verdict_of(settings: SweepSettings) -> FusionReport:
    """What verification says of an array of all trials, in this process."""
    assert settings.train.pipeline is not None
    trials = [with_values(settings.train, values) for values in combinations(settings.over)]
    entries = [make_entry(one, None, torch.device("cpu"), DataSets()) for one in trials]
    arrangement = arrange(settings.train.pipeline.plan)
    return verify_stages(entries, prepare_trials(entries, arrangement, verify=True))


def revert_functions() -> None:
    """Apply functions of autograd to fused tensors as they are."""
    torch_patches.apply_function = lambda cls, *a, **k: super(Function, cls).apply(*a, **k)


def wrong_sweep_rank(rank: int, settings: SweepSettings, folder: Path) -> dict[str, Any]:
    """As `sweep_rank`, where functions of autograd see all trials at once."""
    revert_functions()
    return sweep_rank(rank, settings, folder)


def verified(folder: Path) -> list[run_events.ArrayVerified]:
    found = core_events.read(folder / "events" / "rank0.jsonl")
    return [one.event for one in found if isinstance(one.event, run_events.ArrayVerified)]


@pytest.mark.parametrize("over", ["model_args.dropout=0.1,0.2,0.3", "data.batch_size=4,8,16", "seed=0,1,2"])
def test_right_stages_stay_fused(over: str):
    verdict = verdict_of(in_stages(over))
    assert verdict.refused is None
    assert verdict.unfused == {}


def test_wrong_stages_run_trial_by_trial_though_a_mend_is_reverted(monkeypatch):
    monkeypatch.setattr(
        torch_patches, "apply_function", lambda cls, *a, **k: super(Function, cls).apply(*a, **k)
    )
    verdict = verdict_of(in_stages("seed=0,1,2"))
    assert verdict.refused is None
    assert list(verdict.unfused) == [""]


@pytest.mark.parametrize("replicas", [pytest.param((1, 1), marks=pytest.mark.extended), (2, 1)])
def test_a_sweep_in_stages_is_right_though_a_mend_is_reverted(replicas: tuple[int, ...], tmp_path: Path):
    settings = in_stages("seed=0,1,2", replicas=replicas, dropout=0.0)
    found = run_ranks(sum(replicas), wrong_sweep_rank, settings, tmp_path / "all")[0]
    one = sweep_here(on_one(settings), tmp_path / "one")
    if max(replicas) > 1:  # evaluation uses running statistics, of which each replica has its own
        for row in (*one["trials"], *found["trials"]):
            row["metrics"] = {}
        found["trials"].sort(key=lambda row: row["trial"])
        one["trials"].sort(key=lambda row: row["trial"])
    assert same_table(one, found, tolerance=1e-9)
    (event,) = verified(tmp_path / "all")
    assert list(event.unfused) == [""]


def test_trials_that_cannot_share_stages_train_one_by_one_in_them(tmp_path: Path):
    settings = in_stages("model_args.scale=0.5,2.0", model="support.sweeping:Halves")
    found = run_ranks(2, sweep_rank, settings, tmp_path / "two")[0]
    assert same_table(sweep_here(on_one(settings), tmp_path / "one"), found, tolerance=1e-9)


def refused_rank(rank: int, settings: SweepSettings, folder: Path) -> str:
    """What a sweep says that is refused."""
    try:
        sweep_rank(rank, settings, folder)
    except InputError as failure:
        return str(failure)
    except RuntimeError:  # the leader is gone
        return ""
    return "not refused"


def never(find: Any, mend: Any, attempts: int) -> Mismatch:
    return Mismatch("trial 0 differs from its plain model")


def never_fused_rank(rank: int, settings: SweepSettings, folder: Path) -> dict[str, Any]:
    """As `sweep_rank`, where verification finds no way to fuse trials."""
    verifier.verify = never
    return sweep_rank(rank, settings, folder)


# That wrong stages run trial by trial, and that trials pass through stages one by one, is above.
@pytest.mark.extended
def test_trials_that_no_way_makes_right_pass_through_the_stages_one_by_one(tmp_path: Path):
    settings = in_stages("seed=0,1,2", dropout=0.0)
    found = run_ranks(2, never_fused_rank, settings, tmp_path / "two")[0]
    assert same_table(sweep_here(on_one(settings), tmp_path / "one"), found, tolerance=1e-9)
    assert [array["why"] for array in found["arrays"]] == ["trial 0 differs from its plain model"] * 3


def test_sizes_for_which_the_code_between_modules_does_something_else_are_refused(tmp_path: Path):
    settings = in_stages("data.batch_size=6,16", model="support.odd_models:MindsSize")
    words = run_ranks(2, refused_rank, settings, tmp_path, may_die=(1,))[0]
    assert "with these sizes the model would take another branch than in the trace" in words
