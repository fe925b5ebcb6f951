"""Buffers of replicas: statistics become the mean, constants stay what they are."""

from __future__ import annotations

import pytest
import torch

from plait.sync.buffers import average
from support.world import run_ranks


def average_three(rank: int) -> tuple[list[float], list[float], int]:
    mask = torch.tensor([0.1, torch.finfo(torch.float64).min, -torch.inf], dtype=torch.float64)
    statistics = torch.tensor([1.0 + rank, 2.0], dtype=torch.float64)
    count = torch.tensor(rank)
    for _ in range(20):
        average([mask, statistics, count])
    return mask.tolist(), statistics.tolist(), int(count)


def test_what_differs_becomes_the_mean_and_what_is_the_same_keeps_its_bits() -> None:
    for rank, (mask, statistics, count) in enumerate(run_ranks(3, average_three)):
        assert mask == [0.1, torch.finfo(torch.float64).min, -torch.inf]
        assert statistics == pytest.approx([2.0, 2.0], rel=1e-15)
        assert count == rank
