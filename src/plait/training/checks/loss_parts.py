"""Checks that the loss of a batch is the mean of the losses of its parts, as microbatches assume."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence

import torch

from plait.data import loader
from plait.data.call_model import evaluation_mode, forward
from plait.schema.settings import TrainSettings
from plait.training.components import Components
from plait.verification import same_random_numbers
from plait.verification.loss_parts import describe_difference, rows_of, whole_and_in_parts
from plait.verification.python_state import unchanged_state

# Samples that are tried, and how often: first the first samples, then others from the whole set, since the
# first ones may be all of one class.
_SAMPLES, _SETS = 16, 3
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
    precision = getattr(torch, settings.precision, torch.bfloat16)
    try:
        tried = [
            _whole_and_in_parts(settings, components, numbers) for numbers in _sample_sets(components, count)
        ]
    except Exception:  # whatever is wrong with these samples, the first step's error says it better
        return ""
    words = (describe_difference(count, *pair, precision) for pair in tried if pair)
    return next(filter(None, words), "")


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

        with evaluation_mode(model):
            return whole_and_in_parts(loss, count)
