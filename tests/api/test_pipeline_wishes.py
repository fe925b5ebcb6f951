"""Open wishes for pipelines in PyTorch's tracker, each as a test with the number of its issue."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import plait
from support.world import run_ranks

Batch = tuple[Any, Any]


class Rotary(nn.Module):
    """A decoder block whose rotary positions are computed once, before all blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        q, k, v = (each.view(*x.shape[:2], 2, 4).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        cos, sin = angles
        q, k = (each * cos + torch.cat((-each[..., 2:], each[..., :2]), -1) * sin for each in (q, k))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class RotaryModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 8)
        self.blocks = nn.ModuleList(Rotary() for _ in range(3))
        self.head = nn.Linear(8, 13)
        self.register_buffer("frequencies", torch.tensor([1.0, 0.1]), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        angles = torch.cat([torch.outer(positions, self.frequencies)] * 2, -1)
        x, turns = self.embed(tokens), (angles.cos(), angles.sin())
        for block in self.blocks:
            x = block(x, turns)
        return self.head(x)


class SkipConnections(nn.Module):
    """Each value of the first half is used again in the second, as in a U-Net."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.up = nn.ModuleList(nn.Linear(8, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for layer in self.down:
            x = layer(x).tanh()
            kept.append(x)
        for layer in self.up:
            x = layer(torch.cat([x, kept.pop()], -1)).tanh()
        return x


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.GRU(4, 6, batch_first=True), nn.GRU(6, 6, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x)[0])[0].mean(1))


class NamedInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.inner, self.head = nn.Embedding(11, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, *, tokens: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
        x = self.inner(self.embed(tokens)).relu()
        if mask is not None:
            x = x * mask.unsqueeze(-1)
        return {"logits": self.head(x.sum(1)), "hidden": x}


class TiedEmbedding(nn.Module):
    """The weights of the embedding are those of the output, in the other stage."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.inner(self.embed(tokens)))


def token_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def named_loss(output: dict[str, Tensor], target: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(output["logits"], target["labels"])


def tokens(samples: int, length: int, below: int = 13) -> Tensor:
    return torch.randint(0, below, (samples, length))


def texts(*shapes: tuple[int, int]) -> list[Batch]:
    return [(x, x.roll(-1, 1)) for x in (tokens(*shape) for shape in shapes)]


def named(samples: int) -> Batch:
    mask = torch.rand(samples, 5, dtype=torch.float64)
    return {"mask": mask, "tokens": tokens(samples, 5, 11)}, {"labels": torch.randint(0, 3, (samples,))}


def vectors(*shapes: tuple[int, ...]) -> list[Batch]:
    return [(torch.randn(shape, dtype=torch.float64), torch.randint(0, 3, shape[:1])) for shape in shapes]


@dataclass(frozen=True)
class Wish:
    """A model, its batches and the arguments of the pipeline."""

    model: Callable[[], nn.Module]
    loss: Callable[[Any, Any], Tensor]
    batches: Callable[[], list[Batch]]
    schedule: str = "flush"
    other_inputs: Any = None

    def build(self) -> tuple[nn.Module, list[Batch]]:
        torch.manual_seed(3)
        return self.model().double(), self.batches()


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=13, use_cache=False, **sizes))


def llama_batches() -> list[Batch]:
    return [({"input_ids": x}, y) for x, y in texts((6, 6), (6, 6))]


def llama_loss(output: Any, target: Tensor) -> Tensor:
    return token_loss(output.logits, target)


WISHES = {
    "rotary": Wish(RotaryModel, token_loss, lambda: texts(*[(8, 5)] * 3)),
    "lengths": Wish(
        Recurrent,
        F.cross_entropy,
        lambda: vectors((8, 5, 4), (8, 7, 4), (6, 3, 4)),
        other_inputs=torch.zeros(3, 6, 4, dtype=torch.float64),
    ),
    "skip connections": Wish(SkipConnections, F.cross_entropy, lambda: vectors((7, 4), (5, 4), (1, 4))),
    "dict": Wish(NamedInputs, named_loss, lambda: [named(8) for _ in range(3)]),
    "tied": Wish(TiedEmbedding, token_loss, lambda: texts((8, 5), (8, 4), (8, 6)), "zero-bubble"),
}
LLAMA = {"llama": Wish(llama, llama_loss, llama_batches)}


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-3)


