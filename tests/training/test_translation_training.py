"""Translation end to end: on several workers and resumed as in one process; its BLEU."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from plait.cli import app
from plait.core.codec import encode
from plait.core.errors import DataError, InputError, JobError
from plait.data.requirements import check_same_data
from plait.jobs.evaluate import measure_kept, measure_run
from plait.launcher.run_dir import RunDir
from plait.schema.settings import (
    UNVERIFIED,
    CheckpointSettings,
    DataSettings,
    EvaluateSettings,
    ModelSettings,
    OptimizerSettings,
    TrainSettings,
)
from plait.training import components
from support.training import digits_job, largest_difference, saved_weights, train_each, train_here
from support.world import run_ranks
from translation.bleu import score

LOSS = "plait.workloads.translation.loss"
GREEDY = {"beam": 1}


def translation_job(batch_size: int = 8, steps: int = 3, **options: Any) -> TrainSettings:
    """Sentences whose lengths change from batch to batch."""
    data = {"samples": 48, "test_samples": 10, "merges": 60, **options}
    return digits_job(
        model=ModelSettings("plait.workloads.translation.gnmt:gnmt_tiny", {"vocabulary": 100, "width": 8}),
        data=DataSettings("translation.number_words:number_words", batch_size, data),
        loss=f"{LOSS}:label_smoothing",
        # A large epsilon keeps the rounding of gradients that are truly zero from being blown up.
        optimizer=OptimizerSettings("adam", {"lr": 0.01, "eps": 1e-3}),
        evaluate=EvaluateSettings(metric=f"{LOSS}:token_accuracy", batch_size=3),
        steps=steps,
        verify=UNVERIFIED,
    )


def write_settings(folder: Path, settings: TrainSettings) -> RunDir:
    """What a launcher leaves in a run's folder beside its checkpoints."""
    found = RunDir(folder)
    folder.mkdir(parents=True, exist_ok=True)
    found.settings.write_text(json.dumps(encode(settings)))
    return found


def test_data_parallel_workers_equal_one_process_and_their_checkpoints_score_alike(tmp_path: Path) -> None:
    """Stages are in test_examples."""
    job = translation_job()
    plain, weights = train_here(job, tmp_path / "plain")
    result = run_ranks(2, train_each, {"workers": job}, tmp_path)[0]["workers"]
    assert largest_difference(saved_weights(tmp_path / "workers"), weights) < 1e-10
    assert result.test["token_accuracy"] == plain.test["token_accuracy"]
    assert result.test["loss"] == pytest.approx(plain.test["loss"], abs=1e-10)
    folders = [write_settings(tmp_path / name, job) for name in ("workers", "plain")]
    scores = [measure_run(folder, options=GREEDY)["metrics"] for folder in folders]
    assert scores[0]["bleu"] == scores[1]["bleu"]


