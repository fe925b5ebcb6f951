"""Evaluation over all workers: sums of loss and metric over every sample of a split, each counted once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plait.core.errors import JobError
from plait.core.names import did_you_mean, resolve
from plait.runtime.loading import Batch, load, to_device
from plait.runtime.sampling import GlobalBatch, Position
from plait.workloads.metrics import accuracy

Metric = Callable[[Tensor, Tensor], tuple[Any, int]]


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


def evaluate(
    model: torch.nn.Module,
    loss: Callable[[Any, Any], Tensor],
    metric: tuple[str, Metric] | None,
    dataset: Any,
    *,
    batch_size: int,
    rank: int,
    world_size: int,
    device: torch.device,
    dtype: torch.dtype | None,
    autocast: Callable[[], AbstractContextManager[Any]],
) -> dict[str, float]:
    """Mean loss and metric over `dataset`; all ranks call it together and get the same numbers."""
    was_training = model.training
    model.eval()
    sums = torch.zeros(4, dtype=torch.float64)
    with torch.no_grad():
        batches = load(
            dataset, in_order(len(dataset), batch_size), seed=0, rank=rank, world_size=world_size, loaders=0
        )
        for batch in batches:
            if batch.count:
                sums += _measure(model, loss, metric, batch, device, dtype, autocast)
    model.train(was_training)
    if world_size > 1:
        carried = sums.to(device)
        dist.all_reduce(carried)
        sums = carried.cpu()
    results = {"loss": (sums[0] / sums[1]).item()}
    if metric is not None:
        results[metric[0]] = (sums[2] / sums[3]).item()
    return results


def _measure(
    model: torch.nn.Module,
    loss: Callable[[Any, Any], Tensor],
    metric: tuple[str, Metric] | None,
    batch: Batch,
    device: torch.device,
    dtype: torch.dtype | None,
    autocast: Callable[[], AbstractContextManager[Any]],
) -> Tensor:
    inputs, target = to_device(batch.content, device, dtype)
    with autocast():
        output = forward(model, inputs)
        mean = loss(output, target)
    good, total = metric[1](output, target) if metric is not None else (0.0, 1)
    numbers = [float(mean) * batch.count, float(batch.count), float(good), float(total)]
    return torch.tensor(numbers, dtype=torch.float64)


def forward(model: torch.nn.Module, inputs: Any) -> Any:
    """The model's output; several inputs come as a tuple or list, named ones as a dict."""
    if isinstance(inputs, (tuple, list)):
        return model(*inputs)
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(inputs)


def in_order(samples: int, batch_size: int) -> Iterator[GlobalBatch]:
    """Every sample once, in order."""
    for begin in range(0, samples, batch_size):
        end = min(begin + batch_size, samples)
        yield GlobalBatch(0, tuple(range(begin, end)), Position(0, end))
