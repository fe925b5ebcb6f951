"""Tensors of a model that share memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from plait.verification.overlaps import overlapping


def holding(*tensors):
    module = nn.Module()
    for number, tensor in enumerate(tensors):
        if isinstance(tensor, nn.Parameter):
            module.register_parameter(f"t{number}", tensor)
        else:
            module.register_buffer(f"t{number}", tensor)
    return module


MATRIX = torch.zeros(4, 6)
FROZEN = [nn.Parameter(MATRIX[:2], False), nn.Parameter(MATRIX[1:], False)]


@pytest.mark.parametrize(
    "tensors",
    [
        (MATRIX, MATRIX[1]),
        (MATRIX[1], MATRIX),
        (MATRIX[:, 1:3], MATRIX[:, 2:]),
        (MATRIX.view(-1)[::2], MATRIX.view(-1)[::3]),
        (MATRIX.view(-1)[1::2], MATRIX[0, 3:4].expand(5)),
        (nn.Parameter(MATRIX), nn.Parameter(MATRIX.T)),
        (nn.Parameter(MATRIX), nn.Parameter(MATRIX, False)),
        (FROZEN[0], MATRIX[0]),
        (MATRIX[2], MATRIX.view(torch.int16)[1:, 4:]),
    ],
)
def test_two_views_with_a_common_element_are_found(tensors):
    (pair,) = overlapping(holding(*tensors))
    assert {*pair} == {"t0", "t1"}


def test_of_many_views_in_one_memory_each_pair_is_found_once():
    whole = torch.zeros(100)
    parts = [whole[start : start + 3] for start in range(0, 90, 2)]
    pairs = [tuple(sorted((int(a[1:]), int(b[1:])))) for a, b in overlapping(holding(*reversed(parts)))]
    assert sorted(pairs) == [(n, n + 1) for n in range(44)]


@pytest.mark.parametrize(
    "tensors",
    [
        (MATRIX, MATRIX),  # one tensor
        (MATRIX, MATRIX.clone()),
        (MATRIX[:2], MATRIX[2:]),
        (MATRIX[:, :2], MATRIX[:, 2:]),
        (MATRIX.view(-1)[::2], MATRIX.view(-1)[1::2]),
        (MATRIX[:0], MATRIX),
        (MATRIX[3], MATRIX.view(torch.uint8)[:3]),
        (torch.as_strided(MATRIX, (3, 2), (0, 5)), MATRIX[0, 1:3]),
        FROZEN,
        (torch.zeros(2, 2).to_sparse(), MATRIX, torch.zeros(3, device="meta")),
    ],
)
def test_apart_from_these_nothing_is_found(tensors):
    assert list(overlapping(holding(*tensors))) == []
