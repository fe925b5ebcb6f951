"""A frozen base that all trials have is held once, and trials train as they do alone."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from fused_checks import CLOSE, fuse
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import plait
from plait.fusion import (
    FusedOptimizer,
    FusionError,
    Shared,
    add_trials,
    keep_trials,
    replace_trial,
    split_optimizer,
)
from plait.fusion.trials.memory_need import step_bytes


class LoRA(nn.Module):
    """A frozen layer with an addition of low rank that is trained."""

    def __init__(self, base: nn.Module, inputs: int, outputs: int, rank: int = 2, p: float = 0.0):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, inputs) / inputs**0.5)
        self.b = nn.Parameter(torch.randn(outputs, rank) * 0.1)
        self.drop = nn.Dropout(p)

    def forward(self, x):
        return self.base(x) + F.linear(F.linear(self.drop(x), self.a), self.b)


class Block(nn.Module):
    """Attention with causal heads and an MLP, its four projections with LoRA."""

    def __init__(self, base, width, p):
        super().__init__()
        self.norm, self.norm2 = base["norm"], base["norm2"]
        self.qkv = LoRA(base["qkv"], width, 3 * width, p=p)
        self.out = LoRA(base["out"], width, width, p=p)
        self.up = LoRA(base["up"], width, 2 * width, p=p)
        self.down = LoRA(base["down"], 2 * width, width, p=p)

    def forward(self, x):
        q, k, v = (
            part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1)
        )
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(seen)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def transformer_base(width=8, words=11):
    return nn.ModuleDict(
        {
            "words": nn.Embedding(words, width),
            "norm": nn.LayerNorm(width),
            "norm2": nn.RMSNorm(width),
            "qkv": nn.Linear(width, 3 * width),
            "out": nn.Linear(width, width),
            "up": nn.Linear(width, 2 * width),
            "down": nn.Linear(2 * width, width),
        }
    )


class Transformer(nn.Module):
    """A language model with tied embeddings: only its LoRA layers are trained."""

    def __init__(self, base, p=0.0, recompute=None):
        super().__init__()
        base.requires_grad_(False)
        self.words = base["words"]
        self.head = nn.Linear(self.words.embedding_dim, self.words.num_embeddings, bias=False)
        self.head.weight = self.words.weight
        self.blocks = nn.ModuleList(Block(base, self.words.embedding_dim, p) for _ in range(2))
        self.recompute = recompute

    def forward(self, tokens):
        x = self.words(tokens)
        for block in self.blocks:
            if self.recompute is None:
                x = block(x)
            else:
                x = checkpoint(block, x.requires_grad_(), use_reentrant=self.recompute)
        return self.head(x)


def mlp(base, p):
    return nn.Sequential(LoRA(base[0], 6, 7, p=p), nn.ReLU(), LoRA(base[1], 7, 5, p=p))


class ConvNet(nn.Module):
    """A frozen backbone in evaluation mode with a trained head."""

    def __init__(self, base, p):
        super().__init__()
        self.backbone = base.requires_grad_(False)
        self.head = nn.Sequential(nn.Dropout(p), nn.Conv2d(4, 4, 1), nn.Flatten(), nn.Linear(16, 5))

    def train(self, mode=True):
        super().train(mode)
        self.backbone.eval()
        return self

    def forward(self, x):
        return self.head(self.backbone(x))


def conv_base():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 2, stride=2),
        nn.GroupNorm(2, 4), nn.ConvTranspose2d(4, 4, 2, stride=2), nn.AvgPool2d(4),
    )  # fmt: skip


# How the base is made, a trial of it with a dropout, and one batch of one trial.
KINDS = {
    "mlp": (lambda: nn.ModuleList([nn.Linear(6, 7), nn.Linear(7, 5)]), mlp, lambda: torch.randn(4, 6)),
    "conv": (conv_base, ConvNet, lambda: torch.randn(4, 3, 8, 8)),
    "transformer": (transformer_base, Transformer, lambda: torch.randint(0, 11, (3, 5))),
}


def trials(kind, count, p=0.0, copies=False):
    """Trials of one base, or each of a copy of it, their dropout `p` and more."""
    make_base, make, _ = KINDS[kind]
    torch.manual_seed(0)
    base = make_base().double()
    made = [make(copy.deepcopy(base) if copies else base, p + 0.1 * p * n).double() for n in range(count)]
    return [model.train() for model in made]


def batches(kind, steps, count):
    torch.manual_seed(7)
    drawn = [[KINDS[kind][2]() for _ in range(count)] for _ in range(steps)]
    return [torch.stack([x.double() if x.is_floating_point() else x for x in each]) for each in drawn]


def loss_of(output):
    return (
        (output * torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view(output.shape))
        .square()
        .mean()
    )


def train(fused, optimizer, given):
    for x in given:
        optimizer.zero_grad()
        fused.map(loss_of, fused(x)).sum().backward()
        optimizer.step()


def lone(model, seed, lr, given):
    """The weights of one trial that is trained in an array of its own that shares nothing."""
    fused = fuse([model], seeds=[seed], share="never")
    train(fused, FusedOptimizer(fused, "adamw", lr=lr), given)
    return fused.trial(0).state_dict()


def assert_same_state(found, wanted):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, msg=lambda m, n=name: f"{n}: {m}", **CLOSE)


RATES = [0.01, 0.003, 0.02]


# Each kind once with one base and once with copies of it, as a factory makes them.
@pytest.mark.parametrize(
    ("kind", "p", "copies"),
    [("mlp", 0.2, True), ("conv", 0.2, False), ("transformer", 0.2, False)],
)
def test_trials_of_one_base_train_as_each_does_alone(kind, p, copies):
    models, given = trials(kind, 3, p, copies), batches(kind, 20, 3)
    fused = fuse(models)
    frozen = {name for name, tensor in models[0].named_parameters() if not tensor.requires_grad}
    assert frozen <= set(fused.shared)
    train(fused, FusedOptimizer(fused, "adamw", lr=RATES), given)
    for number, model in enumerate(models):
        wanted = lone(model, number, RATES[number], [x[number : number + 1] for x in given])
        assert_same_state(fused.trial(number).state_dict(), wanted)


@pytest.mark.parametrize("count", [1, 2])
def test_verified_trials_of_one_base_equal_plain_models_under_torchs_optimizer(count):
    models, given = trials("transformer", count), batches("transformer", 5, count)
    fused = plait.fuse(models, verify=True)
    train(fused, FusedOptimizer(fused, "adamw", lr=RATES[:count]), given)
    assert not fused.unfused
    for number, model in enumerate(models):
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=RATES[number])
        for x in given:
            optimizer.zero_grad()
            loss_of(model(x[number])).backward()
            optimizer.step()
        assert_same_state(fused.trial(number).state_dict(), model.state_dict())


def test_the_base_costs_rows_of_all_trials_and_no_gradient_of_its_weights():
    models = trials("transformer", 3)
    x = batches("transformer", 1, 3)[0]
    frozen = copy.deepcopy(models[0]).requires_grad_(False)

    def flops(step):
        step()  # which measures how
        with FlopCounterMode(display=False) as counted:
            step()
        return counted.get_total_flops()

    def trained(model):
        return lambda: loss_of(model(x[0])).backward()

    # What products with the weights of the base cost a lone trial, forward and input gradients, is in both.
    alone = flops(trained(models[0]))
    fused = fuse(models)
    assert flops(lambda: fused.map(loss_of, fused(x)).sum().backward()) == 3 * alone
    assert flops(lambda: fused(x)) == 3 * flops(lambda: frozen(x[0]))


class Largest(TorchDispatchMode):
    """The largest tensor that is made, in elements."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        outcome = func(*args, **(kwargs or {}))
        for made in torch.utils._pytree.tree_leaves(outcome):
            if isinstance(made, torch.Tensor) and not func.is_view:
                self.elements = max(self.elements, made.untyped_storage().nbytes() // made.element_size())
        return outcome


@pytest.mark.parametrize(
    "layer",
    [
        (nn.Linear(64, 64), (3, 64)),
        (nn.Conv1d(64, 64, 1), (2, 64, 3)),
        (nn.Conv2d(64, 64, 1), (2, 64, 2, 2)),
        (nn.ConvTranspose1d(64, 64, 1), (2, 64, 3)),
        (nn.LSTM(32, 32, batch_first=True), (2, 3, 32)),
        (nn.GRUCell(32, 32), (2, 32)),
        (nn.MultiheadAttention(32, 2, batch_first=True), (2, 3, 32)),
    ],
    ids=lambda layer: type(layer[0]).__name__,
)
def test_no_layer_copies_a_shared_weight(layer):
    part, shape = layer
    part.requires_grad_(False).double()
    fused = fuse([part] * 4)
    x = torch.randn(4, *shape, dtype=torch.float64, requires_grad=True)
    given = (x, x, x) if isinstance(part, nn.MultiheadAttention) else (x,)

    def first(outcome):
        return outcome[0] if isinstance(outcome, tuple) else outcome

    with Largest() as largest:
        found = first(fused(*given))
        (gradient,) = torch.autograd.grad(found.sum(), x)
    largest_weight = max(weight.numel() for weight in part.parameters())
    assert largest.elements < 2 * largest_weight
    own = x[1].detach().requires_grad_()
    wanted = first(part(*[own] * len(given)))
    torch.testing.assert_close(found[1], wanted, **CLOSE)
    torch.testing.assert_close(gradient[1], torch.autograd.grad(wanted.sum(), own)[0], **CLOSE)


def bytes_of(module):
    tensors = (*module.parameters(), *module.buffers())
    return sum(
        storage.nbytes()
        for storage in {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}.values()
    )


@pytest.mark.parametrize("count", [1, 8, 32])
@pytest.mark.parametrize("kind", KINDS)
def test_the_weights_take_the_memory_of_one_base_and_what_each_trial_adds(kind, count):
    models = trials(kind, count)
    adds = sum(p.nbytes for p in models[0].parameters() if p.requires_grad)
    base = bytes_of(models[0]) - adds
    fused = fuse(models)
    assert bytes_of(fused.module) <= 1.05 * (base + count * adds)


def test_what_is_shared_is_described():
    fused = fuse(trials("mlp", 3))
    assert fused.describe() == "base: 712 B held once, 4 tensors; per trial 400 B, 3 trials"
    assert fused.describe() in repr(fused)
    never = fuse(trials("mlp", 3), share="never")
    assert never.describe() == "3 trials of 1.11 kB, nothing held once"


@pytest.mark.parametrize("name", ["bias_hh_l0", "bias_ih_l0", "weight_hh_l0", "weight_ih_l0"])
def test_one_weight_of_a_recurrent_layer_can_be_shared_and_the_others_trained(name):
    models = [nn.LSTM(3, 2, batch_first=True).double() for _ in range(3)]
    for model in models:
        weight = getattr(model, name).requires_grad_(False)
        with torch.no_grad():
            weight.copy_(torch.linspace(-1.0, 1.0, weight.numel()).view_as(weight))
    fused = fuse(models)
    assert list(fused.shared) == [name]
    # As many sequences as gates, so that nothing broadcasts the wrong axis unseen.
    x = torch.randn(3, 8, 5, 3, dtype=torch.float64)
    found = fused(x)[0]
    found.square().sum().backward()
    for number, model in enumerate(models):
        wanted = model(x[number])[0]
        wanted.square().sum().backward()
        torch.testing.assert_close(found[number], wanted, **CLOSE)
        for own, lone in zip(fused.module.parameters(), model.parameters()):
            if lone.grad is not None:
                torch.testing.assert_close(own.grad[number], lone.grad, **CLOSE)


def test_frozen_weights_that_differ_are_those_of_each_trial():
    models = trials("mlp", 3, copies=True)
    with torch.no_grad():
        models[2][2].base.bias[0] += 1.0
    fused = fuse(models)
    assert "2.base.bias" not in fused.shared
    assert "2.base.weight" in fused.shared
    assert fused.describe().endswith("frozen but not equal in all trials: 2.base.bias")
    assert_same_state(fused.trial(2).state_dict(), models[2].state_dict())


def test_only_one_tensor_is_shared_where_that_is_asked():
    assert not fuse(trials("mlp", 2, copies=True), share="same-storage").shared
    assert len(fuse(trials("mlp", 2), share="same-storage").shared) == 4
    with pytest.raises(FusionError, match="found share='yes', expected 'auto'"):
        fuse(trials("mlp", 2), share="yes")


def test_trained_weights_that_models_have_in_common_are_those_of_each_trial():
    common = nn.Linear(3, 3)
    fused = fuse([nn.Sequential(common, nn.Linear(3, 2)) for _ in range(2)])
    assert not fused.shared
    assert fused.module[0].weight.shape == (2, 3, 3)


def test_unfreezing_what_is_shared_is_refused_until_each_trial_has_its_own():
    models, given = trials("mlp", 3), batches("mlp", 12, 3)
    fused = fuse(models)
    optimizer = FusedOptimizer(fused, "adamw", lr=RATES)
    train(fused, optimizer, given[:6])
    bias = fused.module[2].base.bias
    bias.requires_grad_(True)
    for use in (lambda: fused(given[0]), optimizer.step):
        with pytest.raises(FusionError, match=r"'2.base.bias' requires a gradient.*unshare\('2.base.bias'\)"):
            use()
    bias.requires_grad_(False)
    optimizer.load_state_dict(optimizer.state_dict())
    fused.unshare("2.base.bias")
    bias = fused.module[2].base.bias.requires_grad_(True)
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [bias]})  # it has followed
    train(fused, optimizer, given[6:])
    with pytest.raises(FusionError, match=r"no shared tensor '2.base.biased'.*did you mean"):
        fused.unshare("2.base.biased")
    for number, model in enumerate(models):
        model = copy.deepcopy(model)
        plain = torch.optim.AdamW(model.parameters(), lr=RATES[number])
        for step, x in enumerate(given):
            model[2].base.bias.requires_grad_(step >= 6)
            plain.zero_grad()
            loss_of(model(x[number])).backward()
            plain.step()
        assert_same_state(fused.trial(number).state_dict(), model.state_dict())
        state = split_optimizer(optimizer, fused.split())[number].state_dict()
        assert state["state"].keys() == plain.state_dict()["state"].keys()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def test_trials_leave_and_others_of_the_same_base_take_their_places():
    models, given = trials("transformer", 4, 0.1), batches("transformer", 8, 3)
    fused = fuse(models[:3])
    optimizer = FusedOptimizer(fused, "adamw", lr=RATES)
    train(fused, optimizer, given[:4])
    keep_trials(fused, optimizer, [0, 2])
    add_trials(fused, optimizer, [models[1]], [7], {"lr": [0.05]})
    replace_trial(fused, optimizer, 1, models[3], 9, {"lr": 0.04})
    train(fused, optimizer, given[4:])
    assert len(fused.shared) >= 13
    wanted = [(models[0], 0, RATES[0], 0, 0), (models[3], 9, 0.04, 1, 4), (models[1], 7, 0.05, 2, 4)]
    for number, (model, seed, rate, place, start) in enumerate(wanted):
        state = lone(model, seed, rate, [x[place : place + 1] for x in given[start:]])
        assert_same_state(fused.trial(number).state_dict(), state)


