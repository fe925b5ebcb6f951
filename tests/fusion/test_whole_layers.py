"""What stands in for a layer, a cast or a product on a GPU, as far as that can be seen without one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from plait.fusion import fuse
from plait.fusion.dispatch.tensor import Trials, TrialTensor
from plait.fusion.errors import FusionError
from plait.fusion.forward_patches import Patch
from plait.fusion.speed import gpu_matmul, gpu_parts, lazy_cast
from plait.fusion.speed.gpu_matmul import _CastDense


class OwnRMSNorm(nn.Module):
    def __init__(self, offset: float = 0.0, added: float = 0.0, kind: torch.dtype | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 8), requires_grad=False)
        self.eps, self.offset, self.added, self.kind = 1e-6, offset, added, kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = x.float().square().mean(-1, keepdim=True)
        normal = x.float() * torch.rsqrt(size + self.eps + self.added)
        return (self.weight + self.offset) * normal.to(self.kind or x.dtype)


@pytest.mark.parametrize(
    ("options", "agrees"),
    [
        ({}, True),
        ({"offset": 1.0}, False),
        ({"added": 1e-6}, False),  # the epsilon is another than the one it names
        ({"kind": torch.float32}, False),  # the result of 16 bits is not of 16 bits
    ],
)
def test_a_norm_is_replaced_only_where_it_is_torchs(options, agrees):
    fused = fuse([OwnRMSNorm(**options) for _ in range(2)], verify=False)
    assert isinstance(vars(fused.module).get("forward"), Patch) is agrees
    assert "forward" not in vars(fused.trial(0))
    x = torch.randn(2, 3, 8)
    torch.testing.assert_close(fused(x)[1], OwnRMSNorm(**options)(x[1]), rtol=0, atol=0)


@pytest.fixture
def waiting_casts(monkeypatch):
    monkeypatch.setattr(lazy_cast, "can_run_on", lambda x: True)
    monkeypatch.setattr(lazy_cast, "_LEAST_ELEMENTS", 1)


def seen(y):
    """What a loss may do with a cast before it uses it."""
    flat = y.float().view(-1, 6)
    assert isinstance(flat.pending, lazy_cast.PendingCast)
    return flat.square().sum()


def written(y):
    cast = y.float()
    flat = cast.view(-1, 6)
    cast[..., -1] = -5.0  # also in the view
    return flat.square().sum() + flat[:, 2].sum()


def without_gradients(y):
    cast = y.float()
    with torch.no_grad():
        part = cast[:, :2]
        fixed = y.float()
    return (cast * 2.0).sum() + part.square().sum() + fixed.flatten().square().sum()


@pytest.mark.parametrize("loss", [seen, written, without_gradients])
def test_a_cast_that_waits_is_as_if_it_had_not(loss, waiting_casts):
    models = [nn.Linear(4, 6).bfloat16() for _ in range(2)]
    fused = fuse(models, verify=False)
    x = torch.randn(2, 5, 3, 4, dtype=torch.bfloat16)
    found = fused.map(loss, fused(x))
    found.sum().backward()
    plain = loss if loss is not seen else lambda y: y.float().view(-1, 6).square().sum()
    for number, model in enumerate(models):
        alone = plain(model(x[number]))
        alone.backward()
        torch.testing.assert_close(found[number], alone)
        torch.testing.assert_close(fused.module.weight.grad[number], model.weight.grad)


def test_a_tensor_that_is_written_while_its_cast_waits_is_refused(waiting_casts):
    x = TrialTensor(torch.ones(2, 3, dtype=torch.bfloat16), Trials(2))
    cast = lazy_cast.pending_cast(x.stacked)
    x.stacked.add_(1)
    with pytest.raises(FusionError, match="written in place after it was cast"):
        cast.outcome()


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("least_padded", [1, 4096])
def test_a_dense_layer_with_its_own_backward_has_autograds_gradients(has_bias, least_padded, monkeypatch):
    monkeypatch.setattr(gpu_matmul, "_LEAST_PADDED", least_padded)
    sizes = [(2, 3, 5), (2, 7, 5)] + [(2, 7)] * has_bias
    given = [torch.randn(size, dtype=torch.float64, requires_grad=True) for size in sizes]
    assert torch.autograd.gradcheck(
        lambda x, w, *b: _CastDense.apply(x, w, *(b or (None,)), torch.float64), given
    )


def test_the_gradient_of_a_padded_product_is_read_with_its_padding_where_the_loss_made_that(monkeypatch):
    monkeypatch.setattr(gpu_matmul, "_LEAST_PADDED", 1)
    x, weight = torch.randn(2, 3, 5), torch.randn(2, 7, 5)
    y = _CastDense.apply(x.requires_grad_(), weight, None, torch.float32)
    assert (y.stride(), y._is_view()) == ((24, 8, 1), False)
    gradient = torch.randn(2, 3, 8)
    expected = gradient[..., :7] @ weight
    # What follows a row is multiplied by zero.
    for own in (gradient[..., :7], gradient[..., :7].contiguous()):
        (found,) = torch.autograd.grad(y, x, own, retain_graph=True)
        torch.testing.assert_close(found, expected)
    assert gpu_matmul._with_padding(gradient[..., :7], 8).data_ptr() == gradient.data_ptr()


@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "cut", [lambda x: x.unbind(1), lambda x: x.split([1, 2], 1), lambda x: x.chunk(3, 1)]
)
def test_gradients_of_the_parts_of_a_tensor_are_autograds(cut, kind, monkeypatch):
    monkeypatch.setattr(gpu_parts, "can_run_on", lambda x: True)
    monkeypatch.setattr(gpu_parts, "_LEAST_ELEMENTS", 1)
    joined = torch.randn(2, 4, 5, 3 * 2 * 8).to(kind).requires_grad_()

    def loss(parts):
        whole = joined.unflatten(-1, (3, 2, 8)).permute(0, 3, 1, 4, 2, 5)
        taken = parts(whole)
        return (taken[0].sin() * taken[1].sum(1, keepdim=True).reshape(2, -1)[0, 0]).double().sum()

    wanted = torch.autograd.grad(loss(cut), joined, create_graph=True)[0]
    for again in (False, True):
        ours = loss(lambda whole: gpu_parts.parts_of(whole, cut))
        (found,) = torch.autograd.grad(ours, joined, create_graph=again)
        torch.testing.assert_close(found, wanted)
    twice = [torch.autograd.grad(each.double().square().sum(), joined)[0] for each in (found, wanted)]
    torch.testing.assert_close(*twice)


def test_gradients_that_are_parts_of_one_tensor_are_not_copied(monkeypatch):
    monkeypatch.setattr(gpu_parts, "can_run_on", lambda x: True)
    monkeypatch.setattr(gpu_parts, "_LEAST_ELEMENTS", 1)
    whole = torch.randn(2, 3, 4, requires_grad=True)
    gradient = torch.randn(2, 3, 4)
    for parts, shared in ((gradient.unbind(1), True), (gradient.clone().unbind(1)[::-1], False)):
        (found,) = torch.autograd.grad(gpu_parts.parts_of(whole, lambda x: x.unbind(1)), whole, parts)
        assert torch.equal(found, torch.stack(parts, 1))
        assert (found.data_ptr() == gradient.data_ptr()) is shared
