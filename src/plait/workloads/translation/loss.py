"""The loss of a translation with label smoothing, and the token accuracy."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from plait.core.errors import JobError
from plait.workloads.metrics import more_is_better
from plait.workloads.translation.gnmt import PAD


def label_smoothing(
    output: Tensor, target: Tensor, smoothing: float = 0.1, tokens_per_sample: float = 1.0
) -> Tensor:
    """The sum over all tokens except padding, divided by the number of samples and by `tokens_per_sample`.

    Divided by samples and not by tokens, it does not depend on how a batch is split. With
    `tokens_per_sample`, the typical length of a sample, it is about the loss per token.
    """
    if output.shape[:-1] != target.shape:
        raise JobError(
            f"loss: label_smoothing found an output of shape {tuple(output.shape)} and a target of shape "
            f"{tuple(target.shape)}; expected the target to have the output's shape without the vocabulary"
        )
    total = F.cross_entropy(
        output.flatten(0, -2),
        target.flatten(),
        ignore_index=PAD,
        reduction="sum",
        label_smoothing=smoothing,
    )
    return total / (target.shape[0] * tokens_per_sample)


@more_is_better
def token_accuracy(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The number of correct tokens (largest logit, given the correct previous ones), and of all tokens."""
    is_token = target != PAD
    return ((output.argmax(-1) == target) & is_token).sum(), is_token.sum()
