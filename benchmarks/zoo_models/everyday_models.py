"""Models as people write them, each with a habit that stages or fused trials easily get wrong."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from support.hard_models import rows


class TwoLayers(nn.Module):
    """What most of the models below have: two layers, and something of their own between them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Any:
        return self.b(self.a(x).relu())


class Aggregates(nn.Module):
    """A graph network: adds the neighbours' features into a tensor of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        h = self.a(x).relu()
        out = torch.zeros_like(h)
        out.index_add_(0, target, h[source])
        return self.b(out) / x.shape[0]


class Spectral(nn.Module):
    """A Fourier layer with complex weights, written into part of a tensor of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.out = nn.Linear(1, 4), nn.Linear(4, 1)
        self.weight = nn.Parameter(torch.randn(4, 4, 3, dtype=torch.complex128) / 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.lift(x.unsqueeze(-1)).transpose(1, 2)
        modes = torch.fft.rfft(h)
        mixed = torch.zeros_like(modes)
        mixed[:, :, :3] = torch.einsum("bix,iox->box", modes[:, :, :3], self.weight.to(modes.dtype))
        h = F.gelu(torch.fft.irfft(mixed, n=x.shape[-1]))
        return self.out(h.transpose(1, 2)).squeeze(-1)


class ReturnsNumbers(TwoLayers):
    """A dict of tensors, numbers, words and nothing."""

    def forward(self, x: Tensor) -> Any:
        h = self.a(x).relu()
        return {"logits": self.b(h), "more": {"hidden": h, "layers": 2, "kind": "mlp", "cache": None}}


@dataclass
class Output:
    logits: Tensor
    hidden: Tensor | None = None


class ReturnsOwnClass(TwoLayers):
    """An object of a class of its own."""

    def forward(self, x: Tensor) -> Any:
        h = self.a(x).relu()
        return Output(self.b(h), h)


CALLS = {"forward": 0}


class GoesByGlobal(TwoLayers):
    """Counts its forwards in a global variable, and goes by it."""

    def forward(self, x: Tensor) -> Tensor:
        CALLS["forward"] += 1
        return self.b(self.a(x) * (1 + CALLS["forward"] % 3))


class InnerGradient(TwoLayers):
    """Takes a gradient inside forward, as meta-learning does."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).tanh()
        y = self.b(h)
        if not torch.is_grad_enabled():
            return y
        (slope,) = torch.autograd.grad(y.pow(2).mean(), self.b.weight, create_graph=True)
        return F.linear(h, self.b.weight - 0.1 * slope, self.b.bias)


class HiddenTeacher(nn.Module):
    """Holds a second model where torch does not see it."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 2))
        self.__dict__["teacher"] = copy.deepcopy(self.student)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.student(x)
        with torch.no_grad():
            wanted = self.__dict__["teacher"](x)
        return y, (y - wanted).pow(2).mean()


class _NoisyLinear(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.randn(outputs, inputs) / 3)
        self.deviation = nn.Parameter(torch.full((outputs, inputs), 0.1))
        self.register_buffer("noise", torch.zeros(outputs, inputs))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.noise.normal_()
        return F.linear(x, self.mean + self.deviation * self.noise)


class Noisy(nn.Module):
    """Noise drawn in place into a buffer, which backward needs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = _NoisyLinear(4, 4), _NoisyLinear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).relu())


class ReadsThroughHook(TwoLayers):
    """A hook that holds the model itself, and so the first model in every copy."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, Tensor] = {}
        self.a.register_forward_hook(lambda module, args, out: self.seen.__setitem__("a", out))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).relu()) + self.seen["a"].mean()


class KeepsHistory(TwoLayers):
    """Scales by the means of its last inputs, which it reads as numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.history: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.history = [*self.history, float(x.mean())][-2:]
        return self.b(self.a(x) * (sum(self.history) / len(self.history)))


class FrozenNorm(nn.Module):
    """A pretrained trunk whose batch norm is kept in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
        nn.init.uniform_(self.norm.running_mean)
        self.norm.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.norm(self.a(x)).relu())


class Experts(nn.Module):
    """The two best of four experts for each row, each called on its own rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gate, self.last = nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(8, 2)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mask = (chosen == number).any(dim=-1)
            if mask.any():
                share = (weights * (chosen == number)).sum(-1)[mask]
                y[mask] = y[mask] + expert(x[mask]) * share.unsqueeze(-1)
        return self.last(y)


class Tagger(nn.Module):
    """An LSTM over packed sequences of unlike lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8, padding_idx=0)
        self.lstm = nn.LSTM(8, 6, bidirectional=True, batch_first=True)
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(12, 4)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        x = self.drop(self.embed(tokens))
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        out, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=tokens.shape[1])
        return self.head(out)


