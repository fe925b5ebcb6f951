"""Evaluation over all workers: loss and metrics over every sample of a split, each counted once."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from plait.core.errors import JobError
from plait.core.shown import shown
from plait.data.call_model import evaluated_weights, evaluation_mode, forward
from plait.data.loader import Batch, DataSource, load, to_device
from plait.data.sampler import GlobalBatch, Position
from plait.data.streams import StreamOrder, stream_batches
from plait.data.trees import put_together, take_apart
from plait.schema.settings import TrainSettings
from plait.training.checks.collectives import RefusedCollectives
from plait.training.worker_group import ALONE, WorkerGroup
from plait.workloads.losses import Loss
from plait.workloads.metrics import NamedMetric


class EvaluatedComponents(Protocol):
    """What an evaluation uses of a trial's components."""

    @property
    def model(self) -> torch.nn.Module: ...
    @property
    def optimizer(self) -> torch.optim.Optimizer: ...
    @property
    def loss(self) -> Loss: ...
    @property
    def metrics(self) -> Sequence[NamedMetric]: ...
    @property
    def test_set(self) -> DataSource | None: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype | None: ...
    @property
    def autocast(self) -> Callable[[], AbstractContextManager[Any]]: ...


def evaluate_parts(components: EvaluatedComponents, settings: TrainSettings) -> dict[str, float]:
    """Mean loss and metrics over the test split, by this worker alone."""
    return results(ALONE, [components], [totals_of_share(components, settings, 0, 1)])[0]


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


class Totals:
    """What this worker has of a trial's evaluation.

    `sums` are the loss times samples, the samples, and the sum and the count of each metric. Batches are
    `kept`, each with its place in the order of samples, for metrics that are `over_all` of them.
    """

    def __init__(self, components: EvaluatedComponents) -> None:
        metrics = components.metrics
        self.sums = torch.zeros(2 + 2 * len(metrics), dtype=torch.float64)
        self.over_all = {metric.name for metric in metrics if metric.is_updated}
        self.kept: list[tuple[tuple[int, int], Any]] = []

    def add(
        self,
        components: EvaluatedComponents,
        output: Any,
        target: Any,
        count: int,
        order: tuple[int, int] = (0, 0),
        by_all: bool = False,
    ) -> None:
        """Add a batch of `count` samples, which is at `order` among all.

        `by_all` says whether all workers compute metrics at the same time; only then may these use
        collectives.
        """
        with components.autocast():
            mean = components.loss(output, target)
        self.sums[:2] += torch.tensor([float(mean) * count, float(count)], dtype=torch.float64)
        for number, metric in enumerate(components.metrics):
            if metric.name in self.over_all:
                continue
            with _guarded(metric.name, by_all):
                pair = _sum_and_count(metric, output, target)
            if pair is None:
                self.over_all.add(metric.name)
            else:
                self.sums[2 + 2 * number : 4 + 2 * number] += torch.tensor(pair, dtype=torch.float64)
        if self.over_all:
            # Copied: what arrives from another worker is in memory that is used again.
            copied = pytree.tree_map_only(Tensor, lambda each: each.detach().clone().cpu(), (output, target))
            self.kept.append((order, copied))


def totals_of_share(
    components: EvaluatedComponents, settings: TrainSettings, rank: int, world_size: int
) -> Totals:
    """The totals over the share of `rank` in the test split."""
    totals = Totals(components)
    size = settings.evaluate.batch_size or settings.data.batch_size
    with torch.no_grad(), evaluated_weights(components.optimizer), evaluation_mode(components.model):
        for number, batch in enumerate(evaluation_batches(components, settings, size, rank, world_size)):
            if batch.count:
                output, target = output_of(components, batch.content)
                by_all = is_by_all(batch.total, world_size)
                totals.add(components, output, target, batch.count, (number, rank), by_all)
    return totals


def results(
    group: WorkerGroup, components: Sequence[EvaluatedComponents], totals: Sequence[Totals]
) -> list[dict[str, float]]:
    """Mean loss and metrics of some trials from the totals of a group's workers, which call it together."""
    sums = group.total(torch.stack([each.sums for each in totals]), components[0].device)
    over_all = _computed_over_all(group, components, totals)
    found = []
    for trial, row, values in zip(components, sums, over_all):
        measured = {"loss": (row[0] / row[1]).item()}
        for metric, pair in zip(trial.metrics, row[2:].view(-1, 2)):
            finish = getattr(metric.call, "finish", float)
            value = values.get(metric.name)
            measured[metric.name] = finish((pair[0] / pair[1]).item()) if value is None else value
        found.append(measured)
    return found


def _computed_over_all(
    group: WorkerGroup, components: Sequence[EvaluatedComponents], totals: Sequence[Totals]
) -> list[dict[str, float]]:
    """The metrics of each trial that need all samples at once, computed by the first worker of the group."""
    if all(metric.is_named for trial in components for metric in trial.metrics):
        return [{} for _ in totals]
    names = [set[str]().union(*each) for each in zip(*group.of_all([sorted(t.over_all) for t in totals]))]
    if not any(names):
        return [{} for _ in totals]
    batches = [each.kept for each in totals] if group.is_alone else _gathered(group, totals)

    def compute() -> list[dict[str, float]]:
        return [
            {
                metric.name: over_all(metric, [content for _, content in sorted(own, key=_order)])
                for metric in trial.metrics
                if metric.name in needed
            }
            for trial, needed, own in zip(components, names, batches)
        ]

    values: list[dict[str, float]] = group.from_first(compute)
    return values