def test_a_trial_of_another_base_joins_and_each_has_its_own_from_then_on():
    models = trials("mlp", 3, copies=True)
    with torch.no_grad():
        models[2][0].base.weight += 1.0
    fused = fuse(models[:2])
    optimizer = FusedOptimizer(fused, "adamw", lr=0.01)
    replace_trial(fused, optimizer, 1, models[2], 2)
    assert "0.base.weight" not in fused.shared
    assert "0.base.bias" in fused.shared
    given = batches("mlp", 2, 2)
    train(fused, optimizer, given)
    assert_same_state(fused.trial(1).state_dict(), lone(models[2], 2, 0.01, [x[1:] for x in given]))


def test_states_copies_and_other_dtypes_keep_what_is_shared():
    models, given = trials("transformer", 2, 0.1), batches("transformer", 2, 2)
    fused = fuse(models)
    state = fused.state_dict()
    assert state["module.words.weight"].shape == models[0].words.weight.shape
    assert set(fused.trial(0).state_dict()) == set(models[0].state_dict())
    stream = io.BytesIO()
    torch.save(fused, stream)
    stream.seek(0)
    copies = [copy.deepcopy(fused), torch.load(stream, weights_only=False)]
    copies[0].seeds.copy_(fused.seeds)
    other = fuse(trials("transformer", 2, 0.1), share="never")
    other.load_state_dict({name: value.clone() for name, value in state.items()})
    back = fuse(trials("transformer", 2, 0.1))
    back.load_state_dict(other.state_dict())
    wanted = fused(given[0])
    for one in (*copies, other, back):
        torch.testing.assert_close(one(given[0]), wanted, **CLOSE)
    assert all(one.shared.keys() == fused.shared.keys() for one in copies)
    assert models[0].words.weight.data_ptr() == fused.module.words.weight.data_ptr()
    half = fused.to(torch.bfloat16)
    assert half.module.head.weight is half.module.words.weight
    assert half(given[0]).dtype == torch.bfloat16
    assert models[0].words.weight.dtype == torch.float64


