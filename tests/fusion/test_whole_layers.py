"""What stands in for a layer, a cast or a product on a GPU, as far as that can be seen without one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from plait.fusion import fuse
from plait.fusion.dispatch.tensor import Trials, TrialTensor
from plait.fusion.errors import FusionError
from plait.fusion.forward_patches import Patch
from plait.fusion.speed import lazy_cast
from plait.fusion.speed.gpu_matmul import _CastDense


class OwnRMSNorm(nn.Module):
    def __init__(self, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 8), requires_grad=False)
        self.eps, self.offset = 1e-6, offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = x.float().square().mean(-1, keepdim=True)
        return (self.weight + self.offset) * (x.float() * torch.rsqrt(size + self.eps)).to(x.dtype)


@pytest.mark.parametrize(("offset", "agrees"), [(0.0, True), (1.0, False)])
def test_a_norm_is_replaced_only_where_it_is_torchs(offset, agrees):
    fused = fuse([OwnRMSNorm(offset) for _ in range(2)], verify=False)
    assert isinstance(vars(fused.module).get("forward"), Patch) is agrees
    assert "forward" not in vars(fused.trial(0))
    x = torch.randn(2, 3, 8)
    torch.testing.assert_close(fused(x)[1], OwnRMSNorm(offset)(x[1]), rtol=0, atol=0)


@pytest.fixture
def waiting_casts(monkeypatch):
    monkeypatch.setattr(lazy_cast, "can_run_on", lambda x: True)
    monkeypatch.setattr(lazy_cast, "_LEAST_ELEMENTS", 1)


def test_a_cast_waits_through_views_and_is_as_if_it_had_not(waiting_casts):
    fused = fuse([nn.Linear(4, 6).bfloat16() for _ in range(2)], verify=False)
    x = torch.randn(2, 5, 3, 4, dtype=torch.bfloat16)
    pending = []

    def logits(y):
        cast = y.float()[:, :-1].flatten(0, 1).view(-1, 6)
        pending.append(cast.pending)
        return cast

    found = fused.map(lambda y: logits(y).square().sum(), fused(x))
    assert isinstance(pending[0], lazy_cast.PendingCast)
    expected = fused(x).float()[:, :, :-1].square().sum((1, 2, 3))
    torch.testing.assert_close(found, expected)
    for loss in (found, expected):
        loss.sum().backward()
        loss.grads = fused.module.weight.grad.clone()
        fused.module.weight.grad = None
    torch.testing.assert_close(found.grads, expected.grads)


def test_a_tensor_that_is_written_while_its_cast_waits_is_refused(waiting_casts):
    x = TrialTensor(torch.ones(2, 3, dtype=torch.bfloat16), Trials(2))
    cast = lazy_cast.pending_cast(x.stacked)
    x.stacked.add_(1)
    with pytest.raises(FusionError, match="written in place after it was cast"):
        cast.outcome()


@pytest.mark.parametrize("has_bias", [True, False])
def test_a_dense_layer_with_its_own_backward_has_autograds_gradients(has_bias):
    sizes = [(2, 3, 5), (2, 7, 5)] + [(2, 7)] * has_bias
    given = [torch.randn(size, dtype=torch.float64, requires_grad=True) for size in sizes]
    assert torch.autograd.gradcheck(
        lambda x, w, *b: _CastDense.apply(x, w, *(b or (None,)), torch.float64), given
    )
