"""A quick selection of the models in docs/models.md, and the table of their results."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import model_zoo as zoo
from support import zoo_runs
from support.further import but_further

CASES = zoo.cases_by_name()


@pytest.mark.parametrize(
    "name",
    but_further(
        ("image googlenet", "image shufflenet", "hard auxiliary head"), "image googlenet", "image shufflenet"
    ),
)
def test_a_model_in_two_stages_is_the_model_alone(name: str) -> None:
    assert zoo.stages_verdict(CASES[name]) == zoo.Verdict("right", "")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        pytest.param("image googlenet", "", marks=pytest.mark.extended),
        ("image convnext", ""),
        ("hard counter", ""),
        ("hard frozen part", ""),
    ],
)
def test_three_fused_trials_are_the_trials_alone(name: str, words: str) -> None:
    assert zoo.fused_verdict(CASES[name]) == zoo.Verdict("right", words)


# In stages, one is trained in profiler/test_trace_transformers.py.
@pytest.mark.parametrize(
    "verdict", [pytest.param(zoo.stages_verdict, marks=pytest.mark.extended), zoo.fused_verdict]
)
def test_a_transformer_with_its_default_settings_is_the_model_alone(verdict) -> None:  # type: ignore[no-untyped-def]
    pytest.importorskip("transformers", reason="the transformers library is not installed")
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        assert verdict(CASES["transformers gpt2"]) == zoo.Verdict("right", "")
    finally:
        torch.set_default_dtype(before)


@pytest.mark.skipif(torch.cuda.is_available(), reason="forks, which autograd refuses once it used a GPU")
def test_the_table_says_what_was_found_of_each_model() -> None:
    case = CASES["hard counter"]
    verdicts = {name: zoo.judge(case, verdict, 60) for name, verdict in zoo.VERDICTS.items()}
    rows = [zoo.row_of(case, verdicts)]
    text = zoo.table(rows)
    assert "| counter | refused | right | 2 stages: forward of CountsCalls changes self.calls" in text
    assert zoo.read_table(text) == rows


def test_a_table_keeps_what_was_found_of_models_that_are_not_asked_for_again() -> None:
    before = [
        zoo.Row("hard", "counter", ("WRONG", "right"), "a"),
        zoo.Row("hard", "state", ("right",) * 2, "b"),
    ]
    now = [zoo.Row("hard", "counter", ("refused", "right"), "c")]
    assert zoo.merge(before, now) == [before[1], now[0]]
    assert "written to be trained wrong, 2 stages: 1 right, 1 refused, of 2" in zoo.summary(
        zoo.merge(before, now)
    )


def test_a_process_that_dies_and_one_that_does_not_end_are_crashes_in_the_table() -> None:
    case = CASES["hard counter"]
    died = zoo.judge(case, lambda case: os._exit(3), 60)
    assert (died.word, died.sentence) == ("crash", "the process ended with status 3")
    hung = zoo.judge(case, lambda case: os.read(os.pipe()[0], 1), 0.2)
    assert (hung.word, hung.sentence) == ("crash", "not done after 0.2 s")


def test_a_model_with_state_in_one_block_trains_on_two_workers_as_in_one_process(tmp_path: Path) -> None:
    assert zoo_runs.run_in_stages("divided block", tmp_path) < 1e-9


@pytest.mark.parametrize("name", but_further(("divided block", "counter"), "counter"))
def test_a_sweep_of_three_trials_comes_to_what_each_comes_to_alone(name: str, tmp_path: Path) -> None:
    assert zoo_runs.sweep_apart(name, tmp_path) < 1e-9
