"""The profiler's benchmark measures what its claims speak of."""

from __future__ import annotations

import pytest
import torch

from plait.workloads.vgg import vgg16_tiny
from plait_bench import profiler


def test_the_benchmark_shows_each_model_with_its_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    case = profiler.ProfiledCase("vgg16", vgg16_tiny, lambda batch: torch.randn(batch, 1, 32, 32), 10)
    monkeypatch.setattr(profiler, "CASES", (case,))
    bench = profiler.run(batch=4, repeats=2)
    (row,) = bench.rows
    assert row["parameters_exact"] is True
    assert row["layers"] == 26
    assert len(bench.claims) == 3
    assert bench.claims[-1].holds
    assert "vgg16: layers over whole step" in bench.render()