@pytest.mark.parametrize("options", [{}, {"sentences": 3}])
def test_a_resumed_run_ends_with_the_weights_of_one_that_was_never_cut(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    job = translation_job(batch_size=3, **options)
    _, weights = train_here(job, tmp_path / "whole")
    train_here(replace(job, steps=2), tmp_path / "cut")
    _, resumed = train_here(job, tmp_path / "cut", resume=True)
    assert largest_difference(resumed, weights) == 0.0


def test_a_checkpoint_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    train_here(translation_job(steps=1), tmp_path)
    other = translation_job(steps=2, merges=40)
    message = "the data of translation.number_words:number_words is not what the checkpoint was trained with"
    with pytest.raises(DataError, match=message):
        train_here(other, tmp_path, resume=True)
    for measure in (measure_run, measure_kept):
        with pytest.raises(DataError, match=message):
            measure(write_settings(tmp_path, other))


def test_a_fingerprint_is_compared_with_that_of_older_checkpoints_and_is_text() -> None:
    class Data:
        def __init__(self, found: Any) -> None:
            self.fingerprint = lambda: found

    for progress in ({"vocabulary": "0a"}, {"fingerprint": "0a"}, {"fingerprint": None}, {}):
        check_same_data(progress, Data("0a"), DataSettings("own", 1))
        check_same_data(progress, Data(None), DataSettings("own", 1))
        check_same_data(progress, object(), DataSettings("own", 1))
    for progress in ({"vocabulary": "0a"}, {"fingerprint": "0a"}):
        with pytest.raises(DataError, match=r"the data of own is not .* fingerprint is 0b, expected 0a"):
            check_same_data(progress, Data("0b"), DataSettings("own", 1))
    with pytest.raises(DataError, match=r"fingerprint\(\) returned 7, expected text"):
        check_same_data({}, Data(7), DataSettings("own", 1))


def test_a_model_with_fewer_tokens_than_the_data_is_refused() -> None:
    job = translation_job()
    small = replace(job, model=replace(job.model, args={**job.model.args, "vocabulary": 30}))
    with pytest.raises(JobError, match=r"model_args\.vocabulary: found 30, but the data of translation\."):
        components.build(small, torch.device("cpu"))


def test_bleu_is_measured_of_every_kept_checkpoint(tmp_path: Path) -> None:
    job = replace(translation_job(), checkpoint=CheckpointSettings(every_steps=1, keep_last=2))
    train_here(job, tmp_path / "run")
    found = measure_kept(write_settings(tmp_path / "run", job), {"beam": 2})
    assert [row["step"] for row in found] == [2, 3]
    assert {"loss", "token_accuracy", "bleu", "length_ratio"} == found[0]["metrics"].keys()
    words = ["evaluate", str(tmp_path / "run"), "--all", "--score", "beam=2"]
    shown = CliRunner().invoke(app, words, catch_exceptions=False).stdout
    assert re.fullmatch(r"(.* at step \d: loss .*, bleu [\d.e-]+, length_ratio [\d.]+\n){2}", shown)
    answer = json.loads(CliRunner().invoke(app, [*words, "--json"], catch_exceptions=False).stdout)
    assert answer == {"run": str(tmp_path / "run"), "checkpoints": found}


def test_options_that_the_scores_do_not_take_are_refused(tmp_path: Path) -> None:
    train_here(translation_job(steps=1), tmp_path / "run")
    folder = write_settings(tmp_path / "run", translation_job(steps=1))
    with pytest.raises(InputError, match=r"--score\.bean: scores takes no 'bean'; did you mean 'beam'"):
        measure_run(folder, options={"bean": 2})
    for options, message in (
        ({"beam": 0}, "beam: found 0, expected 1 to"),
        ({"length_penalty": -1}, "length_penalty: found -1"),
        ({"coverage_penalty": float("nan")}, "coverage_penalty: found nan"),
    ):
        with pytest.raises(InputError, match=message):
            measure_run(folder, options=options)
    other = digits_job(steps=1, data=DataSettings("digits", 64))
    train_here(other, tmp_path / "digits")
    with pytest.raises(InputError, match="--score: this run has data.kind digits, which has no scores"):
        measure_run(write_settings(tmp_path / "digits", other), options=GREEDY)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--best", "--all"], "--best and --all: found both"),
        (["--score", "beam"], "--score: found 'beam', expected name=value"),
    ],
)
def test_wrong_flags_of_an_evaluation_are_refused(tmp_path: Path, flags: list[str], message: str) -> None:
    folder = write_settings(tmp_path, translation_job())
    done = CliRunner().invoke(app, ["evaluate", str(folder.path), *flags])
    assert isinstance(done.exception, InputError)
    assert message in str(done.exception)


def test_right_translations_score_a_hundred() -> None:
    texts = ["eins plus eins ist zwei", "zwölf mal zwei"]
    assert score(texts, texts)["bleu"] == pytest.approx(100.0)
    assert score(["drei mal drei ist neun", "zwölf"], texts)["bleu"] < 50
