"""What stands in for a layer, a cast or a product on a GPU, as far as that can be seen without one."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from plait.fusion import FusedOptimizer, fuse
from plait.fusion.dispatch.random import is_kept
from plait.fusion.errors import FusionError
from plait.fusion.forward_patches import Patch
from plait.fusion.kernels import low_rank, short_attention
from plait.fusion.speed import gpu_matmul, gpu_parts, lazy_cast, whole_layers
from plait.fusion.speed.gpu_matmul import cast_dense
from plait.fusion.verify.plain_run import drawing_as


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
    fused = fuse([nn.Linear(4, 6) for _ in range(2)], verify=False)
    # Not a layer's, as another way of its product rounds otherwise.
    y = torch.randn(2, 5, 3, 6, dtype=torch.bfloat16, requires_grad=True)
    found = fused.map(loss, y)
    found.sum().backward()
    plain = loss if loss is not seen else lambda y: y.float().view(-1, 6).square().sum()
    for number in range(2):
        own = y[number].detach().requires_grad_()
        alone = plain(own)
        alone.backward()
        torch.testing.assert_close(found[number], alone)
        torch.testing.assert_close(y.grad[number], own.grad)


def add_in_place(y):
    y.add_(1)


def add_to_data(y):
    y.data.add_(1)


def add_to_row(y):
    y[0] = 1


def other_data(y):
    y.data = y.data + 1


@pytest.mark.parametrize("write", [add_in_place, add_to_data, add_to_row, other_data])
def test_a_tensor_that_is_written_while_its_cast_waits_is_refused(write, waiting_casts):
    def loss(y):
        y = y + 0
        cast = y.float()
        write(y)
        return cast.sum()

    fused = fuse([nn.Linear(4, 6).bfloat16() for _ in range(2)], verify=False)
    with pytest.raises(FusionError, match="written in place after it was cast"):
        fused.map(loss, fused(torch.ones(2, 3, 4, dtype=torch.bfloat16)))


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("least_padded", [1, 4096])
def test_a_dense_layer_with_its_own_backward_has_autograds_gradients(has_bias, least_padded, monkeypatch):
    monkeypatch.setattr(gpu_matmul, "_LEAST_PADDED", least_padded)
    sizes = [(2, 3, 5), (2, 7, 5)] + [(2, 7)] * has_bias
    given = [torch.randn(size, dtype=torch.float64, requires_grad=True) for size in sizes]

    def dense(x, w, *b):
        return cast_dense(x, w, *(b or (None,)), torch.float64)

    assert torch.autograd.gradcheck(dense, given)
    assert torch.autograd.gradgradcheck(dense, given)


def test_a_gradient_penalty_passes_through_the_casts_of_a_dense_layer():
    torch.manual_seed(0)
    given = [torch.randn(size, requires_grad=True) for size in ((2, 3, 5), (2, 7, 5), (2, 7))]

    def plain(x, w, b, kind):
        x, w, b = (each.to(kind) for each in (x, w, b))
        return torch.baddbmm(b.unsqueeze(1), x, w.mT)

    def penalty(dense):
        y = dense(*given, torch.bfloat16).float().tanh().sum()
        (gradient,) = torch.autograd.grad(y, given[0], create_graph=True)
        return torch.autograd.grad((gradient.norm(dim=-1) - 1.0).square().sum(), given)

    for found, wanted in zip(penalty(cast_dense), penalty(plain)):
        torch.testing.assert_close(found, wanted, rtol=0.05, atol=0.05)


@pytest.fixture
def kernels_on_cpu(monkeypatch):
    """Layers are computed at once on a CPU in float64, by torch's products; counts the layers."""

    def dropped(wide, keys):
        return wide if keys is None else wide * is_kept(keys, tuple(wide.shape[1:]))

    def scaled_by(scale, is_scaled):
        return scale.double().view(-1, 1, 1) if is_scaled else 1.0

    def narrow(x, w_trc, scale, is_scaled, keys=None):
        calls.append("narrow")
        return dropped(x, keys) @ w_trc.mT * scaled_by(scale, is_scaled)

    def widen(t, w_trc, scale, is_scaled, y, keys=None):
        y += dropped(t @ w_trc * scaled_by(scale, is_scaled), keys)

    def gradient(y, t, scale, is_scaled, like_trc, keys=None):
        like_trc.copy_(t.mT @ dropped(y, keys) * scaled_by(scale, is_scaled))

    calls: list[str] = []
    monkeypatch.setattr(whole_layers, "_rows_on_gpu", lambda x: x.is_floating_point())
    for function in (narrow, widen, gradient):
        monkeypatch.setattr(low_rank, f"_{function.__name__}", function)
    return calls


