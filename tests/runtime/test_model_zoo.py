"""A quick selection of the models in docs/models.md: right in stages, or refused in one sentence."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

PATH = Path(__file__).parents[2] / "benchmarks" / "model_zoo.py"
spec = importlib.util.spec_from_file_location("model_zoo", PATH)
assert spec is not None
assert spec.loader is not None
zoo = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = zoo
spec.loader.exec_module(zoo)
CASES = {f"{case.family} {case.name}": case for case in zoo.cases()}


@pytest.mark.parametrize("name", ["image googlenet", "image shufflenet", "hard auxiliary head"])
def test_a_model_in_two_stages_is_the_model_alone(name: str) -> None:
    assert zoo.pipeline_verdict(CASES[name]) == ("right", "")


def test_a_transformer_with_its_default_settings_in_two_stages_is_the_model_alone() -> None:
    pytest.importorskip("transformers", reason="the transformers library is not installed")
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        assert zoo.pipeline_verdict(CASES["transformers gpt2"]) == ("right", "")
    finally:
        torch.set_default_dtype(before)


def test_the_table_says_what_was_found_of_each_model() -> None:
    case = CASES["hard counter"]
    verdict = zoo.judge(case, zoo.pipeline_verdict, 60)
    assert verdict.word == "refused"
    text = zoo.table([(case, {"pipeline": verdict})])
    assert "| counter | refused | forward of CountsCalls changes self.calls" in text
