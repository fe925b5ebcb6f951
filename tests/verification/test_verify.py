"""What every verification is made of: a reference run again, its noise, where a candidate differs, mends."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plait.verification import Observation, observe_step, same_random_numbers
from plait.verification.module_trace import IN_NONE, ModuleTrace, failed_in, path_of
from plait.verification.python_state import unchanged_state
from plait.verification.verify import (
    Mismatch,
    NotRepeatableError,
    Phase,
    Reference,
    first_differences,
    locate,
    verify,
)

PHASES = (Phase(True, 0), Phase(True, 1), Phase(False, 0))
BATCHES = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)
        self.calls: list[int] = []
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(len(self.calls))
        return self.last(self.factor * self.norm(self.first(x))) * (1 + len(self.calls))


class Plain(Reference):
    def forward(self, phase: Phase) -> tuple[Any, Tensor]:
        self.model.train(phase.training)
        output = self.model(BATCHES[phase.batch])
        return output, output.square().mean()


def make() -> Net:
    torch.manual_seed(0)
    return Net()


def run(model: nn.Module) -> list[Observation]:
    """A candidate, which is a copy of the model."""
    candidate, found = Plain(copy.deepcopy(model), PHASES), []
    for number, phase in enumerate(PHASES):
        with same_random_numbers(number):
            found.append(
                observe_step(candidate.model, lambda phase=phase: candidate.forward(phase), phase.training)
            )
    return found


def test_a_reference_does_the_same_from_its_first_state_and_is_left_as_it_was():
    model = make()
    before = copy.deepcopy(model.state_dict())
    reference = Plain(model, PHASES)
    first, second = list(reference.run()), list(reference.run())
    for one, other in zip(first, second, strict=True):
        assert all(torch.equal(value, other[name]) for name, value in one.items() if value is not None)
    assert model.calls == []
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not torch.equal(reference.observe(0, seed=0)["the loss"], first[0]["the loss"])


def test_an_equal_candidate_is_right_and_a_wrong_one_is_found_in_its_first_wrong_phase():
    model = make()
    reference = Plain(model, PHASES)
    expected = list(reference.run())
    assert first_differences(reference, expected, run(model)) is None
    found = [dict(step) for step in run(model)]
    found[1]["the loss"] = found[1]["the loss"] + 1
    apart = first_differences(reference, expected, found)
    assert apart is not None
    phase, (difference,) = apart
    assert (phase, difference.name) == (1, "the loss")


def test_a_reference_that_goes_by_what_is_outside_of_it_cannot_be_compared():
    class GoesByTime(Plain):
        time = 0

        def forward(self, phase: Phase) -> tuple[Any, Tensor]:
            GoesByTime.time += 1
            output, loss = super().forward(phase)
            return output * GoesByTime.time, loss

    model = make()
    reference = GoesByTime(model, PHASES)
    with pytest.raises(NotRepeatableError):
        first_differences(reference, list(reference.run()), run(model))


def test_the_first_module_that_differs_is_located_by_what_it_gets_or_returns():
    reference, other = Plain(make(), PHASES), make()
    other.factor = 2.0
    trace = ModuleTrace([other])
    with trace:
        Plain(other, PHASES).forward(PHASES[0])
    located = locate(reference, 0, trace)
    assert located is not None
    assert located[1][0] == "last\x000\x00input 0"
    assert path_of(located[1][0]) == "last"


def test_the_module_in_which_a_call_failed_is_the_innermost():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Linear(3, 2)))
    with pytest.raises(RuntimeError) as failure:
        model(torch.ones(1, 2))
    assert failed_in(failure.value, [model]) == "1.1"
    with pytest.raises(ValueError, match="not here") as other:
        raise ValueError("not here")
    assert failed_in(other.value, [model]) == IN_NONE


@pytest.mark.parametrize(("wrong", "left"), [(2, None), (5, "3 wrong"), (9, "6 wrong")])
def test_a_candidate_is_mended_until_it_is_right_or_nothing_helps(wrong: int, left: str | None):
    state = {"wrong": wrong}

    def find() -> Mismatch | None:
        return Mismatch(f"{state['wrong']} wrong") if state["wrong"] else None

    def mend(mismatch: Mismatch) -> bool:
        if mismatch.why == "3 wrong":
            return False
        state["wrong"] -= 1
        return True

    found = verify(find, mend, attempts=4)
    assert (None if found is None else str(found)) == left


def test_an_unchanged_state_has_its_buffers_too():
    model = make()
    before = model.norm.running_mean
    with unchanged_state({"model": model}):
        model(BATCHES[0])
        model.norm.running_mean = torch.ones(6)
        model.register_buffer("another", torch.ones(1))
    assert model.norm.running_mean is before
    assert not before.any()
    assert model.norm.num_batches_tracked == 0
    assert [name for name, _ in model.named_buffers() if "norm" not in name] == []
    assert model.calls == []