def test_a_base_that_is_changed_in_place_changes_for_all_trials():
    models = trials("mlp", 2)
    fused, x = fuse(models), batches("mlp", 1, 2)[0]
    with torch.no_grad():
        models[0][0].base.weight.mul_(2.0)
    torch.testing.assert_close(fused(x)[1], models[1](x[1]), **CLOSE)


class WritesUnseen(nn.Module):
    """Writes to a buffer in a way that shows only in the buffer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x):
        torch.add(torch.ones(1), 1.0, out=self.count)
        return self.layer(x) + self.count


def test_a_write_that_cannot_be_seen_is_refused():
    fused = fuse([WritesUnseen() for _ in range(2)])
    with pytest.raises(FusionError, match="has written to 'count', which all trials share"):
        fused(torch.ones(2, 3, 2))
    fused.unshare("count")
    assert fused.module.count.shape == (2, 1)


def test_the_first_comparison_leaves_the_shared_buffers_as_they_were():
    torch.manual_seed(0)
    base = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3), n_power_iterations=2).double()
    norm = base.parametrizations.weight[0]
    norm._u, norm._v = nn.functional.normalize(torch.ones(2, 3, dtype=torch.float64), dim=1)
    plain = [LoRA(copy.deepcopy(base), 3, 3).double() for _ in range(2)]
    fused = plait.fuse(copy.deepcopy(plain))  # a norm's iterations write with out=
    for x in torch.randn(2, 2, 4, 3, dtype=torch.float64):
        y = fused(x)
        for number, model in enumerate(plain):
            torch.testing.assert_close(y[number], model(x[number]), **CLOSE)


class Averages(nn.Module):
    """Keeps an average of its outputs in a buffer, and a slow copy of its weight that is not trained."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.slow = nn.Linear(3, 3).requires_grad_(False)
        nn.init.ones_(self.slow.weight)
        nn.init.zeros_(self.slow.bias)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("table", torch.ones(2, 3))

    def forward(self, x):
        mean, rows = self.mean, self.table[1]
        self.slow.weight.data.mul_(0.9).add_(self.layer.weight.data, alpha=0.1)
        self.slow.bias.data = 0.9 * self.slow.bias.data + 0.1 * self.layer.bias.data
        y = self.layer(x) + self.slow(x)
        self.count += 1
        rows.add_(y.detach().mean(0))
        mean.lerp_(y.detach().mean(0), 1 / self.count)
        return y - mean + self.table.sum(0)


