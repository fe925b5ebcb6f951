"""`sync: auto`: measure a few steps of every worker and choose the sync."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch

from plait.comm.collectives import all_gather_values
from plait.core.run_events import SyncChosen
from plait.data import loader
from plait.data.sampler import GlobalBatch, Position, epoch_order
from plait.launch.worker_process import Worker
from plait.schema.settings import TrainSettings
from plait.training.components import Components
from plait.training.engines.train_step import TrainStep

STEPS = 10
# All-reduce is exact; another sync is used only if it is this much faster.
WORTH = 1.15


def choose(step_s: Sequence[Sequence[float]]) -> SyncChosen:
    """The sync for workers whose steps took `step_s[worker][step]` seconds.

    Under all-reduce a step takes as long as its slowest worker; without it, the throughputs of workers add
    up.
    """
    together_s = statistics.fmean(max(times) for times in zip(*step_s))
    separate_s = len(step_s) / sum(1 / statistics.fmean(times) for times in step_s)
    gain = together_s / separate_s
    sync = "partial-reduce" if gain > WORTH else "all-reduce"
    return SyncChosen(
        sync,
        f"a step takes {together_s * 1e3:.3g} ms together and {separate_s * 1e3:.3g} ms a batch if "
        f"workers do not wait for each other: {gain:.2f} times as fast, and {WORTH:g} is worth it",
    )


def choose_sync(worker: Worker, settings: TrainSettings, components: Components) -> SyncChosen:
    """Choose the sync from measured steps whose gradients are dropped; all workers call it together."""
    step = TrainStep(components, settings, rank=worker.rank)
    saved = [buffer.clone() for buffer in components.model.buffers()]
    batch = _first_share(worker, settings, components)
    # The first step warms up.
    step_s = [step.time_backward(batch) for _ in range(STEPS + 1)][1:]
    with torch.no_grad():
        for buffer, before in zip(components.model.buffers(), saved):
            buffer.copy_(before)
    return choose(all_gather_values(step_s))


def _first_share(worker: Worker, settings: TrainSettings, components: Components) -> loader.Batch:
    """This worker's share of the first batch."""
    data = settings.data
    order = epoch_order(settings.seed, 0, len(components.train_set), data.shuffle)
    batches = loader.load(
        components.train_set,
        iter([GlobalBatch(0, tuple(order[: data.batch_size]), Position())]),
        seed=settings.seed,
        rank=worker.rank,
        world_size=worker.world_size,
        loaders=0,
    )
    return next(batches)
