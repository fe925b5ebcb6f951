"""Metrics of an evaluation besides the loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar, get_args

import torch.nn.functional as F
from torch import Tensor

from plait.core.errors import JobError
from plait.core.names import did_you_mean, resolve
from plait.schema.settings import EvaluateSettings, Mode

# Returns numerator and denominator of a mean. The attribute `finish`, if any, converts the mean to the
# reported value; `mode` says whether less or more is better.
Metric = Callable[[Any, Any], tuple[Any, int]]
M = TypeVar("M", bound=Callable[..., Any])
# The target that losses of torch ignore: padding.
IGNORED = -100


def more_is_better(metric: M) -> M:
    """Decorator: more of this metric is better."""
    metric.mode = "max"  # type: ignore[attr-defined]
    return metric


@more_is_better
def accuracy(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    """The number of correct targets by the largest logit, and of all targets, without padding (-100)."""
    return (output.argmax(-1) == target).sum(), int((target != IGNORED).sum())


class Perplexity:
    """The exponential of the mean cross entropy of a token, over all tokens that are not padding (-100)."""

    mode: Mode = "min"

    def __call__(self, output: Any, target: Any) -> tuple[Tensor, int]:
        """The sum of the cross entropy of all tokens, and their number."""
        if not isinstance(output, Tensor) or not isinstance(target, Tensor):
            raise JobError(
                f"evaluate.metric: perplexity found that the model returned a {type(output).__name__} with a "
                f"target that is a {type(target).__name__}, expected tensors: logits (batch, time, "
                f"vocabulary) and tokens; with loss: model use metric: none; the perplexity is exp(loss)"
            )
        logits = output.float() if output.dtype.itemsize < 4 else output
        total = F.cross_entropy(logits.flatten(0, -2), target.flatten(), reduction="sum")
        return total, int((target != IGNORED).sum())

    @staticmethod
    def finish(mean: float) -> float:
        """The perplexity, from the mean cross entropy."""
        return math.exp(mean) if mean < 700 else math.inf


perplexity = Perplexity()
NAMED: dict[str, Metric] = {"accuracy": accuracy, "perplexity": perplexity}


def find_metric(name: str, loss: str) -> tuple[str, Metric] | None:
    """The metric's name and function; `auto` is accuracy if the loss is cross-entropy, else none."""
    if name == "auto":
        return ("accuracy", accuracy) if loss == "cross-entropy" else None
    if name == "none":
        return None
    if name in NAMED:
        return name, NAMED[name]
    if ":" in name:
        short_name = name.rpartition(":")[2].rpartition(".")[2]
        if short_name == "loss":
            raise JobError(f"evaluate.metric: found {name!r}, but an evaluation has a loss; use another name")
        return short_name, resolve(name, "evaluate.metric", JobError)
    hint = did_you_mean(name, ["auto", *NAMED, "none"])
    raise JobError(
        f"evaluate.metric: found {name!r}, expected auto, {', '.join(NAMED)}, none or "
        f"'package.module:name'{hint}"
    )


def find_modes(evaluate: EvaluateSettings, loss: str) -> dict[str, Mode]:
    """Whether less or more is better, by the name of the metric, if known."""
    metric = find_metric(evaluate.metric, loss)
    known: Mode | None = "min" if metric is None else _own_mode(metric[1])
    name = "loss" if metric is None else metric[0]
    if known is not None and evaluate.mode not in (None, known):
        raise JobError(f"evaluate.mode: found {evaluate.mode!r}, but of {name} it is {known!r}; leave it out")
    mode = evaluate.mode or known
    return {"loss": "min"} if mode is None else {"loss": "min", name: mode}


def _own_mode(metric: Metric) -> Mode | None:
    # Other libraries use `mode` for other things.
    declared = getattr(metric, "mode", None)
    return next((mode for mode in get_args(Mode) if isinstance(declared, str) and declared == mode), None)


def unknown_mode(name: str) -> str:
    """The message for a metric that is used for a decision but has no mode."""
    return (
        f"found {name!r}, of which it is not known whether less or more is better; add evaluate.mode: min "
        f"(an error) or evaluate.mode: max (a score)"
    )
