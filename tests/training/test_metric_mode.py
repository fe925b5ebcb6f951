"""Whether less or more of a metric is better decides what is kept, what stops a run and which trial wins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from plait.core.errors import InputError, JobError
from plait.launcher.run_dir import RunDir
from plait.schema.settings import (
    CheckpointSettings,
    DataSettings,
    EarlyStopSettings,
    EvaluateSettings,
    OptimizerSettings,
    TrainSettings,
)
from plait.sweeping.search.compared_by import choose_metric
from plait.training import checkpoint as checkpoints
from plait.training import components
from plait.training.trial import EarlyStopping
from plait.workloads.metrics import find_modes
from support.sweeping import sweep_here, sweep_of
from support.training import digits_job, train_here


def error_rate(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
    return (output.argmax(-1) != target).sum(), len(target)


def loss(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
    return error_rate(output, target)


OWN = "test_metric_mode:error_rate"


def job(mode: Any, **changes: Any) -> TrainSettings:
    evaluate = EvaluateSettings(every_steps=5, metric=OWN, mode=mode)
    return digits_job(steps=20, data=DataSettings("digits", 64), evaluate=evaluate, **changes)


def test_an_error_that_falls_is_kept_as_the_best_and_stops_no_run(tmp_path: Path):
    settings = job(
        "min",
        checkpoint=CheckpointSettings(every_steps=100, keep_best="error_rate"),
        early_stop=EarlyStopSettings(patience=2, metric="error_rate"),
    )
    result, _ = train_here(settings, tmp_path)
    assert (result.reason, result.step) == ("finished", 20)
    assert result.best is not None
    assert result.best["step"] == 20
    assert result.mode == {"loss": "min", "error_rate": "min"}
    kept = checkpoints.load(RunDir(tmp_path).checkpoints / "best")
    assert kept.progress["best"]["error_rate"] == result.test["error_rate"] < 0.5


def test_the_trial_with_the_smallest_error_wins_a_sweep(tmp_path: Path):
    sgd = OptimizerSettings("sgd", {"lr": 0.0})
    found = sweep_here(sweep_of("optimizer.lr=0,0.05", job=job("min", optimizer=sgd)), tmp_path)
    assert found["best"]["values"] == {"optimizer.lr": 0.05}
    assert (found["metric"], found["mode"]) == ("error_rate", "min")


WHERE = {
    "checkpoint.keep_best": {"checkpoint": CheckpointSettings(keep_best="error_rate")},
    "early_stop.metric": {"early_stop": EarlyStopSettings(patience=1, metric="error_rate")},
}


@pytest.mark.parametrize("key", WHERE)
def test_a_metric_of_ones_own_must_say_its_mode_where_it_matters(key: str):
    with pytest.raises(JobError, match=rf"^{key}: found 'error_rate'.*evaluate\.mode: min .*max"):
        components.check(job(None, **WHERE[key]))
    components.check(job("max", **WHERE[key]))
    components.check(job(None))
    components.check(job(None, checkpoint=CheckpointSettings(keep_best="loss")))


def test_a_sweep_that_compares_by_a_metric_of_ones_own_must_say_its_mode():
    settings = sweep_of("optimizer.lr=0,0.05", job=job(None))
    with pytest.raises(InputError, match=r"--metric: found 'error_rate'.*evaluate\.mode.*--metric loss"):
        choose_metric(settings)
    assert choose_metric(sweep_of("optimizer.lr=0,0.05", job=job(None), metric="loss")) == "loss"
    assert choose_metric(sweep_of("optimizer.lr=0,0.05", job=job("min"))) == "error_rate"


KNOWN = {
    "accuracy": "max",
    "perplexity": "min",
    "plait.workloads.translation.loss:token_accuracy": "max",
    "plait.workloads.bert:masked_accuracy": "max",
    "plait.workloads.bert:span_accuracy": "max",
}


@pytest.mark.parametrize("metric", KNOWN)
def test_metrics_that_come_with_plait_know_their_mode(metric: str):
    name, mode = metric.rpartition(":")[2], KNOWN[metric]
    assert find_modes(EvaluateSettings(metric=metric), "mse") == {"loss": "min", name: mode}
    other = "min" if mode == "max" else "max"
    with pytest.raises(JobError, match=rf"evaluate\.mode: found '{other}'.*'{mode}'; leave it out"):
        find_modes(EvaluateSettings(metric=metric, mode=other), "mse")


def test_a_mode_for_the_loss_alone_and_a_metric_called_loss_are_refused():
    with pytest.raises(JobError, match=r"evaluate\.mode: found 'max'.*of loss"):
        find_modes(EvaluateSettings(metric="none", mode="max"), "mse")
    assert find_modes(EvaluateSettings(metric="none", mode="min"), "mse") == {"loss": "min"}
    with pytest.raises(JobError, match=r"evaluate\.metric: found .*:loss'.*another name"):
        find_modes(EvaluateSettings(metric="test_metric_mode:loss"), "mse")


@pytest.mark.parametrize(("mode", "values", "stops"), [("min", [3, 2, 1], False), ("max", [3, 2, 1], True)])
def test_patience_counts_evaluations_that_brought_no_gain(mode: Any, values: list[float], stops: bool):
    rule = EarlyStopping(EarlyStopSettings(patience=2, metric="own"), {"own": mode})
    for value in values:
        rule.update({"own": value})
    assert rule.should_stop() is stops
