"""The sides of the pipeline experiment, as one worker runs them: ours, torch's own, and the plain ways.

Each is a function that takes a number of steps; all workers call it together.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from plait.comm.channels import connect
from plait.comm.rendezvous import Rendezvous
from plait.pipeline.executor import PipelineExecutor
from plait.pipeline.layout import PipelineLayout, one_batch, stream
from plait.pipeline.pipeline_parts import PipelineParts
from plait.planner.schedules.in_flight import Schedule
from plait.planner.schedules.operations import Update
from plait.profiler.trace import trace
from plait.profiler.traced_model import TracedModel
from plait.schema.plans.plan import Layout
from plait.workloads.transformer import Block

Steps = Callable[[int], None]
LR = 1e-4


@dataclass(frozen=True)
class Model:
    """Equal blocks in a row, and the shape of a batch."""

    block: Callable[[], nn.Module]
    blocks: int
    shape: tuple[int, ...]

    def build(self) -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(self.block() for _ in range(self.blocks)))

    def batch(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(self.shape, generator=generator)
        return x, torch.randn(self.shape, generator=generator)


MODELS = {
    "mlp": Model(lambda: nn.Sequential(nn.Linear(1024, 1024), nn.ReLU()), 16, (256, 1024)),
    "transformer": Model(lambda: Block(256, 8, 0.0), 8, (16, 128, 256)),
    # 4 MB of activations for each microbatch of 8, and as much of gradients back.
    "wide": Model(lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU()), 4, (131072, 64)),
}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LR)


@dataclass
class FixedWork:
    """The same microbatches in every step."""

    x: tuple[Tensor, ...]
    y: tuple[Tensor, ...]
    share: float
    total: int

    def content(self, microbatch: int) -> tuple[Any, Any]:
        place = microbatch % len(self.x)
        return (self.x[place],), self.y[place]

    def weight(self, microbatch: int) -> float:
        return self.share

    def samples(self, microbatch: int) -> tuple[int, ...]:
        return (len(self.x[microbatch % len(self.x)]),)

    def seed(self, microbatch: int, stage: int) -> int:
        return microbatch

    def set_rate(self, update: Update) -> None:
        pass

    def factor(self, update: Update) -> float:
        return 1.0

    def admits(self, pipeline: int, microbatch: int) -> bool:
        return microbatch < self.total


class OurPipeline:
    """A model in our pipeline, as one of its workers runs it."""

    def __init__(
        self,
        layout: PipelineLayout,
        traced: TracedModel,
        parts: PipelineParts,
        window: int = 64,
    ) -> None:
        rendezvous, self._layout = parts.rendezvous, layout
        self.channels = connect(rendezvous, layout.workers, window=window, device=parts.device)
        self.pipeline = PipelineExecutor(rendezvous.rank, layout, traced, self.channels, parts)

    def take(self, xs: Sequence[Tensor], ys: Sequence[Tensor], each: int, total: int) -> None:
        """`total` microbatches in batches of `each`; asynchronous schedules do not drain in between."""
        schedule, rank = self._layout.schedule, self.pipeline.rank
        share = 1.0 if schedule is Schedule.STASH else 1 / each
        for count in [each] * (total // each) if schedule.synchronous else [total]:
            work = FixedWork(tuple(xs), tuple(ys), share, count)
            if schedule.synchronous:
                self.pipeline.run(one_batch(self._layout, rank, count), work)
            else:
                self.pipeline.run(stream(self._layout, rank, work), work)
        self.pipeline.losses.clear()

    def close(self) -> None:
        self.pipeline.close()
        self.channels.close()


def ours(
    rendezvous: Rendezvous,
    model: nn.Sequential,
    batch: tuple[Tensor, Tensor],
    schedule: Schedule,
    stages: int,
    pieces: int,
) -> tuple[Steps, OurPipeline]:
    """`model` in our pipeline over all workers; interleaved deals the stages to them in turn."""
    size = len(rendezvous.hosts)
    x, y = batch
    traced = trace(model, (x[:2],))
    ids = [layer.id for layer in traced.layers]
    places = [len(ids) * i // stages for i in range(stages + 1)]
    layout = PipelineLayout(
        tuple(tuple(ids[a:b]) for a, b in itertools.pairwise(places)),
        (Layout(tuple((stage % size,) for stage in range(stages))),),
        schedule,
        pieces,
    )
    parts = PipelineParts(F.mse_loss, sgd, torch.device("cpu"), contextlib.nullcontext, rendezvous)
    made = OurPipeline(layout, traced, parts)
    xs, ys = x.chunk(pieces), y.chunk(pieces)
    return lambda count: made.take(xs, ys, pieces, count * pieces), made


def theirs(
    rank: int,
    model: nn.Sequential,
    batch: tuple[Tensor, Tensor],
    schedule: Schedule,
    stages: int,
    pieces: int,
) -> Steps:
    """The same in torch.distributed.pipelining."""
    from torch.distributed.pipelining import (
        PipelineStage,
        Schedule1F1B,
        ScheduleGPipe,
        ScheduleInterleaved1F1B,
        ScheduleZBVZeroBubble,
    )

    size = dist.get_world_size()
    each = len(model) // stages
    if schedule is Schedule.ZERO_BUBBLE:
        own = [rank, stages - 1 - rank]
    else:
        own = list(range(rank, stages, size))
    device = torch.device("cpu")
    parts = {s: nn.Sequential(*list(model)[s * each : (s + 1) * each]) for s in own}
    made: list[Any] = [PipelineStage(part, s, stages, device) for s, part in parts.items()]
    optimizer = sgd([p for part in parts.values() for p in part.parameters()])
    kinds: dict[Schedule, Any] = {
        Schedule.GPIPE: ScheduleGPipe,
        Schedule.FLUSH: Schedule1F1B,
        Schedule.INTERLEAVED: ScheduleInterleaved1F1B,
        Schedule.ZERO_BUBBLE: ScheduleZBVZeroBubble,
    }
    whole = made if schedule in (Schedule.INTERLEAVED, Schedule.ZERO_BUBBLE) else made[0]
    runner = kinds[schedule](whole, pieces, loss_fn=F.mse_loss)
    x, y = batch
    arguments: tuple[Tensor, ...] = (x,) if 0 in own else ()
    target: dict[str, Any] = {"target": y, "losses": []} if stages - 1 in own else {}

    def steps(count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            runner.step(*arguments, **target)
            optimizer.step()

    return steps


def alone(rank: int, model: nn.Sequential, batch: tuple[Tensor, Tensor], pieces: int) -> Steps:
    """One worker, microbatched; the others wait."""
    optimizer = sgd(model.parameters())
    xs, ys = batch[0].chunk(pieces), batch[1].chunk(pieces)

    def steps(count: int) -> None:
        for _ in range(count if rank == 0 else 0):
            optimizer.zero_grad()
            for x, y in zip(xs, ys):
                (F.mse_loss(model(x), y) / pieces).backward()
            optimizer.step()

    return steps


def data_parallel(rank: int, model: nn.Sequential, batch: tuple[Tensor, Tensor], pieces: int) -> Steps:
    """torch's DistributedDataParallel, each worker on its share of the batch, microbatched as the others."""
    size = dist.get_world_size()
    replica = nn.parallel.DistributedDataParallel(model)
    optimizer = sgd(replica.parameters())
    xs, ys = (part.chunk(pieces)[rank::size] for part in batch)

    def steps(count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            for i, (x, y) in enumerate(zip(xs, ys)):
                with contextlib.nullcontext() if i == len(xs) - 1 else replica.no_sync():
                    (F.mse_loss(replica(x), y) / len(xs)).backward()
            optimizer.step()

    return steps
