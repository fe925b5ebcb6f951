"""A profile on a GPU; runs where there is one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from plait.profiler.profile import profile_model
from support.world import run_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def most_at_work(rank: int) -> float:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).cuda()
    graph = profile_model(model, (torch.randn(32, 64, device="cuda"),), warmup=1, repeats=2).graph
    return max(node.working_bytes for node in graph.nodes)


def test_what_libraries_set_aside_once_counts_for_no_layer() -> None:
    """In a new process the first product has cuBLAS take tens of megabytes."""
    (found,) = run_ranks(1, most_at_work)
    assert 0 < found < 1e6
