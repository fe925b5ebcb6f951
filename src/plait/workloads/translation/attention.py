"""Additive attention (Bahdanau et al., 2015), normalised as Salimans and Kingma (2016) do with weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class NormalisedAttention(nn.Module):
    """The attention of each query: scores from a sum of query and key, and the weighted context.

    The vector that maps a sum to a score has a separate length (`gain`) and direction.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.direction = nn.Parameter(torch.empty(width))
        self.gain = nn.Parameter(torch.empty(1))
        self.bias = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize as published: a score has the size of one hidden unit."""
        nn.init.uniform_(self.direction, -0.1, 0.1)
        nn.init.constant_(self.gain, self.direction.numel() ** -0.5)
        nn.init.zeros_(self.bias)

    def forward(
        self, queries_btc: Tensor, context_bsc: Tensor, keys_bsc: Tensor, is_padding_bs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The context (batch, time, channels) of each query, and its weights (batch, time, source).

        `keys_bsc` are `key` of the context, which a step-by-step decoder computes once.
        """
        sums_btsc = self.query(queries_btc).unsqueeze(2) + keys_bsc.unsqueeze(1) + self.bias
        scale = self.gain / self.direction.norm()
        scores_bts = torch.matmul(sums_btsc.tanh(), self.direction * scale)
        # The lowest finite number, so that a row of only padding does not become NaN.
        lowest = torch.finfo(scores_bts.dtype).min
        weights_bts = scores_bts.masked_fill(is_padding_bs.unsqueeze(1), lowest).softmax(-1)
        return torch.matmul(weights_bts, context_bsc), weights_bts