@pytest.mark.parametrize("unfused", [(), ("",)])
def test_what_a_forward_writes_to_is_that_of_each_trial(unfused):
    torch.manual_seed(0)
    models = [Averages().double() for _ in range(3)]
    plain = copy.deepcopy(models)
    fused = fuse(models, unfused=unfused)
    assert {"count", "mean", "table", "slow.weight", "slow.bias"} == set(fused.shared)
    for x in torch.randn(3, 3, 4, 3, dtype=torch.float64):
        y = fused(x)
        for number, model in enumerate(plain):
            torch.testing.assert_close(y[number], model(x[number]), **CLOSE)
    for number, model in enumerate(plain):
        assert_same_state(fused.trial(number).state_dict(), model.state_dict())
        assert models[number].count == 0
    assert not fused.shared


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_recompute_blocks_of_a_shared_base(reentrant):
    given = batches("transformer", 2, 2)
    torch.manual_seed(0)
    base = transformer_base().double()
    models = [Transformer(base, 0.2, reentrant).double() for _ in range(2)]
    fused = fuse(models)
    train(fused, FusedOptimizer(fused, "adamw", lr=0.01), given)
    for model in models:
        model.recompute = None
    for number, model in enumerate(models):
        wanted = lone(model, number, 0.01, [x[number : number + 1] for x in given])
        assert_same_state(fused.trial(number).state_dict(), wanted)


