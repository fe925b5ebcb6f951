"""GELU with a backward of its own: the slope is torch's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from plait.pipeline.cpu.gelu import use_fast_gelu


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6)])
def test_the_slope_equals_torchs_far_from_zero_too(
    approximate: str, dtype: torch.dtype, tolerance: float
) -> None:
    ours, theirs = nn.GELU(approximate), nn.GELU(approximate)
    use_fast_gelu(ours)
    x = torch.cat([torch.linspace(-30, 30, 601), torch.tensor([0.0, -0.0, 1e4, -1e4])]).to(dtype)
    found = []
    for layer in (ours, theirs):
        leaf = x.clone().requires_grad_()
        y = layer(leaf)
        y.backward(torch.linspace(-1, 2, len(x), dtype=dtype))
        found.append((y.detach(), leaf.grad))
    assert torch.equal(found[0][0], found[1][0])
    torch.testing.assert_close(found[0][1], found[1][1], rtol=tolerance, atol=tolerance)


def test_half_precision_is_left_to_torch() -> None:
    layer = nn.GELU()
    use_fast_gelu(layer)
    x = torch.randn(4, dtype=torch.bfloat16, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.bfloat16
