"""Buffers of replicas: statistics become the mean, constants stay what they are."""

from __future__ import annotations

import pytest
import torch

from plait.sync.buffers import average
from support.world import run_ranks


def average_three(rank: int) -> tuple[list[float], list[float], list[float], int, bool]:
    mask = torch.tensor([0.1, torch.finfo(torch.float64).min, -torch.inf], dtype=torch.float64)
    statistics = torch.tensor([1.0 + rank, 2.0], dtype=torch.float64)
    count, flag = torch.tensor(3 * rank), torch.tensor(rank == 1)
    for _ in range(20):
        average([mask, statistics, count, flag])
    # Workers that saw 0, 1 and 3 samples; what none of them knows of the first does not matter.
    weighted = torch.tensor([complex(rank, 4 * rank) if rank else complex("inf")])
    average([weighted], samples=[0, 1, 3][rank])
    found = torch.view_as_real(weighted).flatten().tolist()
    # Of two trials, of which they saw unlike numbers.
    trials = torch.tensor([[rank], [4.0 * rank]])
    average([trials], samples=torch.tensor([[0, 2], [1, 2], [3, 0]][rank]))
    return mask.tolist(), statistics.tolist(), found + trials.flatten().tolist(), int(count), bool(flag)


def test_what_differs_becomes_the_mean_and_what_is_the_same_keeps_its_bits() -> None:
    for mask, statistics, weighted, count, flag in run_ranks(3, average_three):
        assert mask == [0.1, torch.finfo(torch.float64).min, -torch.inf]
        assert statistics == pytest.approx([2.0, 2.0], rel=1e-15)
        assert weighted == [1.75, 7.0, 1.75, 2.0]
        assert (count, flag) == (6, True)