class Mixed(nn.Module):
    """A base in bfloat16 with an addition in float32."""

    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = nn.Linear(8, 2), nn.Linear(2, 8)

    def forward(self, x):
        return self.base(x.bfloat16()).float() + self.b(self.a(x))


def test_a_base_in_bfloat16_has_additions_in_float32():
    base = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)).bfloat16()
    models = [Mixed(base) for _ in range(3)]
    x = torch.randn(3, 4, 8)
    fused = plait.fuse(models, verify=True)
    found = fused(x)
    assert not fused.unfused
    for number, model in enumerate(models):
        torch.testing.assert_close(found[number], model(x[number]), rtol=1e-2, atol=1e-2)


class Packed(torch.autograd.Function):
    """A product with a weight of 4 bits an element, two in a byte."""

    calls = 0

    @staticmethod
    def unpack(packed):
        return torch.stack([packed // 16, packed % 16], -1).flatten(1).double() / 8 - 1

    @classmethod
    def forward(cls, ctx, x, packed, by_largest):
        cls.calls += 1
        ctx.packed, ctx.scale = packed, x.abs().amax() if by_largest else 1.0
        return (x / ctx.scale) @ cls.unpack(packed).mT

    @classmethod
    def backward(cls, ctx, dy):
        return dy @ cls.unpack(ctx.packed) / ctx.scale, None, None


class PackedLinear(nn.Module):
    def __init__(self, packed, by_largest):
        super().__init__()
        self.register_buffer("packed", packed)
        self.by_largest = by_largest

    def forward(self, x):
        return Packed.apply(x, self.packed, self.by_largest)


@pytest.mark.parametrize(("by_largest", "calls"), [(False, 1), (True, 3)])
def test_a_function_of_ones_own_is_called_once_on_all_rows_where_that_is_right(by_largest, calls):
    torch.manual_seed(0)
    packed = torch.randint(0, 256, (6, 3), dtype=torch.uint8)
    models = [LoRA(PackedLinear(packed, by_largest), 6, 6).double() for _ in range(3)]
    fused = plait.fuse(models, verify=True)
    x = torch.randn(3, 4, 6, dtype=torch.float64, requires_grad=True)
    fused(x)
    assert set(fused.shared) == {"base.packed"}
    assert not fused.unfused
    Packed.calls = 0
    found = fused(x)
    assert Packed.calls == calls
    (gradient,) = torch.autograd.grad(found.sum(), x)
    for number, model in enumerate(models):
        own = x[number].detach().requires_grad_()
        wanted = model(own)
        torch.testing.assert_close(found[number], wanted, **CLOSE)
        torch.testing.assert_close(gradient[number], torch.autograd.grad(wanted.sum(), own)[0], **CLOSE)


def test_dropout_inside_attention_of_the_base_is_that_of_each_trial():
    base = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True).requires_grad_(False).double()

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.base, self.head = base, nn.Linear(4, 2).double()

        def forward(self, x):
            return self.head(self.base(x, x, x, need_weights=False)[0])

    models = [Net() for _ in range(2)]
    x = torch.randn(3, 5, 4, dtype=torch.float64)
    found = fuse(models)(Shared(x))
    for number, model in enumerate(models):
        torch.testing.assert_close(
            found[number], fuse([model], seeds=[number], share="never")(Shared(x))[0], **CLOSE
        )


def test_the_memory_of_a_step_counts_the_base_once():
    base = nn.Linear(100, 100).requires_grad_(False)

    def make_step(width):
        fused = fuse([LoRA(base, 100, 100) for _ in range(width)])
        return lambda: fused(torch.zeros(width, 2, 100)).sum().backward()

    one, nine = step_bytes(make_step, 1), step_bytes(make_step, 9)
    assert 40400 < one < nine < one + 8 * 12000
