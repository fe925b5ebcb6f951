"""BERT (Devlin et al., 2019) as a masked language model, in the sizes of Turc et al. (2019)."""

from __future__ import annotations

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.workloads.transformer import Attention, Embeddings, initialised


def bert(
    vocabulary: int = 30522,
    context: int = 512,
    layers: int = 12,
    heads: int = 12,
    width: int = 768,
    dropout: float = 0.1,
) -> nn.Sequential:
    """Tokens (batch, time) in, logits (batch, time, vocabulary) out; each position attends to all others.

    The defaults are BERT-base. The head shares the token embedding's weight.
    """
    parts: OrderedDict[str, nn.Module] = OrderedDict()
    embeddings = BertEmbeddings(vocabulary, context, width, dropout)
    parts["embeddings"] = embeddings
    for number in range(1, layers + 1):
        parts[f"layer{number}"] = EncoderLayer(width, heads, dropout)
    parts["head"] = Head(width, embeddings.tokens)
    return initialised(nn.Sequential(parts))


def bert_medium(vocabulary: int = 30522, dropout: float = 0.1) -> nn.Sequential:
    """BERT-medium: 8 layers of width 512 with 8 heads."""
    return bert(vocabulary, layers=8, heads=8, width=512, dropout=dropout)


def bert_tiny(vocabulary: int = 256, context: int = 64, dropout: float = 0.0) -> nn.Sequential:
    """Two layers of width 32 with two heads."""
    return bert(vocabulary, context, layers=2, heads=2, width=32, dropout=dropout)


class BertEmbeddings(Embeddings):
    """The sum of token, position and first-segment embeddings, normalised."""

    def __init__(self, vocabulary: int, context: int, width: int, dropout: float) -> None:
        super().__init__(vocabulary, context, width, dropout)
        self.segments = nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width, eps=1e-12)

    def forward(self, tokens_bt: Tensor) -> Tensor:
        places_t = self.places_of(tokens_bt)
        total = self.tokens(tokens_bt) + self.places(places_t) + self.segments(torch.zeros_like(places_t))
        x_btc: Tensor = self.dropout(self.norm(total))
        return x_btc


class EncoderLayer(nn.Module):
    """Attention and a perceptron, each followed by a residual sum and a norm (post-norm)."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention = Attention(width, heads, dropout, is_causal=False)
        self.attention_norm = nn.LayerNorm(width, eps=1e-12)
        self.expand = nn.Linear(width, 4 * width)
        self.shrink = nn.Linear(4 * width, width)
        self.norm = nn.LayerNorm(width, eps=1e-12)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_btc: Tensor) -> Tensor:
        x_btc = self.attention_norm(x_btc + self.dropout(self.attention(x_btc)))
        y_btc: Tensor = self.norm(x_btc + self.dropout(self.shrink(F.gelu(self.expand(x_btc)))))
        return y_btc


class Head(nn.Module):
    """The logits of each position's token."""

    def __init__(self, width: int, tokens: nn.Embedding) -> None:
        super().__init__()
        self.dense = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width, eps=1e-12)
        self.decoder = nn.Linear(width, tokens.num_embeddings)
        self.decoder.weight = tokens.weight

    def forward(self, x_btc: Tensor) -> Tensor:
        logits: Tensor = self.decoder(self.norm(F.gelu(self.dense(x_btc))))
        return logits
