"""Pipelines side by side with a slow worker in one stage: how much of the ideal throughput each sync keeps.

Two stages of layers that sleep, in two and in four pipelines. The ideal is what the pipelines do in the same
world when they never agree. All syncs and cases run one after the other.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from plait.comm.collectives import all_gather_values
from plait.launcher.worker_process import Worker
from plait.pipeline.layout import PipelineLayout, one_batch
from plait.pipeline.microbatches import Microbatch, MicrobatchSource
from plait.planner.schedules.in_flight import Schedule
from plait.profiler.trace import trace
from plait.schema.plans.plan import Layout
from plait.schema.settings import DataSettings, ModelSettings, SlowSettings, SyncSettings, TrainSettings
from plait.training import components
from plait.training.engines.pipeline_replica import PipelineReplica
from plait.training.engines.pipeline_setup import open_pipeline, prepare_pipeline
from plait.training.engines.replica_layout import replica_layouts
from plait_bench.harness import Found, Row, in_world, of_repeats
from plait_bench.sleeping import Sleeping
from plait_bench.sync.speed import partial_reduce_claims

PIPELINES = (2, 4)
STAGES = 2
MICROBATCHES = 4
# How long each sync is measured in each case, this many times.
SECONDS = 2.0
REPEATS = 3
# Of each layer: forward, and as long again for each half of backward.
SLEEP_S = 0.01
ALONE = "alone"
SYNCS = (ALONE, "all-reduce", "partial-reduce", "ad-psgd", "pair-averaging")
# The slow worker holds the last stage of the first pipeline.
CASES = {"homogeneous": 1.0, "one worker x4": 4.0}


def sleeping_layers() -> nn.Module:
    """A layer that sleeps for each stage."""
    return nn.Sequential(*(Sleeping(None, SLEEP_S, SLEEP_S, SLEEP_S) for _ in range(STAGES)))


def run() -> Found:
    """One row for each number of pipelines, case and sync; what all-reduce keeps is in the rows alone."""
    rows: list[Row] = [row for count in PIPELINES for row in in_world(count * STAGES, measure_all, {})[0]]
    words = "partial reduce's fraction of what pipelines do that never agree"
    return rows, partial_reduce_claims(rows, lambda row: f"{row['case']}: {words}")


def measure_all(worker: Worker) -> list[Row]:
    """Be one of the workers that measure every sync in every case."""
    rows: list[Row] = []
    for case, repeat in itertools.product(CASES, range(REPEATS)):
        ideal = 0.0
        for sync in SYNCS:
            rate = _measure(worker, case, sync, repeat)
            ideal = rate if sync == ALONE else ideal
            rows.append(_row(worker.world_size // STAGES, case, sync, rate, ideal))
    return of_repeats(rows, ("case", "sync"), ("batches_per_s", "fraction_of_ideal"))


def _row(pipelines: int, case: str, sync: str, rate: float, ideal: float) -> Row:
    return {
        "case": f"{pipelines} x {STAGES}, {case}",
        "pipelines": pipelines,
        "sync": sync,
        "batches_per_s": rate,
        "fraction_of_ideal": rate / ideal if ideal else None,
    }


def _measure(worker: Worker, case: str, sync: str, repeat: int) -> float:
    """Batches a second of all pipelines together."""
    count = worker.world_size // STAGES
    kind = "partial-reduce" if sync == ALONE else sync
    settings = TrainSettings(
        "pipelines",
        ModelSettings(f"{__name__}:sleeping_layers"),
        DataSettings("synthetic", MICROBATCHES * count, {"shape": [4], "target_shape": [4], "samples": 64}),
        loss="mse",
        steps=1,
        device="cpu",
        sync=SyncSettings(kind),
        slow=SlowSettings({count: CASES[case]}),
    )
    pipeline_layout = _pipeline_layout(count)
    torch.manual_seed(0)
    if sync == "all-reduce":
        own = _together(worker, settings, pipeline_layout)
    else:
        prefix = f"bench/{case}/{sync}/{repeat}"
        own = _side_by_side(worker, settings, pipeline_layout, prefix, sync == ALONE)
    return float(sum(all_gather_values(own)[:count]))


def _pipeline_layout(count: int) -> PipelineLayout:
    """Workers 0, 1, ... hold the first stage of each pipeline, the next ones the second."""
    ids = [layer.id for layer in trace(sleeping_layers(), (torch.zeros(2, 4),)).layers]
    cuts = [len(ids) * s // STAGES for s in range(STAGES + 1)]
    layouts = [Layout(tuple((s * count + i,) for s in range(STAGES))) for i in range(count)]
    stages = tuple(tuple(ids[a:b]) for a, b in itertools.pairwise(cuts))
    return PipelineLayout(stages, tuple(layouts), Schedule.FLUSH, MICROBATCHES * count)


def _together(worker: Worker, settings: TrainSettings, pipeline_layout: PipelineLayout) -> float:
    """Batches a second of this worker's pipeline, where all sum gradients after each."""
    parts = components.build(settings, torch.device("cpu"))
    hosts = [worker.host] * worker.world_size
    found, pipeline_layout = prepare_pipeline(settings, parts, pipeline_layout, verify=False)
    channels, pipeline = open_pipeline(worker, settings, parts, found.traced, pipeline_layout, hosts)

    def update() -> None:
        microbatches = [Microbatch(0, i, 0, [0]) for i in range(pipeline_layout.microbatches)]
        work = MicrobatchSource(
            pipeline_layout, worker.rank, microbatches, seed=0, fetch=lambda local: _contents()
        )
        pipeline.run(one_batch(pipeline_layout, worker.rank, MICROBATCHES), work)

    update()
    dist.barrier()
    # All take as many; how many is known before, from the sleeps of the slowest.
    batch_s = max(settings.slow.factors.values()) * 3 * SLEEP_S * (MICROBATCHES + 1)
    updates = max(3, round(SECONDS / batch_s))
    started = time.monotonic()
    for _ in range(updates):
        update()
    rate = updates / (time.monotonic() - started)
    dist.barrier()
    pipeline.close()
    channels.close()
    return rate


