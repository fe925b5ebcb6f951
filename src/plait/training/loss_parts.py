"""Whether the loss of a batch is the mean of its parts' losses, as training in parts takes it to be."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from plait.data import loader
from plait.data.calling import evaluation_mode, forward
from plait.schema.settings import TrainSettings
from plait.training.components import Components
from plait.verification import same_random_numbers

# Samples that are tried, as a whole and in small parts: small parts are unlike each other.
_SAMPLES, _AT_A_TIME = 16, 2
# Beyond these, relative to the loss, it is no rounding.
_TOLERANCES = {"float64": 1e-9, "float32": 1e-4}
_LOWER_PRECISION = 3e-2
# What torch's cross entropy leaves out, where nobody says otherwise.
_IGNORED = -100


def describe_parts(settings: TrainSettings, parts: Components) -> str:
    """What to say where the loss of a batch is not the mean of its parts', weighted by samples; else nothing.

    Looks at some samples of the job, with a copy of the model in evaluation mode. Where that cannot be done
    (a stream, whose samples come once; a model that takes other batches than these), it says nothing.
    """
    if parts.pieces is not None or parts.train_set.is_stream or settings.loss == "mse":
        return ""
    count = min(_SAMPLES, settings.data.batch_size, len(parts.train_set))
    if count < 2:
        return ""
    try:
        found = _whole_and_in_parts(settings, parts, count)
    except Exception:  # whatever is wrong with these samples, the first step's error says it better
        return ""
    if found is None:
        return ""
    whole, mean = found
    if abs(whole - mean) <= _TOLERANCES.get(settings.precision, _LOWER_PRECISION) * abs(whole):
        return ""
    return (
        f"loss: of {count} samples it is {whole:.6g}, but {mean:.6g} as the mean of their parts, as where "
        f"padding is left out or classes are weighted; a batch that is trained in parts (workers, "
        f"microbatches, accumulate) takes the mean of its parts, weighted by samples, which differs from one "
        f"process on whole batches; return a sum divided by the number of samples where that matters"
    )


def _whole_and_in_parts(settings: TrainSettings, parts: Components, count: int) -> tuple[float, float] | None:
    """The loss of `count` samples, and the mean of that of their parts; None where they are alike anyway."""
    with same_random_numbers(settings.seed), torch.no_grad():
        (content,) = parts.train_set.example_batches((count,), settings.seed)
        inputs, target = loader.to_device(content, parts.device, parts.dtype)
        plain = settings.loss == "cross-entropy" and not settings.loss_args.get("weight")
        if plain and not bool((target == _IGNORED).any()):
            return None
        model = copy.deepcopy(parts.model)

        def loss(begin: int, end: int) -> float:
            own_inputs, own_target = _rows((inputs, target), count, begin, end)
            with parts.autocast():
                return float(parts.loss(forward(model, own_inputs), own_target))

        places = [(i, min(i + _AT_A_TIME, count)) for i in range(0, count, _AT_A_TIME)]
        with evaluation_mode(model):
            return loss(0, count), sum(loss(a, b) * (b - a) for a, b in places) / count


def _rows(batch: Any, count: int, begin: int, end: int) -> Any:
    """Some samples of a batch; raises ValueError where a part of it does not hold one row a sample."""

    def cut(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.dim() == 0 or len(leaf) != count:
            raise ValueError("not in rows")
        return leaf[begin:end].clone()

    return pytree.tree_map(cut, batch)
