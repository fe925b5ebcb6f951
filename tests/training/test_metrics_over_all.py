"""Metrics of any kind: over all samples, of torchmetrics, several at once; each with its mode."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import plait
from plait.core.errors import InputError, JobError
from plait.schema.settings import (
    CheckpointSettings,
    EarlyStopSettings,
    EvaluateSettings,
    MetricSettings,
    TrainSettings,
)
from plait.sweeping.search.compared_by import choose_metric
from plait.training import checkpoint, components
from plait.training.evaluate import joined
from plait.workloads.metrics import accuracy
from support.sweeping import sweep_of
from support.training import digits_job, train_here, train_rank, unverified_job
from support.world import run_ranks

HERE = "test_metrics_over_all"
X = torch.randn(90, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = (X.sum(1) > 0).long()


def right(output: Tensor, target: Tensor) -> Tensor:
    """One number: the share of right answers, of which there must be both classes."""
    if len(set(target.tolist())) < 2:
        raise ValueError("only one class")
    return (output.argmax(-1) == target).double().mean()


def worst(output: Tensor, target: Tensor) -> float:
    return float(output.abs().max())


def two_numbers(output: Tensor, target: Tensor) -> Tensor:
    return output.mean(0)[:2]


class Output(dict[str, Tensor]):
    """As transformers has it: values by name, and as attributes."""

    __getattr__ = dict.__getitem__


def test_what_a_model_with_its_own_loss_returns_is_joined_as_it_is_and_its_classes_are_counted():
    parts = [Output(logits=X[:2]), Output(logits=X[2:5])]
    whole = joined(parts)
    assert type(whole) is Output
    assert torch.equal(whole.logits, X[:5])
    assert accuracy(whole, X[:5].argmax(1)) == accuracy(X[:5], X[:5].argmax(1)) == (5, 5)
    for output in ((X, X), Output(logits=X[None])):  # of tokens, which may be the next ones
        with pytest.raises(JobError, match="with loss: model use metric: none, or a function of yours"):
            accuracy(output, Y)


class Falling:
    """As torchmetrics has it; less from evaluation to evaluation."""

    def __init__(self) -> None:
        self.count = 0

    def reset(self) -> None:
        self.count = 0

    def update(self, output: Tensor, target: Tensor) -> None:
        self.count += len(target)

    def compute(self) -> Tensor:
        return torch.tensor(-float(self.count))


class Several(Falling):
    def compute(self) -> Any:
        return {"a": 1.0}


def job(*metrics: MetricSettings, **changes: Any) -> Any:
    return unverified_job(evaluate=EvaluateSettings(every_steps=1, metrics=metrics), **changes)


def test_a_function_of_one_number_is_given_all_samples_at_once(tmp_path: Path) -> None:
    # Batches of one class fail, and the mean over batches would be another number.
    order = Y.argsort()
    result = plait.train(
        model=lambda: torch.nn.Linear(4, 2),
        data=((X, Y), (X[order], Y[order])),
        metrics=["accuracy", right, {"call": worst, "mode": "min", "name": "largest"}],
        evaluate={"batch_size": 7},
        steps=2,
        batch_size=32,
        precision="float64",
        checkpoint={"keep_best": "largest"},
        run_dir=str(tmp_path),
        verify="off",
    )
    assert set(result.test) == {"loss", "accuracy", "right", "largest"}
    assert result.test["right"] == pytest.approx(result.test["accuracy"], abs=1e-12)
    assert result.mode["largest"] == "min"
    run = plait.open_run(result.run)
    with torch.no_grad():
        assert result.test["largest"] == pytest.approx(float(run.model()(X).abs().max()), abs=1e-12)
    others = run.evaluate((X[:30], Y[:30]), metrics=[right, Falling(), {"call": worst, "name": "w"}])
    assert (set(others), others["Falling"]) == ({"loss", "right", "Falling", "w"}, -30.0)


def test_decisions_follow_the_mode_of_each_metric(tmp_path: Path) -> None:
    rule = {"early_stop": EarlyStopSettings(patience=2, metric="Falling"), "steps": 9}
    worse = MetricSettings(f"{HERE}:Falling", mode="max")
    result, _ = train_here(job(worse, **rule), tmp_path / "max")
    assert (result.reason, result.step) == ("early-stop", 3)
    kept = CheckpointSettings(keep_best="twice")
    named = (MetricSettings("accuracy"), replace(worse, mode="min", name="twice"))
    result, _ = train_here(job(*named, steps=2, checkpoint=kept), tmp_path / "min")
    assert result.best is not None
    assert result.best["step"] == 1
    assert choose_metric(sweep_of("optimizer.lr=0.1,0.2", job=job(*named))) == "accuracy"
    assert choose_metric(sweep_of("optimizer.lr=0.1,0.2", job=job(*named[::-1]))) == "twice"


def checked_and_trained(settings: TrainSettings, folder: Path) -> None:
    components.check(settings)
    train_here(settings, folder)


@pytest.mark.parametrize(
    ("metrics", "changes", "words"),
    [
        ([MetricSettings(f"{HERE}:two_numbers")], {}, r"two_numbers returned .*expected \(sum, count\)"),
        ([MetricSettings(f"{HERE}:Several")], {}, "Several is {'a': 1.0} over all samples, expected one"),
        ([MetricSettings(f"{HERE}:X")], {}, "X is tensor.*expected a function of .output, target."),
        ([MetricSettings("acuracy")], {}, "evaluate.metrics: found 'acuracy'.*did you mean 'accuracy'?"),
        ([MetricSettings("accuracy", mode="min")], {}, "found 'min', but of accuracy it is 'max'"),
        ([MetricSettings("accuracy")] * 2, {}, "found two metrics called 'accuracy'"),
        ([MetricSettings(f"{HERE}:worst", {"top": 2})], {}, "worst takes no 'top'"),
        (
            [MetricSettings(f"{HERE}:worst")],
            {"checkpoint": CheckpointSettings(keep_best="worst")},
            "checkpoint.keep_best: found 'worst', .* mode: to the metric",
        ),
    ],
)
def test_what_is_no_metric_is_refused_before_the_first_step(
    metrics: list[MetricSettings], changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    settings = digits_job(steps=1, evaluate=EvaluateSettings(metrics=tuple(metrics)), **changes)
    with pytest.raises(JobError, match=words):
        checked_and_trained(settings, tmp_path)


def test_a_mode_that_there_is_not_and_two_ways_to_say_it_are_refused() -> None:
    content = {"name": "t", "model": "m:n", "data": {"kind": "digits", "batch_size": 4}, "steps": 1}
    with pytest.raises(JobError, match="evaluate.metrics.0.mode: found 'maximum', expected min or max"):
        plait.make_job({**content, "evaluate": {"metrics": [{"call": "accuracy", "mode": "maximum"}]}})
    both = EvaluateSettings(metric="accuracy", metrics=(MetricSettings("perplexity"),))
    with pytest.raises(JobError, match="evaluate.metric: found 'accuracy' and evaluate.metrics"):
        choose_metric(sweep_of("optimizer.lr=0.1,0.2", job=digits_job(steps=1, evaluate=both)))
    job = plait.make_job({**content, "evaluate": {"metrics": ["accuracy", "perplexity"]}})
    assert [each.call for each in job.evaluate.metrics] == ["accuracy", "perplexity"]


@pytest.mark.extended  # importing it takes seconds
def test_torchmetrics_count_all_samples_and_know_their_mode(tmp_path: Path) -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    options = {"task": "multiclass", "num_classes": 10}
    metrics = (
        MetricSettings("accuracy"),
        MetricSettings("torchmetrics:Accuracy", {**options, "average": "micro"}, name="same"),
        MetricSettings("torchmetrics:AUROC", options),
    )
    result, _ = train_here(job(*metrics, steps=1), tmp_path)
    assert result.test["same"] == pytest.approx(result.test["accuracy"], abs=1e-6)
    assert 0.0 < result.test["AUROC"] < 1.0
    assert (result.mode["same"], result.mode["AUROC"]) == ("max", "max")
    assert torchmetrics.Accuracy(**options).higher_is_better
    (together, _), _ = run_ranks(2, train_rank, job(*metrics, steps=1), tmp_path / "two")
    assert together.test == pytest.approx(result.test, abs=1e-6)


def test_the_average_of_weights_is_evaluated_or_kept_and_changes_nothing_else(tmp_path: Path) -> None:
    common: dict[str, Any] = {"steps": 4, "precision": "float64", "run_dir": str(tmp_path), "verify": "off"}
    every = {"checkpoint": {"every_steps": 1, "keep_last": 9}}

    def train(**ema: Any) -> plait.OpenedRun:
        optimizer = {"kind": "adamw", "lr": 0.1, **ema}
        data = ((X, Y), (X, Y))
        net = torch.nn.Linear(4, 2, dtype=torch.float64)
        torch.nn.init.ones_(net.weight)
        torch.nn.init.zeros_(net.bias)
        return plait.open_run(plait.train(model=net, data=data, optimizer=optimizer, **common, **every).run)

    plain, shown, kept = (
        train(),
        train(ema={"decay": 0.8}),
        train(ema={"decay": 0.8, "evaluate": False}),
    )
    average = torch.ones(2, 4, dtype=torch.float64)
    for step in range(1, 5):
        state = checkpoint.load(shown.folder / "checkpoints" / f"step-{step:09d}")
        average = 0.8 * average + 0.2 * state.model["weight"]
        assert torch.allclose(state.optimizer["weight/ema"], average, rtol=0, atol=1e-14)
    weight = plain.model().state_dict()["weight"]
    for run, ema in ((shown, None), (shown, True), (kept, True)):
        assert torch.allclose(run.model(ema=ema).state_dict()["weight"], average, rtol=0, atol=1e-14)
    for run, ema in ((shown, False), (kept, None), (plain, False)):
        assert torch.equal(run.model(ema=ema).state_dict()["weight"], weight)
    assert shown.evaluate() == pytest.approx(shown.result.test)
    assert kept.result.test == plain.result.test != shown.result.test
    with pytest.raises(InputError, match="ema: .* has none; set optimizer.ema in the job"):
        plain.model(ema=True)
