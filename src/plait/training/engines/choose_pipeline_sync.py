"""`sync: auto` for pipelines side by side: measure a few updates of every pipeline and choose the sync."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import torch

from plait.comm.collectives import all_gather_values
from plait.core.run_events import SyncChosen
from plait.data.loader import Batch
from plait.launcher.worker_process import Worker
from plait.pipeline.executor import PipelineExecutor
from plait.pipeline.gradient_sync import check_untied
from plait.pipeline.layout import PipelineLayout, one_batch
from plait.pipeline.microbatches import Microbatch, MicrobatchSource
from plait.schema.settings import TrainSettings
from plait.training.batch_streams import open_stream
from plait.training.components import Components
from plait.training.engines.choose_sync import choose, measure
from plait.training.engines.pipeline_setup import open_pipeline, prepare_pipeline
from plait.training.engines.replica_layout import in_order
from plait.training.stages.replica_stages import in_microbatches
from plait.training.trial import Trial


def choose_sync_of_pipelines(
    worker: Worker,
    settings: TrainSettings,
    components: Components,
    groups: Sequence[Sequence[PipelineLayout]],
) -> SyncChosen:
    """Choose the sync from measured updates of each pipeline by itself; all workers call it together.

    The pipelines of each of `groups` train together. They update `components`, which the caller drops.
    """
    replicas = next(each for each in groups if any(worker.rank in replica.workers for replica in each))
    number = next(i for i, each in enumerate(replicas) if worker.rank in each.workers)
    verified, layout = prepare_pipeline(settings, components, replicas[number], verify=False)
    check_untied(verified.traced, layout)
    channels, pipeline = open_pipeline(worker, settings, components, verified.traced, layout, worker.hosts)
    batch = open_stream(components.train_set, Trial(settings), (number, len(replicas))).next()
    assert batch is not None
    usual = math.ceil(settings.data.batch_size / len(replicas))
    step_s = measure(lambda: time_update(pipeline, batch, usual, settings.seed, components))
    pipeline.close()
    channels.close()
    # A pipeline's first worker is the last to end a batch.
    times = all_gather_values(step_s)
    return choose([[times[in_order(each)[0]] for each in group] for group in groups], "pipelines")


def time_update(
    pipeline: PipelineExecutor, batch: Batch, usual: int, seed: int, components: Components
) -> float:
    """Seconds until this worker has done its part of an update; the pipeline's workers call it together.

    A batch of the pipeline usually has `usual` samples.
    """
    started = time.perf_counter()
    layout, rank = pipeline.pipeline_layout, pipeline.rank
    cut, contents = in_microbatches(batch, usual, layout.microbatches, components)
    microbatches = [Microbatch(0, i, 0, range(count)) for i, count in enumerate(cut)]
    work = MicrobatchSource(layout, rank, microbatches, seed=seed, fetch=lambda local: contents)
    pipeline.run(one_batch(layout, rank, len(cut)), work)
    pipeline.losses.clear()
    if components.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started