def _side_by_side(
    worker: Worker,
    settings: TrainSettings,
    pipeline_layout: PipelineLayout,
    prefix: str,
    alone: bool,
) -> float:
    """Batches a second of this worker's pipeline at its own pace; `alone` it never averages."""
    parts = components.build(settings, torch.device("cpu"))
    hosts = [worker.host] * worker.world_size
    found, pipeline_layout = prepare_pipeline(settings, parts, pipeline_layout, verify=False)
    replicas = replica_layouts(pipeline_layout)
    own = next(each for each in replicas if worker.rank in each.workers)
    channels, pipeline = open_pipeline(worker, settings, parts, found.traced, own, hosts)
    parts = replace(parts, optimizer=pipeline.optimizer)
    replica = PipelineReplica(worker, settings, parts, replicas, pipeline, channels, prefix)
    if alone:
        replica.averaging.after_update = lambda: None  # type: ignore[method-assign]
    dist.barrier()
    rate = _rate(replica)
    replica.averaging.synchronize()
    dist.barrier()
    replica.averaging.close()
    channels.close()
    return rate


def _rate(replica: PipelineReplica) -> float:
    """Batches for `SECONDS`, after a first that is not counted; how many a second, on the first worker."""
    _update(replica)
    started, updates = time.monotonic(), 0
    while replica.lockstep.from_first(lambda: time.monotonic() - started < SECONDS):
        _update(replica)
        updates += 1
    return updates / (time.monotonic() - started) if replica.lockstep.is_first else 0.0


def _update(replica: PipelineReplica) -> None:
    replica.update([Microbatch(0, i, 0, [0]) for i in range(MICROBATCHES)], lambda local: _contents())


def _contents() -> Iterator[Any]:
    return iter([(torch.randn(1, 4), torch.randn(1, 4)) for _ in range(MICROBATCHES)])
