"""Checks that the loss of a batch is the mean of the losses of its parts, as microbatches assume."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from plait.data import loader
from plait.data.call_model import evaluation_mode, forward
from plait.schema.settings import TrainSettings
from plait.training.components import Components
from plait.verification import same_random_numbers
from plait.verification.python_state import unchanged_state

# Samples that are tried as a whole and in small parts, which differ from each other. First the first samples,
# then others from the whole set, since the first ones may be all of one class.
_SAMPLES, _AT_A_TIME, _SETS = 16, 2, 3
# Larger differences, relative to the loss, are not rounding.
_TOLERANCES = {"float64": 1e-9, "float32": 1e-4}
_LOWER_PRECISION = 3e-2
# The default ignore_index of torch's cross entropy.
_IGNORED = -100


def parts_of_a_batch(settings: TrainSettings, workers: int) -> int:
    """The number of parts of a batch for which a separate loss is computed."""
    return settings.stages.plan.microbatches if settings.in_stages else workers * settings.accumulate


def describe_parts(settings: TrainSettings, components: Components, workers: int) -> str:
    """A warning if the loss of a batch is not the weighted mean of the losses of its parts; else empty.

    Tries some samples of the job, with a copy of the model in evaluation mode. Empty if that is not possible:
    for a stream, whose samples come once, or a model that needs other batches.
    """
    if not components.is_whole or components.train_set.is_stream or settings.loss == "mse":
        return ""
    if parts_of_a_batch(settings, workers) == 1:
        return ""
    count = min(_SAMPLES, settings.data.batch_size, len(components.train_set))
    if count < 2:
        return ""
    tolerance = _TOLERANCES.get(settings.precision, _LOWER_PRECISION)
    try:
        tried = [
            _whole_and_in_parts(settings, components, numbers) for numbers in _sample_sets(components, count)
        ]
    except Exception:  # whatever is wrong with these samples, the first step's error says it better
        return ""
    # A part whose targets are all ignored has a NaN loss.
    apart = [pair for pair in tried if pair and not abs(pair[0] - pair[1]) <= tolerance * abs(pair[0])]
    if not apart:
        return ""
    whole, mean = apart[0]
    return (
        f"loss: of {count} samples it is {whole:.6g}, but {mean:.6g} as the mean of their parts, as where "
        f"padding is left out or classes are weighted; a batch that is trained in parts (workers, "
        f"microbatches, accumulate) takes the mean of its parts, weighted by samples, which differs from one "
        f"process on whole batches; return a sum divided by the number of samples where that matters"
    )


def _sample_sets(components: Components, count: int) -> Iterator[list[int]]:
    """The sample numbers to try."""
    samples = len(components.train_set)
    example_indices = getattr(components.train_set.dataset, "example_indices", None)
    yield list(range(count)) if example_indices is None else list(example_indices((count,))[0])
    for number in range(1, _SETS if samples > count else 1):
        yield [(i * samples // count + number) % samples for i in range(count)]


def _whole_and_in_parts(
    settings: TrainSettings, components: Components, numbers: Sequence[int]
) -> tuple[float, float] | None:
    """The loss of these samples, and the mean loss of their parts; None if all parts are alike."""
    count = len(numbers)
    held = {"model": components.model, "loss": components.loss}
    with same_random_numbers(settings.seed), unchanged_state(held), torch.no_grad():
        content = components.train_set.batch(0, numbers, settings.seed)
        inputs, target = loader.to_device(content, components.device, components.dtype)
        plain = settings.loss == "cross-entropy" and not settings.loss_args.get("weight")
        if plain and not bool((target == _IGNORED).any()):
            return None
        model = copy.deepcopy(components.model)

        def loss(begin: int, end: int) -> float:
            own_inputs, own_target = rows_of((inputs, target), count, begin, end)
            # It may count its calls, in itself or in a global.
            with unchanged_state({"loss": components.loss}), components.autocast():
                return float(copy.deepcopy(components.loss)(forward(model, own_inputs), own_target))

        ranges = [(i, min(i + _AT_A_TIME, count)) for i in range(0, count, _AT_A_TIME)]
        with evaluation_mode(model):
            return loss(0, count), sum(loss(a, b) * (b - a) for a, b in ranges) / count


def rows_of(batch: Any, count: int, begin: int, end: int) -> Any:
    """Some samples of a batch; raises ValueError where a part of it does not hold one row a sample."""

    def cut(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.dim() == 0 or len(leaf) != count:
            raise ValueError("not in rows")
        return leaf[begin:end].clone()

    return pytree.tree_map(cut, batch)
