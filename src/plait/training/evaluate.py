"""Evaluation over all workers: sums of loss and metric over every sample of a split, each counted once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from plait.core.errors import JobError
from plait.core.shown import shown
from plait.data.call_model import evaluated_weights, evaluation_mode, forward
from plait.data.loader import Batch, DataSource, load, to_device
from plait.data.sampler import GlobalBatch, Position
from plait.data.streams import StreamOrder, stream_batches
from plait.schema.settings import TrainSettings
from plait.training.checks.collectives import RefusedCollectives
from plait.workloads.losses import Loss
from plait.workloads.metrics import Metric


class EvaluatedComponents(Protocol):
    """What an evaluation uses of a trial's components."""

    @property
    def model(self) -> torch.nn.Module: ...
    @property
    def optimizer(self) -> torch.optim.Optimizer: ...
    @property
    def loss(self) -> Loss: ...
    @property
    def metric(self) -> tuple[str, Metric] | None: ...
    @property
    def test_set(self) -> DataSource | None: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype | None: ...
    @property
    def autocast(self) -> Callable[[], AbstractContextManager[Any]]: ...


def evaluate_parts(components: EvaluatedComponents, settings: TrainSettings) -> dict[str, float]:
    """Mean loss and metric over the test split, by this worker alone."""
    return means(components, sums_over_share(components, settings, 0, 1))


def evaluation_batches(
    components: EvaluatedComponents, settings: TrainSettings, size: int, rank: int, world_size: int
) -> Iterator[Batch]:
    """The share of `rank` in each batch of `size` samples of the test split."""
    source, loaders, pin = components.test_set, settings.data.loaders, components.device.type == "cuda"
    assert source is not None
    if not source.is_stream:
        order = in_order(len(source), size)
        yield from load(
            source, order, seed=settings.seed, rank=rank, world_size=world_size, loaders=loaders, pin=pin
        )
        return
    once = StreamOrder(Position(), size, keep_last=True, epochs=1, seed=settings.seed)
    samples = 0
    for batch in stream_batches(source, once, rank, world_size, loaders, pin):
        samples += batch.total
        yield batch
    source.note_length(samples)


def sums_over_share(
    components: EvaluatedComponents, settings: TrainSettings, rank: int, world_size: int
) -> Tensor:
    """The sums (see `sums_of`) over the share of `rank` in the test split."""
    sums = torch.zeros(4, dtype=torch.float64)
    size = settings.evaluate.batch_size or settings.data.batch_size
    with torch.no_grad(), evaluated_weights(components.optimizer), evaluation_mode(components.model):
        for batch in evaluation_batches(components, settings, size, rank, world_size):
            if batch.count:
                output, target = output_of(components, batch.content)
                by_all = is_by_all(batch.total, world_size)
                sums += sums_of(components, output, target, batch.count, by_all)
    return sums


def means(components: EvaluatedComponents, sums: Tensor) -> dict[str, float]:
    """Mean loss and metric from sums over all samples."""
    results = {"loss": (sums[0] / sums[1]).item()}
    if components.metric is not None:
        name, metric = components.metric
        finish = getattr(metric, "finish", float)
        results[name] = finish((sums[2] / sums[3]).item())
    return results


def output_of(components: EvaluatedComponents, content: Any) -> tuple[Any, Any]:
    """The output of the model for a batch, and the target of the batch."""
    inputs, target = to_device(content, components.device, components.dtype)
    with components.autocast():
        return forward(components.model, inputs), target


def is_by_all(samples: int, workers: int) -> bool:
    """Whether every worker of the job has some of the `samples` that are shared out to `workers`."""
    return samples >= workers == (dist.get_world_size() if dist.is_initialized() else 1)


def sums_of(
    components: EvaluatedComponents, output: Any, target: Any, count: int, by_all: bool = False
) -> Tensor:
    """Loss times samples, samples, and the sum and the count of the metric.

    `by_all` says whether all workers compute the metric at the same time; only then may it use collectives.
    """
    with components.autocast():
        mean = components.loss(output, target)
    good, total = 0.0, 1.0
    if components.metric is not None:
        name, metric = components.metric
        is_guarded = dist.is_initialized() and not by_all
        with RefusedCollectives(f"evaluate.metric: {name}") if is_guarded else contextlib.nullcontext():
            good, total = _sum_and_count(name, metric, output, target)
    return torch.tensor([float(mean) * count, float(count), good, total], dtype=torch.float64)


def _sum_and_count(name: str, metric: Metric, output: Any, target: Any) -> tuple[float, float]:
    result: Any = metric(output, target)
    try:
        # A tensor of two numbers may hold the values of two samples.
        good, total = result if isinstance(result, (tuple, list)) else ()
        return float(good), float(total)
    except (TypeError, ValueError, RuntimeError):
        raise JobError(
            f"evaluate.metric: {name} returned {shown(result)} for a batch, expected (sum, count), two "
            f"numbers: batches may differ in size, and the sums of all are divided by their counts; of a "
            f"mean over samples return (mean * len(target), len(target))"
        ) from None


def in_order(samples: int, batch_size: int) -> Iterator[GlobalBatch]:
    """Every sample once, in order."""
    for begin in range(0, samples, batch_size):
        end = min(begin + batch_size, samples)
        yield GlobalBatch(0, tuple(range(begin, end)), Position(0, end))
