"""Metrics of an evaluation besides the loss."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, get_args

import torch.nn.functional as F
from torch import Tensor

from plait.core.errors import JobError, PlaitError
from plait.core.names import check_arguments, did_you_mean, in_words, line_of, resolve
from plait.core.shown import shown
from plait.schema.settings import EvaluateSettings, MetricSettings, Mode

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
def accuracy(output: Any, target: Any) -> tuple[Tensor, int]:
    """The number of correct targets by the largest logit, and of all targets, without padding (-100).

    Of a model of transformers that returns its loss, the logits of whole samples are taken.
    """
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    # Those of tokens may be of the next ones, or not.
    if isinstance(logits, Tensor) and logits is not output and logits.dim() != 2:
        logits = None
    if not isinstance(logits, Tensor) or not isinstance(target, Tensor):
        raise JobError(
            f"evaluate.metric: accuracy found that the model returned a {type(output).__name__} with a "
            f"target that is a {type(target).__name__}, expected logits (batch, ..., classes) and classes; "
            f"with loss: model use metric: none, or a function of yours that takes the output and the labels"
        )
    return (logits.argmax(-1) == target).sum(), int((target != IGNORED).sum())


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


@dataclass(frozen=True)
class NamedMetric:
    """A metric, its name in results, and whether less or more of it is better, if known.

    `call` is a function of (output, target), or has `update` and `compute`, as torchmetrics' metrics have. A
    function returns (sum, count) of a batch, which are summed, or one number; such a one, and what has
    `update`, is given all samples of an evaluation.
    """

    name: str
    call: Any
    mode: Mode | None = None

    @property
    def is_named(self) -> bool:
        """Whether it is one of Plait's own, which return (sum, count)."""
        return NAMED.get(self.name) is self.call

    @property
    def is_updated(self) -> bool:
        """Whether it is given batches one after the other, and computes a number at the end."""
        return all(callable(getattr(self.call, name, None)) for name in ("update", "compute", "reset"))


def find_metrics(evaluate: EvaluateSettings, loss: str) -> tuple[NamedMetric, ...]:
    """The metrics of an evaluation; `auto` is accuracy if the loss is cross-entropy, else none."""
    if not evaluate.metrics:
        given = MetricSettings(evaluate.metric, mode=evaluate.mode)
        if evaluate.metric == "none" and evaluate.mode not in (None, "min"):
            raise JobError(f"evaluate.mode: found {evaluate.mode!r}, but of loss it is 'min'; leave it out")
        found = find_metric(given, loss, "evaluate.metric")
        return () if found is None else (found,)
    for key, value in (("metric", evaluate.metric != "auto"), ("mode", evaluate.mode is not None)):
        if value:
            raise JobError(
                f"evaluate.{key}: found {shown(getattr(evaluate, key))} and evaluate.metrics; put it into "
                f"that list: - {{call: ..., mode: max}}"
            )
    metrics = [find_metric(each, loss, "evaluate.metrics") for each in evaluate.metrics]
    return check_names([each for each in metrics if each is not None])


def check_names(metrics: Sequence[NamedMetric]) -> tuple[NamedMetric, ...]:
    """The metrics, none of which may have the name of another."""
    names = [each.name for each in metrics]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise JobError(f"evaluate.metrics: found two metrics called {twice!r}; give one of them a name")
    return tuple(metrics)


def find_metric(settings: MetricSettings, loss: str, key: str) -> NamedMetric | None:
    """The metric of these settings, which are those of `key`; None for `none`."""
    call, metric = settings.call, None
    if call == "none" or (call == "auto" and loss != "cross-entropy"):
        return None
    if call == "auto":
        call = "accuracy"
    if call in NAMED:
        metric = NAMED[call]
    elif ":" in call:
        metric = resolve(call, key, JobError)
    else:
        hint = did_you_mean(call, ["auto", *NAMED, "none"])
        raise JobError(
            f"{key}: found {call!r}, expected auto, {', '.join(NAMED)}, none or 'package.module:name'{hint}"
        )
    name = settings.name or call.rpartition(":")[2].rpartition(".")[2]
    return named_metric(name, metric, settings, key)


def named_metric(name: str, metric: Any, settings: MetricSettings, key: str) -> NamedMetric:
    """`metric`, made with its options if it is a class; JobError if it cannot be one."""
    if name == "loss":
        raise JobError(f"{key}: found {settings.call!r}, but an evaluation has a loss; use another name")
    if isinstance(metric, type) or settings.options:
        if not callable(metric):
            raise JobError(f"{key}: {name} is {shown(metric)}, which takes no options")
        positional = 0 if isinstance(metric, type) else 2
        check_arguments(metric, settings.options, f"{key}.options", JobError, positional)
        metric = _made(name, metric, settings.options, key)
    found = NamedMetric(name, metric)
    if not callable(metric) and not found.is_updated:
        raise JobError(
            f"{key}: {name} is {shown(metric)}, expected a function of (output, target), or an object with "
            f"update and compute"
        )
    known = _own_mode(metric)
    if known is not None and settings.mode not in (None, known):
        raise JobError(
            f"{key.replace('.metric', '.mode') if key.endswith('metric') else key}: found "
            f"{settings.mode!r}, but of {name} it is {known!r}; leave it out"
        )
    return replace(found, mode=settings.mode or known)


def _made(name: str, metric: Callable[..., Any], options: Mapping[str, Any], key: str) -> Any:
    if not isinstance(metric, type):
        return functools.partial(metric, **options)
    try:
        return metric(**options)
    except PlaitError:
        raise
    except Exception as failure:  # a user's code may raise anything
        raise JobError(f"{key}: {name} failed with {in_words(failure)}{line_of(failure)}") from failure


def name_of(metric: object) -> str:
    """The name of a function or of an object's class, for results."""
    return str(getattr(metric, "__name__", type(metric).__name__))


def find_modes(evaluate: EvaluateSettings, loss: str) -> dict[str, Mode]:
    """Whether less or more is better, by the name of the metric, if known."""
    return modes_of(find_metrics(evaluate, loss))


def modes_of(metrics: Sequence[NamedMetric]) -> dict[str, Mode]:
    """Whether less or more is better, of the loss and of the metrics of which it is known."""
    return {"loss": "min", **{each.name: each.mode for each in metrics if each.mode is not None}}


def _own_mode(metric: Any) -> Mode | None:
    # Other libraries use `mode` for other things; torchmetrics says `higher_is_better`.
    declared = getattr(metric, "mode", None)
    if isinstance(declared, str) and declared in get_args(Mode):
        return next(mode for mode in get_args(Mode) if mode == declared)
    higher = getattr(metric, "higher_is_better", None)
    return None if not isinstance(higher, bool) else "max" if higher else "min"


def unknown_mode(name: str) -> str:
    """The message for a metric that is used for a decision but has no mode."""
    return (
        f"found {name!r}, of which it is not known whether less or more is better; add evaluate.mode: min "
        f"(an error) or evaluate.mode: max (a score), in evaluate.metrics mode: to the metric"
    )
