"""A frozen base that all trials have is held once, and trials train as they do alone."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from fused_checks import CLOSE, fuse
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from plait.fusion import FusedOptimizer, FusionError, Shared, add_trials, keep_trials, replace_trial
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
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
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
    return (output * torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view(output.shape)).square().mean()


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


@pytest.mark.parametrize("copies", [False, True], ids=["one tensor", "equal values"])
@pytest.mark.parametrize("p", [0.0, 0.2], ids=["plain", "dropout"])
@pytest.mark.parametrize("kind", KINDS)
def test_trials_of_one_base_train_as_each_does_alone(kind, p, copies):
    models, given = trials(kind, 3, p, copies), batches(kind, 20, 3)
    fused = fuse(models)
    frozen = {name for name, tensor in models[0].named_parameters() if not tensor.requires_grad}
    assert frozen <= set(fused.shared)
    train(fused, FusedOptimizer(fused, "adamw", lr=RATES), given)
    for number, model in enumerate(models):
        wanted = lone(model, number, RATES[number], [x[number : number + 1] for x in given])
        assert_same_state(fused.trial(number).state_dict(), wanted)
