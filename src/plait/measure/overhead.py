"""What a pipeline costs a worker besides its layers (messages, seeds, versions), measured by running one."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from plait.comm.channels import connect
from plait.comm.rendezvous import Rendezvous
from plait.pipeline.executor import PipelineExecutor
from plait.pipeline.layout import PipelineLayout, stream
from plait.pipeline.microbatches import Microbatch, MicrobatchSource
from plait.pipeline.pipeline_parts import PipelineParts
from plait.planner.schedules.in_flight import Schedule
from plait.profiler.trace import trace
from plait.schema.plans.plan import Layout

MICROBATCHES, WARM_UP, WIDTH = 80, 20, 8
DEADLINE_S = 120.0


def measure_overhead(rendezvous: Rendezvous) -> float:
    """Seconds of a worker's time that each microbatch takes besides the layers of its stage.

    All ranks of the world call it together, at least two; the first two run a pipeline of two small layers
    and count the processor's seconds, since they mostly wait for each other. All get the same answer.
    """
    seconds = torch.zeros((), dtype=torch.float64)
    pipeline_layout, work, traced = _small_pipeline()
    rank = rendezvous.rank
    peers = pipeline_layout.workers if rank in pipeline_layout.workers else ()
    channels = connect(rendezvous, peers, deadline_s=DEADLINE_S)
    if peers:
        options = PipelineParts(
            F.mse_loss, _optimizer, torch.device("cpu"), contextlib.nullcontext, rendezvous
        )
        pipeline = PipelineExecutor(rank, pipeline_layout, traced, channels, options)

        def run(count: int) -> None:
            source = work(rank, count)
            pipeline.run(stream(pipeline_layout, rank, source), source)
            pipeline.losses.clear()
            pipeline.timings.clear()

        seconds += max(0.0, _busy_s(run) - _busy_s(_layer_alone()))
        pipeline.close()
    dist.all_reduce(seconds)
    channels.close()
    return float(seconds) / len(pipeline_layout.workers)


def _busy_s(run: Callable[[int], None]) -> float:
    """The processor's seconds for each microbatch, once all is warm."""
    run(WARM_UP)
    started = time.process_time()
    run(MICROBATCHES)
    return (time.process_time() - started) / MICROBATCHES


def _small_pipeline() -> tuple[PipelineLayout, Callable[[int, int], MicrobatchSource], Any]:
    x, y = torch.zeros(4, WIDTH), torch.zeros(4, WIDTH)
    traced = trace(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), (x,))
    stages = tuple((layer.id,) for layer in traced.layers)
    pipeline_layout = PipelineLayout(stages, (Layout(((0,), (1,))),), Schedule.STASH, 8)

    def fetch(microbatches: list[Microbatch]) -> Iterator[Any]:
        return (((x,), y) for _ in microbatches)

    def work(rank: int, count: int) -> MicrobatchSource:
        return MicrobatchSource(
            pipeline_layout,
            rank,
            [Microbatch(i // 8, i % 8, 0, range(4)) for i in range(count)],
            seed=0,
            fetch=fetch,
            set_lr=lambda step, place: None,
            stop_before=lambda step: False,
        )

    return pipeline_layout, work, traced


def _layer_alone() -> Callable[[int], None]:
    """One of the layers trained without a pipeline."""
    layer = nn.Linear(WIDTH, WIDTH)
    optimizer = _optimizer(list(layer.parameters()))
    x, grad = torch.zeros(4, WIDTH, requires_grad=True), torch.zeros(4, WIDTH)

    def run(count: int) -> None:
        for _ in range(count):
            layer(x).backward(grad)
            optimizer.step()
            optimizer.zero_grad()

    return run


def _optimizer(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)