def _order(batch: tuple[Sequence[int], Any]) -> list[int]:
    return list(batch[0])


def _gathered(group: WorkerGroup, totals: Sequence[Totals]) -> list[list[tuple[tuple[int, int], Any]]]:
    """The batches that all workers kept for each trial, on the first worker."""
    heads: list[list[Any]] = []
    tensors = dict[str, Tensor]()
    for trial, each in enumerate(totals):
        heads.append([])
        for number, (order, content) in enumerate(each.kept):
            own: list[Tensor] = []
            heads[-1].append((order, take_apart(content, own)))
            prefix = f"{group.place}/{trial}/{number}"
            tensors |= {f"{prefix}/{leaf}": tensor for leaf, tensor in enumerate(own)}
    every, received = group.of_all(heads), group.gather(tensors)
    batches: list[list[tuple[tuple[int, int], Any]]] = [[] for _ in totals]
    for place, trials in enumerate(every) if group.is_first else ():
        for trial, own_heads in enumerate(trials):
            for number, (order, head) in enumerate(own_heads):
                leaves = (received[f"{place}/{trial}/{number}/{leaf}"] for leaf in itertools.count())
                batches[trial].append((order, put_together(head, lambda *_, it=leaves: next(it))))
    return batches


def over_all(metric: NamedMetric, batches: Sequence[Any]) -> float:
    """The metric over all samples: of their outputs and targets, batch by batch or together."""
    if not batches:
        return math.nan
    with _guarded(metric.name, by_all=False):
        if metric.is_updated:
            value = _updated(metric.call, batches)
        else:
            value = metric.call(*_together(metric.name, batches))
    if isinstance(value, (tuple, list)) and len(value) == 2:
        # It failed for a part of the samples.
        return float(getattr(metric.call, "finish", float)(float(value[0]) / float(value[1])))
    if not _is_number(value):
        raise JobError(
            f"evaluate.metrics: {metric.name} is {shown(value)} over all samples, expected one number; name "
            f"the metrics of several one by one"
        )
    return float(value)


def _updated(metric: Any, batches: Sequence[Any]) -> Any:
    metric = copy.deepcopy(metric)
    if isinstance(metric, torch.nn.Module):
        metric = metric.to("cpu")
        for each in metric.modules():
            # Of torchmetrics: the samples of all workers are here.
            each.distributed_available_fn = lambda: False
    metric.reset()
    for output, target in batches:
        metric.update(output, target)
    return metric.compute()


def _together(name: str, batches: Sequence[Any]) -> Any:
    try:
        return joined(batches)
    except RuntimeError as failure:
        raise JobError(
            f"evaluate.metrics: {name} returned one number for a batch, so it is given all samples together, "
            f"but their outputs or targets have unlike shapes ({failure}); return (sum, count), or give an "
            f"object with update and compute"
        ) from None


def joined(parts: Sequence[Any]) -> Any:
    """Outputs, or targets, of several batches as those of one: tensors along their first axis."""
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat(list(parts)) if first.dim() else torch.stack(list(parts))
    if isinstance(first, Mapping):
        made = {key: joined([part[key] for part in parts]) for key in first}
        # What transformers returns has its values as attributes, too.
        return made if type(first) is dict else cast("Any", type(first))(made)
    if isinstance(first, tuple):
        return tuple(joined(each) for each in zip(*parts))
    return list(itertools.chain(*parts)) if isinstance(first, list) else first


def output_of(components: EvaluatedComponents, content: Any) -> tuple[Any, Any]:
    """The output of the model for a batch, and the target of the batch."""
    inputs, target = to_device(content, components.device, components.dtype)
    with components.autocast():
        return forward(components.model, inputs), target


def is_by_all(samples: int, workers: int) -> bool:
    """Whether every worker of the job has some of the `samples` that are shared out to `workers`."""
    return samples >= workers == (dist.get_world_size() if dist.is_initialized() else 1)


def _guarded(name: str, by_all: bool) -> AbstractContextManager[Any]:
    is_guarded = dist.is_initialized() and not by_all
    return RefusedCollectives(f"evaluate.metric: {name}") if is_guarded else contextlib.nullcontext()


def _sum_and_count(metric: NamedMetric, output: Any, target: Any) -> tuple[float, float] | None:
    """The sum and the count of a batch; None if the metric is one number, which is not that of its parts."""
    try:
        result: Any = metric.call(output, target)
    except ValueError:
        # Such as a score that is not defined for a batch of one class; over all samples it is raised again.
        return None
    if _is_number(result):
        return None
    try:
        # A tensor of two numbers may hold the values of two samples.
        good, total = result if isinstance(result, (tuple, list)) else ()
        return float(good), float(total)
    except (TypeError, ValueError, RuntimeError):
        raise JobError(
            f"evaluate.metric: {metric.name} returned {shown(result)} for a batch, expected (sum, count), "
            f"two numbers, which are summed over batches, or one number: such a metric is given all samples "
            f"together; of a tensor return its mean()"
        ) from None


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor) or hasattr(value, "__array_interface__"):
        return bool(value.ndim == 0)
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def in_order(samples: int, batch_size: int) -> Iterator[GlobalBatch]:
    """Every sample once, in order."""
    for begin in range(0, samples, batch_size):
        end = min(begin + batch_size, samples)
        yield GlobalBatch(0, tuple(range(begin, end)), Position(0, end))
