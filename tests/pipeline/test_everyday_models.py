"""Models as people write them, in two stages and as three fused trials: right, or refused in one sentence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import model_zoo as zoo
from plait.core.errors import InputError
from plait.fusion import FusedOptimizer, fuse
from plait.pipeline.verify.verify_stages import verify_stages

CASES = zoo.cases_by_name()


@pytest.fixture(autouse=True)
def _in_float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize("name", ["graph network", "Fourier layer", "numbers returned", "hook on itself"])
def test_in_two_stages_the_model_is_what_it_is_alone(name: str) -> None:
    assert zoo.stages_verdict(CASES[f"everyday {name}"]) == zoo.Verdict("right", "")


def test_a_copy_that_fails_by_itself_is_said_where_no_other_model_can_be_built() -> None:
    case = CASES["everyday hook on itself"]
    batches = [(zoo.as_double(batch), None) for batch in case.batches()]
    with pytest.raises(InputError, match="a copy of the model fails by itself .*KeyError.*hooks"):
        verify_stages(zoo.make_model(case, 0), batches, zoo.loss_of, ["b"])


def test_fused_a_model_that_its_own_hook_reads_is_what_it_is_alone() -> None:
    assert zoo.fused_verdict(CASES["everyday hook on itself"]).word == "right"


# What a verdict says of a model that stages, or fused trials, cannot train as it is trained alone.
REFUSED = {
    "stages": {
        "own class returned": "forward returns a Output, in which torch sees no tensors",
        "global variable": "forward of GoesByGlobal changes the global CALLS",
        "gradient inside": "the stages fail where the plain model does not",
        "hidden teacher": "that the model does not have: its module is not registered",
    },
    "fused": {
        "own class returned": "the model returns a Output, in which torch sees no tensors of numbers",
        "global variable": "a single model gives another result when it is run again",
    },
}


@pytest.mark.parametrize(("way", "name"), [(way, name) for way, cases in REFUSED.items() for name in cases])
def test_what_cannot_be_trained_in_stages_or_fused_is_refused_in_words(way: str, name: str) -> None:
    verdict = zoo.stages_verdict if way == "stages" else zoo.fused_verdict
    found = verdict(CASES[f"everyday {name}"])
    assert found.word == "refused"
    assert REFUSED[way][name] in found.sentence


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Fourier layer", ""),
        ("noisy weights", ""),
        ("history", "trial by trial: the whole model"),
        ("frozen norm", ""),
    ],
)
def test_as_fused_trials_the_model_is_what_it_is_alone(name: str, words: str) -> None:
    assert zoo.fused_verdict(CASES[f"everyday {name}"]) == zoo.Verdict("right", words)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("sgd", {"lr": 0.1, "momentum": 0.9}),
        ("adam", {"lr": 0.1}),
        ("rmsprop", {"lr": 0.1}),
        ("adagrad", {"lr": 0.1, "initial_accumulator_value": 0.1}),
    ],
)
def test_complex_weights_of_fused_trials_are_updated_as_torch_updates_them(
    kind: str, options: dict[str, Any]
) -> None:
    class Rotates(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.turn = nn.Parameter(torch.randn(3, dtype=torch.complex128))
            self.scale = nn.Parameter(torch.randn(3))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.turn).abs() * self.scale

    models = [Rotates() for _ in range(2)]
    x = torch.randn(4, 3)
    fused = fuse(models)
    together = FusedOptimizer(fused, kind, **options)
    classes = {"sgd": "SGD", "adam": "Adam", "rmsprop": "RMSprop", "adagrad": "Adagrad"}
    alone = [getattr(torch.optim, classes[kind])(model.parameters(), **options) for model in models]
    for _ in range(3):
        for optimizer, model in zip(alone, models):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        together.zero_grad()
        fused(torch.stack([x, x])).square().mean((1, 2)).sum().backward()
        together.step()
    for model, found in zip(models, fused.split()):
        torch.testing.assert_close(found.state_dict(), model.state_dict(), rtol=1e-12, atol=1e-12)
