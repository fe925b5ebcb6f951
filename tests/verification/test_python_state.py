"""State in Python is found in depth, told apart and put back."""

from __future__ import annotations

import collections
import random
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plait.verification.python_state import changed, state_of, tensor_slots, unchanged_state

COUNTS = {"calls": 0}


class Settings:
    """Somebody's own class, with slots."""

    __slots__ = ("inner", "value")

    def __init__(self) -> None:
        self.value, self.inner = 1, [1, {"deep": (2, 3)}]


class Keeps(nn.Module):
    shared: list[int] = []  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.numbers, self.queue = [1, 2], collections.deque([1, 2, 3], maxlen=3)
        self.settings, self.space = Settings(), types.SimpleNamespace(a=1)
        self.random, self.torch = random.Random(0), torch.Generator().manual_seed(0)
        self.table: dict[str, Any] = {"a": {1, 2}}
        self.table["itself"] = self.table
        self.listed = [torch.zeros(2)]
        count = 0

        def counted() -> int:
            nonlocal count
            count += 1
            return count

        self.register_forward_hook(lambda *_: counted() and None)

    def forward(self, x: Tensor) -> Tensor:
        COUNTS["calls"] += 1
        return x


CHANGES = {
    "list": lambda m: m.numbers.append(3),
    "element": lambda m: m.numbers.__setitem__(0, 7),
    "deque": lambda m: m.queue.append(4),
    "object": lambda m: setattr(m.settings, "value", 2),
    "deep object": lambda m: m.settings.inner[1].update(deep=(2, 4)),
    "namespace": lambda m: setattr(m.space, "b", 1),
    "generator": lambda m: m.random.random(),
    "torch's generator": lambda m: torch.randn(1, generator=m.torch),
    "set": lambda m: m.table["a"].add(3),
    "new attribute": lambda m: setattr(m, "more", 1),
    "class": lambda m: m.shared.append(1),
    "global": lambda m: COUNTS.update(calls=COUNTS["calls"] + 1),
    "closure of a hook": lambda m: m(torch.zeros(1)),
    "number of tensors": lambda m: m.listed.append(torch.zeros(2)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen_in_depth_and_put_back(name: str) -> None:
    model = Keeps()
    state = state_of(model)
    before = state.tokens()
    assert changed(before, state.tokens()) == []
    CHANGES[name](model)
    assert changed(before, state.tokens()) != []
    state.restore()
    assert changed(before, state.tokens()) == []


def test_a_tensor_in_the_place_of_one_like_it_is_a_change_only_where_that_is_asked_for() -> None:
    model = Keeps()
    state = state_of(model)
    alike, same = state.tokens(), state.tokens(same_tensors=True)
    model.listed[0] = torch.ones(2)
    assert changed(alike, state.tokens()) == []
    assert [shown for _, shown in changed(same, state.tokens(same_tensors=True))] == ["self.listed"]


def test_what_happens_within_changes_nothing_of_functions_either() -> None:
    def count() -> None:
        COUNTS["calls"] += 1

    before = dict(COUNTS)
    with unchanged_state({"function": count, "model": Keeps()}):
        count()
    assert before == COUNTS


def test_tensors_are_found_with_what_holds_them() -> None:
    model = Keeps()
    ((holder, key, tensor),) = tensor_slots({"": model})
    assert holder is model.listed
    assert (key, tensor is model.listed[0]) == (0, True)
