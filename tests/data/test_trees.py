"""What a loader process hands over arrives as it was, and nothing is unpickled on the way."""

from __future__ import annotations

import enum
import json
import math
import pickle
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_sequence

from plait.core.errors import DataError
from plait.data.trees import put_together, take_apart
from plait.fusion.dispatch.per_trial import PerTrial

Point = namedtuple("Point", "x y")


class Colour(enum.IntEnum):
    RED = 3


@dataclass(frozen=True)
class Sample:
    image: Any
    name: str


def there_and_back(value: Any) -> Any:
    tensors: list[torch.Tensor] = []
    text = json.dumps(take_apart(value, tensors))
    left = iter(tensors)

    def next_tensor(dtype: torch.dtype, shape: Any) -> torch.Tensor:
        found = next(left)
        assert (found.dtype, list(found.shape)) == (dtype, list(shape))
        return found

    return put_together(json.loads(text), next_tensor)


leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary()
)
keys = st.one_of(st.text(), st.integers(), st.tuples(st.integers(), st.text()))
values = st.recursive(
    leaves,
    lambda below: st.one_of(
        st.lists(below), st.tuples(below, below), st.dictionaries(keys, below), st.builds(Point, below, below)
    ),
)


@given(values)
def test_plain_values_come_back_as_they_were(value: Any):
    found = there_and_back(value)
    assert found == value
    assert type(found) is type(value)


def test_tensors_arrays_and_objects_that_hold_them_come_back_as_they_were():
    value = {
        "tensors": [
            torch.randn(2, 3).t(),
            torch.tensor(3, dtype=torch.int8),
            torch.zeros(0, 2),
            torch.ones(2).bool(),
        ],
        "array": numpy.arange(6, dtype=">i4").reshape(2, 3),
        "text": numpy.array(["a", "bcd"]),
        "scalar": numpy.float32(1.5),
        "sample": Sample(torch.arange(3), "img_7"),
        "colour": Colour.RED,
        "order": OrderedDict(b=1, a=2),
        "packed": pack_sequence([torch.ones(3, 2), torch.ones(1, 2)]),
        "nan": math.nan,
    }
    found = there_and_back(value)
    for sent, came in zip(value["tensors"], found["tensors"]):
        assert torch.equal(sent, came)
        assert sent.dtype == came.dtype
    assert (found["array"] == value["array"]).all()
    assert found["array"].dtype == value["array"].dtype
    assert found["text"].tolist() == ["a", "bcd"]
    assert isinstance(found["scalar"], numpy.float32)
    assert isinstance(found["sample"], Sample)
    assert torch.equal(found["sample"].image, torch.arange(3))
    assert found["colour"] is Colour.RED
    assert list(found["order"].items()) == [("b", 1), ("a", 2)]
    assert torch.equal(found["packed"].data, value["packed"].data)
    assert math.isnan(found["nan"])


@pytest.mark.parametrize(
    "value",
    [lambda: 1, object(), torch.eye(2).to_sparse(), torch.ones(1, requires_grad=True), numpy.array([{}])],
    ids=["function", "object", "sparse", "requires grad", "array of objects"],
)
def test_what_cannot_be_handed_over_is_refused_with_a_way_out(value: Any):
    with pytest.raises(DataError, match=r"data.loaders: a batch holds .*; make tensors.*or use loaders: 0"):
        take_apart([value], [])


def test_a_number_of_each_fused_trial_comes_back_as_it_was():
    found = there_and_back([PerTrial([0.1, 0.3]), PerTrial([0.1, 0.1])])
    assert [one.values for one in found] == [(0.1, 0.3), (0.1, 0.1)]
    assert all(type(one) is PerTrial for one in found)


def test_a_class_is_only_used_to_make_what_it_is():
    """Text that names a function, or a class of another kind, makes nothing."""
    for kind in ("named", "mapping", "dataclass", "value", "x"):
        for name in (["os", "system"], ["builtins", "eval"], ["subprocess", "Popen"]):
            with pytest.raises((ValueError, TypeError)):
                put_together([kind, name, ["true"]], lambda *_: torch.zeros(1))
    assert not hasattr(put_together(pickle.dumps(1).decode("latin1"), lambda *_: torch.zeros(1)), "numerator")
