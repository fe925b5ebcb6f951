"""Evaluates the first test batches before step 1, so that a broken metric or test file shows early."""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from plait.core.errors import JobError
from plait.data.call_model import evaluation_mode
from plait.data.loader_processes import load_aside
from plait.schema.settings import TrainSettings
from plait.training.checks.collectives import CollectiveError
from plait.training.components import Components
from plait.training.evaluate import Totals, evaluation_batches, is_by_all, output_of, results
from plait.training.worker_group import ALONE
from plait.verification import unchanged_random_numbers
from plait.verification.loss_parts import rows_of
from plait.verification.python_state import PythonState, changed, unchanged_state

# How long a test batch may take to be read in another process.
LONGEST_S = 60.0
# How many samples of a batch are also given to a metric one by one.
_SINGLY = 16
T = TypeVar("T")
# A test batch, how many samples it has, and whether all workers evaluate at the same time.
Share = tuple[Any, int, bool]
log = logging.getLogger(__name__)


def try_evaluation(components: Components, settings: TrainSettings, rank: int, world_size: int) -> str:
    """Evaluate this worker's share of the first `evaluate.sanity_batches` test batches; its error is raised.

    What to say of a metric that is no sum over samples is returned, else nothing. Nothing is left of it:
    batches whose reading could change something are read by another process, metrics are copies, and random
    numbers and the buffers and attributes of the model, and of a loss or metric that is a module, are
    restored.
    """
    wanted = settings.evaluate.sanity_batches
    if wanted == 0 or components.test_set is None:
        return ""
    try:
        batches = _read(components, settings, wanted, rank, world_size)
        # A model on the meta device is only evaluated in stages.
        if batches and components.is_whole:
            held = {
                "model": components.model,
                "loss": components.loss,
                **{f"metric {metric.name}": metric.call for metric in components.metrics},
            }
            with unchanged_random_numbers(), unchanged_state(held):
                return _evaluate(components, batches)
        return ""
    except Exception as failure:
        failure.add_note(
            f"This was the evaluation of {wanted} test batches before the first step; "
            f"evaluate.sanity_batches: 0 leaves it out."
        )
        raise


def _read(
    components: Components, settings: TrainSettings, wanted: int, rank: int, world_size: int
) -> list[Share]:
    """This worker's share of the first test batches."""
    assert components.test_set is not None
    alone = replace(settings, data=replace(settings.data, loaders=0))
    size = settings.evaluate.batch_size or settings.data.batch_size

    def is_by_all_of(samples: int) -> bool:
        # In stages, the last one evaluates.
        return not settings.in_stages and is_by_all(samples, world_size)

    def shares() -> Iterator[Share]:
        for batch in itertools.islice(evaluation_batches(components, alone, size, rank, world_size), wanted):
            if batch.count:
                yield batch.content, batch.count, is_by_all_of(batch.total)
        source = components.test_set
        assert source is not None
        is_known = all(metric.is_named for metric in components.metrics)
        if is_known or source.is_stream or wanted >= len(source):
            return
        # For a custom metric also samples from the whole split, since the first ones may be alike.
        spread = [i * len(source) // size for i in range(min(size, len(source)))]
        yield source.batch(0, spread, settings.seed), len(spread), is_by_all_of(world_size)

    batches = None if components.test_set.has_no_effects else load_aside(shares(), LONGEST_S)
    if batches is None and components.test_set.is_stream:
        # If it were read here, later evaluations might find no samples.
        log.info("the test split is a stream that cannot be read in another process; it is not tried")
        return []
    if batches is None:
        with unchanged_random_numbers():
            batches = list(shares())
    return batches


def _evaluate(components: Components, batches: list[Share]) -> str:
    message = ""
    together = Totals(components)
    with torch.no_grad(), evaluation_mode(components.model):
        for number, (content, count, by_all) in enumerate(batches):
            output, target = output_of(components, content)
            copied = _own(components)
            summed = [metric for metric in copied.metrics if metric.name not in together.over_all]
            state = PythonState({metric.name: metric.call for metric in summed})
            before = state.tokens()
            together.add(copied, output, target, count, (number, 0), by_all)
            summed = [metric for metric in summed if metric.name not in together.over_all]
            names = [shown for _, shown in changed(before, state.tokens())]
            if summed and names and not message:
                message = (
                    f"evaluate.metric: {summed[0].name} changes {names[0]} when it is called, but each "
                    f"worker calls it only for its local batches, and a resumed run starts over; return "
                    f"(sum, count) of each batch, and let `finish` compute what is reported from the quotient"
                )
            for metric in summed:
                if not message and not metric.is_named:  # those of Plait are sums over samples
                    message = _describe_metric(components, metric.name, output, target, count)
    # What is computed over all samples is computed once, here over those that were tried.
    results(ALONE, [_own(components)], [together])
    return message


def _own(components: Components) -> Components:
    """The components with copies of loss and metrics, so that their state is not changed."""
    metrics = tuple(replace(metric, call=_copied(metric.call)) for metric in components.metrics)
    return replace(components, loss=_copied(components.loss), metrics=metrics)


def _describe_metric(components: Components, name: str, output: Any, target: Any, count: int) -> str:
    """A warning if the metric of a batch is not the sum over its parts; else empty.

    Two numbers of which, besides, the second is no whole number are refused.
    """
    if count < 2:
        return ""

    def sums(*ends: int) -> Tensor:
        """The sums over the parts with these ends."""
        copied = _own(components)
        totals = Totals(replace(copied, metrics=tuple(m for m in copied.metrics if m.name == name)))
        for begin, end in itertools.pairwise((0, *ends)):
            own = _own(components)
            own = replace(own, metrics=tuple(m for m in own.metrics if m.name == name))
            own_output, own_target = rows_of((output, target), count, begin, end)
            totals.add(own, own_output, own_target, end - begin)
        return totals.sums[2:]

    few = min(count, _SINGLY)
    try:
        tried = [
            (count, sums(count), sums(count // 2, count)),
            (few, sums(few), sums(*range(1, few + 1))),
        ]
    except CollectiveError:  # it is called by all workers, but not for parts of their batches
        return ""
    except JobError:
        raise
    except Exception:  # not in rows; or it takes whole batches only, which an evaluation gives it
        return ""
    for samples, whole, together in tried:
        if not torch.allclose(together, whole, rtol=1e-3, equal_nan=True):
            if not all(float(pair[1]).is_integer() for pair in (whole, together)):
                shown = ", ".join(f"{float(number):.4g}" for number in whole)
                raise JobError(
                    f"evaluate.metric: {name} returned ({shown}) for {samples} test samples, expected (sum, "
                    f"count), but the second number counts nothing; two metrics are two functions that "
                    f"return one number each: metrics=[precision, recall], or in a job file "
                    f"evaluate.metrics: [mine:precision, mine:recall]"
                )
            value, mean = (float(pair[0] / pair[1]) for pair in (whole, together))
            return (
                f"evaluate.metric: {name} of {samples} test samples is {value:.6g}, but "
                f"{mean:.6g} by the sums and counts of their parts, so it depends on how samples are cut "
                f"into batches and over workers; return (sum, count) over samples, or one number, and it is "
                f"given all samples (two metrics are two functions)"
            )
    return ""


def _copied(function: T) -> T:
    """A copy with separate state; modules, and objects that cannot be copied, are returned unchanged."""
    if not isinstance(function, torch.nn.Module):
        with contextlib.suppress(Exception):
            return copy.deepcopy(function)
    return function
