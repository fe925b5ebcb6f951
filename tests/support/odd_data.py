"""Data of several users for a language model, of which user 1 has a sample that cannot be read."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import Dataset

TORN = 9


class Sentences(Dataset[dict[str, Tensor]]):
    """Sixteen samples of six tokens below 16, arguments of a model of transformers."""

    def __init__(self, split: str, user: int) -> None:
        self.user, self.is_training = user, split == "train"
        self._tokens = torch.randint(16, (16, 6), generator=torch.Generator().manual_seed(user))

    def __len__(self) -> int:
        return 16 if self.is_training else 4

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        if self.is_training and (self.user, number) == (1, TORN):
            raise ValueError("a torn sample")
        tokens = self._tokens[number] if self.is_training else self._tokens[number].flip(0)
        return {"input_ids": tokens, "labels": tokens}
