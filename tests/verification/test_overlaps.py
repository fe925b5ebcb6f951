"""Tensors of a model that share memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from plait.verification.overlaps import copies, overlapping


def named(*tensors):
    return [(f"t{number}", tensor) for number, tensor in enumerate(tensors)]


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
    (pair,) = overlapping(named(*tensors))
    assert {*pair} == {"t0", "t1"}


def test_of_many_views_in_one_memory_each_pair_is_found_once():
    whole = torch.zeros(100)
    parts = [whole[start : start + 3] for start in range(0, 90, 2)]
    pairs = [tuple(sorted((int(a[1:]), int(b[1:])))) for a, b in overlapping(named(*reversed(parts)))]
    assert sorted(pairs) == [(n, n + 1) for n in range(44)]


@pytest.mark.parametrize(
    "tensors",
    [
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
    assert list(overlapping(named(*tensors))) == []


def test_copies_share_memory_where_their_originals_do():
    whole = torch.arange(12.0)
    views = [whole[:8].view(2, 4), whole[4:8], whole[8:].expand(3, 4), whole[8:], torch.ones(3, 2).T]
    originals = [nn.Parameter(view, requires_grad=number > 0) for number, view in enumerate(views)]
    copied = copies(originals)
    for one, other in zip(originals, copied, strict=True):
        assert (one.stride(), one.requires_grad) == (other.stride(), other.requires_grad)
        assert torch.equal(one, other)
    with torch.no_grad():
        copied[1].fill_(-1.0)
        copied[3].fill_(-2.0)
    assert copied[0].tolist() == [[0.0, 1.0, 2.0, 3.0], [-1.0] * 4]
    assert copied[2].tolist() == [[-2.0] * 4] * 3
    assert torch.equal(whole, torch.arange(12.0))
