"""A decoder-only language model in GPT-2's shape (Radford et al., 2019)."""

from __future__ import annotations

import math
from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.core.errors import InputError


def transformer(
    vocabulary: int = 50257,
    context: int = 1024,
    layers: int = 12,
    heads: int = 12,
    width: int = 768,
    dropout: float = 0.1,
    tied: bool = True,
) -> nn.Sequential:
    """Tokens (batch, time) in, logits (batch, time, vocabulary) out; each position attends to earlier ones.

    The defaults are GPT-2 small: 124,439,808 parameters. With `tied` the head uses the token embedding's
    weight, as in GPT-2; otherwise it adds vocabulary x width parameters. Weights are initialized as in GPT-2:
    N(0, 0.02), divided by sqrt(2 x layers) for layers that write to the residual stream.
    """
    parts: OrderedDict[str, nn.Module] = OrderedDict()
    embeddings = Embeddings(vocabulary, context, width, dropout)
    head = nn.Linear(width, vocabulary, bias=False)
    if tied:
        head.weight = embeddings.tokens.weight
    parts["embeddings"] = embeddings
    for number in range(1, layers + 1):
        parts[f"block{number}"] = Block(width, heads, dropout)
    parts["norm"] = nn.LayerNorm(width)
    parts["head"] = head
    model = nn.Sequential(parts)
    return initialised(model, residual_std=0.02 / math.sqrt(2 * layers))


def transformer_tiny(vocabulary: int = 256, context: int = 64, tied: bool = True) -> nn.Sequential:
    """Two layers of width 32 with two heads, without dropout."""
    return transformer(vocabulary, context, layers=2, heads=2, width=32, dropout=0.0, tied=tied)


class Embeddings(nn.Module):
    """Tokens (batch, time) to the sum of token and position embeddings (batch, time, width)."""

    def __init__(self, vocabulary: int, context: int, width: int, dropout: float) -> None:
        super().__init__()
        self.context = context
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)

    def places_of(self, tokens_bt: Tensor) -> Tensor:
        """The position of each token in its sequence."""
        time = tokens_bt.shape[1]
        if time > self.context:
            raise InputError(
                f"model: found {time} tokens in a sequence, expected at most {self.context}; "
                f"shorten data.length or raise model_args.context"
            )
        return torch.arange(time, device=tokens_bt.device)

    def forward(self, tokens_bt: Tensor) -> Tensor:
        x_btc: Tensor = self.dropout(self.tokens(tokens_bt) + self.places(self.places_of(tokens_bt)))
        return x_btc


class Attention(nn.Module):
    """Self-attention with several heads; if causal, each position attends only to earlier ones."""

    def __init__(self, width: int, heads: int, dropout: float, is_causal: bool = True) -> None:
        super().__init__()
        if width % heads:
            raise InputError(
                f"model_args: width {width} cannot be shared by {heads} heads; use a width that {heads} "
                f"divides"
            )
        self.heads = heads
        self.is_causal = is_causal
        self.attention_dropout = dropout
        self.query_key_value = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)

    def forward(self, x_btc: Tensor) -> Tensor:
        joined = self.query_key_value(x_btc).unflatten(-1, (3, self.heads, -1))
        query, key, value = joined.permute(2, 0, 3, 1, 4).unbind(0)
        dropout = self.attention_dropout if self.training else 0.0
        mixed_bhtc = F.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=self.is_causal
        )
        y_btc: Tensor = self.project(mixed_bhtc.transpose(1, 2).flatten(2))
        return y_btc


class Block(nn.Module):
    """One layer: attention and a perceptron, each after a norm and added to the input (pre-norm)."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.attention_dropout = nn.Dropout(dropout)
        self.perceptron_norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.gelu = nn.GELU(approximate="tanh")
        self.project = nn.Linear(4 * width, width)
        self.perceptron_dropout = nn.Dropout(dropout)

    def forward(self, x_btc: Tensor) -> Tensor:
        x_btc = x_btc + self.attention_dropout(self.attention(self.attention_norm(x_btc)))
        hidden = self.gelu(self.expand(self.perceptron_norm(x_btc)))
        y_btc: Tensor = x_btc + self.perceptron_dropout(self.project(hidden))
        return y_btc


def initialised(model: nn.Sequential, residual_std: float = 0.02) -> nn.Sequential:
    """`model` with weights from N(0, 0.02), of `project` layers N(0, residual_std), and zero biases."""
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            std = residual_std if name.endswith(".project") else 0.02
            nn.init.normal_(module.weight, std=std)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    return model