def make_pipeline(wish: Wish) -> tuple[plait.Pipeline, nn.Module, list[Batch]]:
    """The pipeline, a plain model with the same weights, and the batches."""
    model, batches = wish.build()
    plain = copy.deepcopy(model)
    x = batches[0][0]
    pipe = plait.Pipeline(
        model,
        2,
        example_inputs=x if isinstance(x, dict) else (x,),
        loss=wish.loss,
        optimizer=make_optimizer,
        schedule=wish.schedule,
        microbatches=3,
        other_inputs=wish.other_inputs,
    )
    return pipe, plain, batches


def call(model: nn.Module, x: Any) -> Any:
    return model(**x) if isinstance(x, dict) else model(x)


def apart(one: Any, other: Any) -> float:
    """The largest difference between the tensors of two trees."""
    pairs = zip(tree_leaves(one), tree_leaves(other), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs if isinstance(a, Tensor))


@dataclass
class Differences:
    """How far a pipeline and a plain loop are apart."""

    before: float
    losses: list[float]
    weights: float
    after: float


def train_both(rank: int, extended: bool = False) -> dict[str, Differences]:
    """Each wish in a pipeline and in a plain loop."""
    found = {}
    for name, wish in (LLAMA if extended else WISHES).items():
        pipe, plain, batches = make_pipeline(wish)
        with pipe:
            optimizer = make_optimizer(plain.parameters())
            before, losses = outputs_apart(pipe, plain, batches[0][0]), []
            for x, y in batches:
                loss = wish.loss(call(plain, x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(abs(float(pipe.step(x, y)) - loss.item()))
            state = pipe.state_dict()
            weights = apart(state, plain.state_dict()) if rank == 0 else 0.0
            found[name] = Differences(before, losses, weights, outputs_apart(pipe, plain, batches[0][0]))
    return found


def outputs_apart(pipe: plait.Pipeline, plain: nn.Module, x: Any) -> float:
    plain.eval()
    with torch.no_grad():
        difference = apart(pipe.evaluate(x), call(plain, x))
    plain.train()
    return difference


@pytest.fixture(scope="module")
def trained() -> list[dict[str, Differences]]:
    return run_ranks(2, train_both, deadline_s=120)


def assert_equal(trained: list[dict[str, Differences]], *wishes: str) -> None:
    for rank in trained:
        for wish in wishes:
            assert max(*rank[wish].losses, rank[wish].weights, rank[wish].after) < 1e-10, rank[wish]


def test_127964_skip_connections_pass_over_stages(trained: list[dict[str, Differences]]) -> None:
    assert_equal(trained, "skip connections")


def test_184361_models_with_rotary_positions(trained: list[dict[str, Differences]]) -> None:
    assert_equal(trained, "rotary")


@pytest.mark.extended
def test_184361_a_llama_of_transformers() -> None:
    assert_equal(run_ranks(2, train_both, True), "llama")


def test_159942_dynamic_shapes(trained: list[dict[str, Differences]]) -> None:
    assert_equal(trained, "lengths", "tied")


def test_126600_microbatches_of_unlike_sizes(trained: list[dict[str, Differences]]) -> None:
    assert_equal(trained, "skip connections")


def test_159711_inputs_and_targets_in_dicts(trained: list[dict[str, Differences]]) -> None:
    assert_equal(trained, "dict")


def test_164203_embeddings_and_tied_weights(trained: list[dict[str, Differences]]) -> None:
    assert_equal(trained, "tied")


def test_162822_evaluation_before_training(trained: list[dict[str, Differences]]) -> None:
    assert all(each.before < 1e-10 for rank in trained for each in rank.values())