class Siamese(nn.Module):
    """One encoder with a batch norm, called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
        self.head = nn.Linear(4, 1)

    def forward(self, one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        u, v = self.encoder(one), self.encoder(other)
        return self.head((u - v).abs()), F.pairwise_distance(u, v)


class Codebook(nn.Module):
    """Vector quantisation whose codes follow the data, past autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)
        self.register_buffer("codes", torch.randn(8, 4))
        self.register_buffer("counts", torch.ones(8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.a(x)
        nearest = torch.cdist(z, self.codes).argmin(1)
        found = F.embedding(nearest, self.codes)
        if self.training:
            with torch.no_grad():
                taken = F.one_hot(nearest, 8).type_as(z)
                self.counts.data.mul_(0.9).add_(taken.sum(0), alpha=0.1)
                self.codes.data.mul_(0.9).add_(taken.t() @ z / self.counts.unsqueeze(1), alpha=0.1)
        return self.b(z + (found - z).detach()), F.mse_loss(z, found.detach())


class Checkpointed(nn.Module):
    """Computes its blocks, which drop elements, again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.ReLU()) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.training else block(x)
        return self.last(x)


class Reparametrised(nn.Module):
    """Calls a submodule with weights computed from its own."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
        self.gain, self.head = nn.Parameter(torch.ones(1)), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        weights = {name: value * self.gain for name, value in self.net.named_parameters()}
        return self.head(torch.func.functional_call(self.net, weights, (x,)))


class OldWeightNorm(nn.Module):
    """Weights that a hook computes before every call; Python cannot copy such a model."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.utils.weight_norm
        self.net = nn.Sequential(norm(nn.Linear(4, 8)), nn.ReLU(), norm(nn.Linear(8, 2)))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class _Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, strength: float) -> Tensor:
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return -ctx.strength * grad, None


class Adversarial(nn.Module):
    """Two heads, one behind a reversed gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
        self.label, self.domain = nn.Linear(8, 3), nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.trunk(x)
        return self.label(h), self.domain(_Reverse.apply(h, 0.5))


class _FakeQuantise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("low", torch.tensor(float("inf")))
        self.register_buffer("high", torch.tensor(float("-inf")))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.low = torch.min(self.low, x.detach().min())
            self.high = torch.max(self.high, x.detach().max())
        scale = (self.high - self.low).clamp(min=1e-8) / 255
        rounded = torch.clamp(torch.round(x / scale), -128, 127) * scale
        return x + (rounded - x).detach()


class Quantised(nn.Module):
    """Training for 8 bits: observed ranges in buffers that are assigned anew."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 2)
        self.before, self.between = _FakeQuantise(), _FakeQuantise()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.between(self.a(self.before(x)).relu()))


class StopsEarly(nn.Module):
    """Leaves a layer out once a buffer has counted four steps."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
        h = self.a(x).relu()
        return self.c(h) if self.steps >= 4 else self.c(self.b(h).relu())


class Variational(nn.Module):
    """Draws from a distribution of torch.distributions."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.mean, self.width, self.b = (nn.Linear(*n) for n in ((4, 8), (8, 3), (8, 3), (3, 4)))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = F.elu(self.a(x))
        found = torch.distributions.Normal(self.mean(h), F.softplus(self.width(h)))
        prior = torch.distributions.Normal(0.0, 1.0)
        return self.b(found.rsample()), torch.distributions.kl_divergence(found, prior).mean()


class ClipsGradient(TwoLayers):
    """A hook on an activation's gradient, made in every forward."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if h.requires_grad:
            h.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        return self.b(h.relu())


class NamedArguments(TwoLayers):
    """Takes whatever it is given, by place or by name."""

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        x = args[0] if args else kwargs["x"]
        h = self.a(x)
        if "mask" in kwargs:
            h = h * kwargs["mask"].unsqueeze(-1)
        return self.b(h.relu())


def graphs() -> Any:
    return tuple(
        (torch.randn(6, 4), torch.randint(0, 6, (edges,)), torch.randint(0, 6, (edges,))) for edges in (9, 8)
    )


def texts() -> Any:
    return tuple((torch.randint(1, 20, (n, m)), torch.arange(m, m - n, -1)) for n, m in ((4, 7), (3, 6)))


def pairs() -> Any:
    return tuple((torch.randn(n, 4), torch.randn(n, 4)) for n in (4, 3))


def signals() -> Any:
    return tuple((torch.randn(n, 12),) for n in (4, 3))


def named() -> Any:
    return tuple({"x": torch.randn(n, 5, 4), "mask": torch.randint(0, 2, (n, 5))} for n in (4, 3))


# Each: the model, and two batches.
EVERYDAY: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "graph network": (Aggregates, graphs),
    "Fourier layer": (Spectral, signals),
    "numbers returned": (ReturnsNumbers, rows(4, 3)),
    "own class returned": (ReturnsOwnClass, rows(4, 3)),
    "named arguments": (NamedArguments, named),
    "global variable": (GoesByGlobal, rows(4, 3)),
    "gradient inside": (InnerGradient, rows(4, 3)),
    "hidden teacher": (HiddenTeacher, rows(4, 3)),
    "noisy weights": (Noisy, rows(4, 3)),
    "hook on itself": (ReadsThroughHook, rows(4, 3)),
    "history": (KeepsHistory, rows(4, 3)),
    "frozen norm": (FrozenNorm, rows(4, 1)),
    "experts": (Experts, rows(4, 3)),
    "packed sequences": (Tagger, texts),
    "siamese": (Siamese, pairs),
    "codebook": (Codebook, rows(4, 3)),
    "checkpointed": (Checkpointed, rows(4, 3)),
    "functional call": (Reparametrised, rows(4, 3)),
    "old weight norm": (OldWeightNorm, rows(4, 3)),
    "reversed gradient": (Adversarial, rows(4, 3)),
    "fake quantisation": (Quantised, rows(4, 3)),
    "early exit": (StopsEarly, rows(4, 3)),
    "variational": (Variational, rows(4, 3)),
    "gradient hook": (ClipsGradient, rows(4, 3)),
}
