"""What an evaluation counts, besides the loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from plait.core.errors import JobError
from plait.core.names import did_you_mean, resolve

Metric = Callable[[Tensor, Tensor], tuple[Any, int]]


def accuracy(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    """How many targets the largest logit names, and how many targets there are.

    The first is a scalar on the output's device, so that nobody waits for the device to count.
    """
    return (output.argmax(-1) == target).sum(), target.numel()


def find_metric(name: str, loss: str) -> tuple[str, Metric] | None:
    """The metric's name and function; `auto` is accuracy where the loss is cross-entropy, else none."""
    if name == "auto":
        return ("accuracy", accuracy) if loss == "cross-entropy" else None
    if name == "none":
        return None
    if name == "accuracy":
        return "accuracy", accuracy
    if ":" in name:
        return name.rpartition(":")[2], resolve(name, "evaluate.metric", JobError)
    hint = did_you_mean(name, ["auto", "accuracy", "none"])
    raise JobError(
        f"evaluate.metric: found {name!r}, expected auto, accuracy, none or 'package.module:name'{hint}"
    )
