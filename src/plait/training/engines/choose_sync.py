"""`sync: auto`: measure a few steps of every worker and choose the sync."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

from plait.comm.collectives import all_gather_values
from plait.core.run_events import SyncChosen
from plait.schema.settings import TrainSettings
from plait.training.batch_streams import open_stream
from plait.training.components import Components
from plait.training.engines.train_step import TrainStep
from plait.training.trial import Trial

STEPS = 10
# All-reduce is exact; another sync is used only if it is this much faster.
WORTH = 1.15


def choose(step_s: Sequence[Sequence[Sequence[float]]], members: str = "workers") -> SyncChosen:
    """The sync for groups of workers, or of other members, whose steps took `step_s[group][member][step]` s.

    Under all-reduce a step takes as long as the slowest member of the group; without it, the throughputs of
    members add up, as those of groups always do.
    """
    count = sum(map(len, step_s))
    together_s = count / sum(
        len(group) / statistics.fmean(max(times) for times in zip(*group)) for group in step_s
    )
    separate_s = count / sum(1 / statistics.fmean(times) for group in step_s for times in group)
    gain = together_s / separate_s
    sync = "partial-reduce" if gain > WORTH else "all-reduce"
    return SyncChosen(
        sync,
        f"a step takes {together_s * 1e3:.3g} ms together and {separate_s * 1e3:.3g} ms a batch if "
        f"{members} do not wait for each other: {gain:.2f} times as fast, and {WORTH:g} is worth it",
    )


def measure(time_step: Callable[[], float]) -> list[float]:
    """The seconds of some steps, of each as `time_step` takes and times it."""
    # The first step warms up.
    return [time_step() for _ in range(STEPS + 1)][1:]


def choose_sync(settings: TrainSettings, components: Components, share: tuple[int, int]) -> SyncChosen:
    """Choose the sync from measured steps whose gradients are dropped; all workers call it together.

    `share` is the index of this worker's share of a batch, and the number of shares; as many workers in turn
    are a group.
    """
    step = TrainStep(components, settings, rank=share[0])
    saved = [buffer.clone() for buffer in components.model.buffers()]
    batch = open_stream(components.train_set, Trial(settings), share).next()
    assert batch is not None
    step_s = measure(lambda: step.time_backward(batch))
    with torch.no_grad():
        for buffer, before in zip(components.model.buffers(), saved):
            buffer.copy_(before)
    times, size = all_gather_values(step_s), share[1]
    return choose([times[first : first + size] for first in range(0, len(times), size)])
