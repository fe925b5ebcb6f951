"""Word-level language models of stacked LSTMs (Zaremba et al., 2014)."""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn


def lstm(
    vocabulary: int = 10_000,
    width: int = 650,
    layers: int = 2,
    dropout: float = 0.5,
    tied: bool = False,
    initial_range: float = 0.05,
) -> nn.Sequential:
    """Tokens (batch, time) in, logits (batch, time, vocabulary) out; each window starts with a zero state.

    The defaults are the paper's medium model on the Penn Treebank: 19,780,400 parameters, in the paper's form
    with two bias vectors per layer. With `tied` the decoder uses the embedding's weight; with PyTorch's
    word_language_model settings for WikiText-2 (vocabulary 33,278, width 650) that gives 28,434,378. All
    weights are initialized uniformly in +-`initial_range`.
    """
    embedding = nn.Embedding(vocabulary, width)
    decoder = nn.Linear(width, vocabulary)
    if tied:
        decoder.weight = embedding.weight
    parts: OrderedDict[str, nn.Module] = OrderedDict(embedding=embedding, dropout0=nn.Dropout(dropout))
    for number in range(1, layers + 1):
        parts[f"lstm{number}"] = LSTMLayer(width)
        parts[f"dropout{number}"] = nn.Dropout(dropout)
    parts["decoder"] = decoder
    model = nn.Sequential(parts)
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -initial_range, initial_range)
    return model


def lstm_large(vocabulary: int = 10_000, tied: bool = False) -> nn.Sequential:
    """The paper's large model on the Penn Treebank, width 1,500: 66,034,000 parameters."""
    return lstm(vocabulary, width=1500, dropout=0.65, tied=tied, initial_range=0.04)


def lstm_tiny(vocabulary: int = 256, tied: bool = False) -> nn.Sequential:
    """Two layers of width 24, without dropout."""
    return lstm(vocabulary, width=24, dropout=0.0, tied=tied, initial_range=0.2)


class LSTMLayer(nn.Module):
    """One LSTM layer that returns only its outputs, so that layers can be chained and cut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cells = nn.LSTM(width, width, batch_first=True)

    def forward(self, x_btc: Tensor) -> Tensor:
        outputs_btc: Tensor = self.cells(x_btc)[0]
        return outputs_btc
