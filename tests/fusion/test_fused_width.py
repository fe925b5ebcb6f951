"""How many trials fit is computed without running out of memory; and the experiment measures what it says."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from fused_checks import fuse
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from plait.fusion import FusedOptimizer, FusionError
from plait.fusion.kernels import can_run_on
from plait.fusion.trials.memory_need import MemoryNeed, measure_need, step_bytes


def make_step(width):
    fused = fuse([nn.Sequential(nn.Linear(100, 200), nn.ReLU(), nn.Linear(200, 10)) for _ in range(width)])
    optimizer = FusedOptimizer(fused, "adagrad", lr=0.01)
    x, y = torch.randn(width, 64, 100), torch.randint(0, 10, (width, 64))

    def step():
        optimizer.zero_grad()
        fused.map(F.cross_entropy, fused(x), y).sum().backward()
        optimizer.step()

    return step


def test_memory_grows_with_the_trials_and_is_at_least_weights_states_gradients_and_activations():
    need = measure_need(make_step)
    weights = 4 * (100 * 200 + 200 + 200 * 10 + 10)
    activations = 4 * 64 * (100 + 200 + 200 + 10)
    assert need.trial_bytes > 3 * weights + activations
    assert need.trial_bytes < 12 * (weights + activations)
    assert step_bytes(make_step, 8) == pytest.approx(need.of(8), rel=0.02)


def test_the_largest_width_fits_and_the_next_does_not():
    need = MemoryNeed(fixed_bytes=1e6, trial_bytes=3e6)
    width = need.largest(100e6, overhead_bytes=10e6)
    assert need.of(width) + 10e6 <= 100e6 < need.of(width + 1) + 10e6
    with pytest.raises(FusionError, match="one trial needs 4 MB"):
        need.largest(3e6, overhead_bytes=0)


def test_our_kernels_leave_tensors_without_memory_alone(monkeypatch):
    monkeypatch.setattr("plait.fusion.kernels.find_spec", lambda name: object())
    with FakeTensorMode():
        assert not can_run_on(torch.empty(2, device="cuda"))
    assert not can_run_on(torch.empty(2))