class CopyingRMSNorm(OwnRMSNorm):
    """Keeps a copy of its input, as one that casts does."""

    def forward(self, x):
        x = x.clone()
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps))


class Residual(nn.Module):
    """Two layers and a norm, to whose inputs the model writes after them."""

    def __init__(self, recompute):
        super().__init__()
        self.first, self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = CopyingRMSNorm()
        self.recompute = recompute

    def block(self, h):
        h = h * 1.5
        h += self.up(h)
        h += self.norm(h)
        h.mul_(self.down(h).tanh())
        return h

    def forward(self, x):
        h = self.first(x)
        if self.recompute is None:
            return self.block(h)
        return checkpoint(self.block, h.requires_grad_(), use_reentrant=self.recompute)


@pytest.mark.parametrize("recompute", [None, False, True])
def test_lora_layers_that_drop_and_whose_input_is_written_to_train_at_once_as_alone(
    recompute, kernels_on_cpu
):
    peft = pytest.importorskip("peft", reason="needs peft")
    torch.manual_seed(0)
    base, models = Residual(recompute).double(), []
    for rank, chance in ((4, 0.5), (8, 0.75)):
        config = peft.LoraConfig(r=rank, lora_alpha=8, lora_dropout=chance, target_modules=["up", "down"])
        models.append(peft.get_peft_model(copy.deepcopy(base), config).double())
        for name, parameter in models[-1].named_parameters():
            if "lora_" in name:
                nn.init.normal_(parameter, std=0.3)
    x = torch.randn(5, 2, 3, 4, 6, dtype=torch.float64)
    fused = fuse(models, range(len(models)), verify=False)
    optimizer = FusedOptimizer(fused, "adamw", lr=0.01)
    for batch in x:
        fused.map(torch.mean, fused(batch)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    # Forward, backward and, with a checkpoint, forward again of two layers.
    assert len(kernels_on_cpu) == len(x) * 2 * (2 if recompute is None else 3)
    for number, model in enumerate(models):
        own = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
        with drawing_as(model, number, 0, {}):
            for batch in x:
                model(batch[number]).mean().backward()
                own.step()
                own.zero_grad()
        torch.testing.assert_close(fused.trial(number).state_dict(), model.state_dict(), rtol=0, atol=1e-10)


def test_the_gradient_of_a_padded_product_is_read_with_its_padding_where_the_loss_made_that(monkeypatch):
    monkeypatch.setattr(gpu_matmul, "_LEAST_PADDED", 1)
    x, weight = torch.randn(2, 3, 5), torch.randn(2, 7, 5)
    y = cast_dense(x.requires_grad_(), weight, None, torch.float32)
    assert (y.stride(), y._is_view()) == ((24, 8, 1), False)
    gradient = torch.randn(2, 3, 8)
    expected = gradient[..., :7] @ weight
    # What follows a row is multiplied by zero.
    for own in (gradient[..., :7], gradient[..., :7].contiguous()):
        (found,) = torch.autograd.grad(y, x, own, retain_graph=True)
        torch.testing.assert_close(found, expected)
    with torch.no_grad():
        assert gpu_matmul._with_padding(gradient[..., :7], 8).data_ptr() == gradient.data_ptr()


@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "cut",
    [
        lambda x: x.unbind(1),
        lambda x: x.split([1, 2], 1),
        lambda x: x.chunk(3, 1),
        lambda x: (x[:, :1], x[:, 2:, 1:]),
    ],
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


def test_gradients_of_attention_lie_in_one_tensor_only_where_its_parts_are_three():
    queries, keys, values = torch.randn(2, 4, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
    for parts, joined in (((queries, keys, values), True), ((queries, queries, values), False)):
        made = short_attention._like(*parts)
        assert len({part.untyped_storage().data_ptr() for part in made}) == (1 if joined else 3)
    windows = torch.randn(2, 2, 12).unfold(2, 8, 1)
    assert all(part.stride(3) == 1 for part in short_attention._like(windows, windows, windows))
