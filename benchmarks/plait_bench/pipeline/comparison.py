"""PipeDream's comparison: data parallel, model parallel, gpipe, stash and 2bw, in samples a second.

Every worker takes minibatches of one size, as in PipeDream's tables: data parallelism sums gradients after
one minibatch of each worker; stash updates after each minibatch (each round of them, where stages are
replicated); gpipe, 2bw and model parallelism after four minibatches a worker. Plans are the planner's own,
from a profile that all workers took at once. All sides of a model run in one world, in turn, one thread a
worker, for about as long each, but model parallelism, which more workers make no faster, for a few.

On a machine without the job file's dependencies, for several numbers of workers at once:

    python -m plait_bench.pipeline.comparison 4 8 16 --models vgg16 lstm --minibatch 16
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import itertools
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from plait.comm.channels import connect
from plait.comm.rendezvous import Rendezvous
from plait.launch.worker import Worker
from plait.measure.job import profile_here
from plait.pipeline.executor import Pipeline, PipelineParts
from plait.pipeline.gradient_sync import find_stages, make_agreements, replica_groups
from plait.pipeline.layout import PipelineLayout, arrange, one_batch, stream
from plait.pipeline.tied_weights import make_tied
from plait.planner import (
    Plan,
    Schedule,
    Settings,
    fastest_plan,
    make_plan,
    measured_machines,
    model_parallel_plan,
)
from plait.profiler.trace import trace
from plait.profiler.traced import TracedModel
from plait.schema.settings import TrainSettings
from plait.sync.allreduce.autotune import resolve_topology
from plait.sync.allreduce.buckets import AllReduce
from plait.sync.allreduce.sums import whole_world
from plait.training import components
from plait.training.optimizers.build import build_optimizer
from plait.workloads.losses import build_loss
from plait_bench.harness import BenchClaim, Found, Row, in_turns, in_world, number, seconds_of_all, spread
from plait_bench.pipeline.models import job
from plait_bench.pipeline.sides import FixedWork

MINIBATCH = {"vgg16": 4, "lstm": 16, "transformer": 8}
# Minibatches a worker has in each batch of gpipe, and model parallelism in each interval that is timed.
PIECES, FEW = 4, 8
# How long an interval of data parallelism should last, and the least and most steps that it has.
INTERVAL_S, LEAST, MOST = 0.6, 4, 32
# Pipelines that never drain in training fill and drain once in each of these intervals.
LONGER = 6
DEADLINE_S = 120.0


@dataclass(frozen=True)
class Side:
    """A way to train: `steps` takes one interval of `minibatches`, counted over all workers.

    `predicted_s` is what the plan says a minibatch takes.
    """

    plan: str
    minibatches: int
    steps: Callable[[], None]
    predicted_s: float | None = None
    close: Callable[[], None] = lambda: None


def run(
    workers: int | Sequence[int] = 2,
    models: Sequence[str] = tuple(MINIBATCH),
    repeats: int = 3,
    on_rows: Callable[[list[Row]], None] = lambda rows: None,
    minibatch: int | None = None,
) -> Found:
    """Throughput of every way to train each model on `workers` workers of this machine.

    `on_rows` sees the rows of each model as they come. `minibatch` is a worker's, MINIBATCH where None.
    """
    rows: list[Row] = []
    for count in [workers] if isinstance(workers, int) else workers:
        for model in models:
            asked = {"model": model, "repeats": repeats, "minibatch": minibatch or MINIBATCH[model]}
            found = in_world(count, time_sides, asked, preload=("torch._dynamo",))[0]
            rows += found
            on_rows(found)
    return rows, claims_of(rows)


def claims_of(rows: Sequence[Row]) -> list[BenchClaim]:
    """Dense layers as large as VGG's make pipelines win; said of both that never drain."""
    speed = {(row["case"], row["side"]): number(row, "samples_per_s") for row in rows}
    claims = []
    for case in dict.fromkeys(case for case, _ in speed if str(case).startswith("vgg16")):
        for side, other in itertools.product(("stash", "2bw"), ("data parallel", "torch DDP")):
            ratio = speed[case, side] / speed[case, other]
            claims.append(BenchClaim(f"{case}: {side} over {other}", ratio, "more than 1", ratio > 1))
    return claims


def markdown(rows: Sequence[Row]) -> str:
    """The rows as a table for people: one line a model and side."""
    lines = ["| model | side | plan | samples/s | over data parallel | predicted samples/s |"]
    lines.append("| --- | --- | --- | --- | --- | --- |")
    for row in rows:
        spread = f"{row['samples_per_s']:.4g} ({row['slowest']:.4g}-{row['fastest']:.4g})"
        speedup = f"{row['over_data_parallel']:.2f}x"
        predicted = "" if row["predicted"] is None else f"{row['predicted']:.4g}"
        case, side, plan = row["case"], row["side"], row["plan"]
        lines.append(f"| {case} | {side} | {plan} | {spread} | {speedup} | {predicted} |")
    return "\n".join(lines)


def time_sides(worker: Worker, model: str, repeats: int, minibatch: int) -> list[Row]:
    """Be one of the workers that time all sides of one model."""
    sides = _World(worker, job(model, minibatch), minibatch).sides()

    def rate(side: Side) -> Callable[[bool], float]:
        return lambda _: side.minibatches * minibatch / seconds_of_all(side.steps)

    rates = in_turns({name: rate(side) for name, side in sides.items()}, repeats)
    for side in sides.values():
        side.close()
    case = f"{model}, {worker.world_size} workers, minibatches of {minibatch}"
    base = statistics.median(rates["data parallel"])
    return [_row(case, name, side, rates[name], base, minibatch) for name, side in sides.items()]


def _row(case: str, name: str, side: Side, rates: Sequence[float], base: float, minibatch: int) -> Row:
    return {
        "case": case,
        "side": name,
        "plan": side.plan,
        "predicted": None if side.predicted_s is None else minibatch / side.predicted_s,
        **spread(rates, "samples_per_s", "slowest", "fastest"),
        "over_data_parallel": statistics.median(rates) / base,
        "repeats": len(rates),
    }


class _World:
    """One model with its data and plans; every side trains a copy."""

    def __init__(self, worker: Worker, settings: TrainSettings, minibatch: int) -> None:
        self.worker = worker
        self.size = worker.world_size
        self.settings = settings
        self.model = components.build_model(settings.model, 0)
        self.loss = build_loss(settings.loss)
        data = components.build_train_data(settings)
        groups = [range(i * minibatch, (i + 1) * minibatch) for i in range(PIECES)]
        self.content = [data.batch(0, group, 0) for group in groups]
        (self.profile,) = profile_here(worker, settings, (minibatch,))
        # All workers come to the same number: the profile is their mean.
        self.steps = min(MOST, max(LEAST, round(INTERVAL_S / self.profile.graph.compute_s())))

    def sides(self) -> dict[str, Side]:
        """Every way to train, by its name."""
        cluster = measured_machines((self.size,), self.profile.links, self.profile.sums)
        graph = self.profile.graph
        pieces = PIECES * self.size
        stash = fastest_plan(graph, cluster, Settings(Schedule.STASH, pieces))
        gpipe = make_plan(graph, cluster, Settings(Schedule.GPIPE, pieces, straight=True))
        buffered = fastest_plan(graph, cluster, Settings(Schedule.TWO_BUFFERED, pieces))
        chain = model_parallel_plan(graph, cluster, Settings(Schedule.NONE, FEW))
        return {
            "data parallel": self._data_parallel(),
            "torch DDP": self._torch_data_parallel(),
            "model parallel": self._pipeline(chain, FEW),
            "gpipe": self._pipeline(gpipe, math.ceil(self.steps / PIECES) * pieces),
            "stash": self._pipeline(stash, LONGER * self.steps * self.size),
            "2bw": self._pipeline(buffered, math.ceil(LONGER * self.steps / PIECES) * pieces),
        }

    def _data_parallel(self) -> Side:
        """Our own all-reduce, in buckets, overlapped with backward, as a job has it by default."""
        model = copy.deepcopy(self.model)
        optimizer = self._optimizer(list(model.parameters()))
        members = whole_world(self.worker.rendezvous)
        sync = AllReduce(list(model.parameters()), members=members)
        sync.switch(
            resolve_topology(self.settings.topology, members, sync.gradient_bytes, torch.device("cpu"))[0]
        )

        def steps() -> None:
            for x, y in itertools.islice(itertools.cycle(self.content), self.steps):
                sync.begin()
                loss = self.loss(model(x), y) / self.size
                sync.before_backward(last=True)
                loss.backward()
                sync.agree(torch.zeros(0, dtype=torch.float64))
                optimizer.step()

        return Side(f"{self.size} replicas", self.steps * self.size, steps, close=sync.close)

    def _torch_data_parallel(self) -> Side:
        model = nn.parallel.DistributedDataParallel(copy.deepcopy(self.model))
        optimizer = self._optimizer(list(model.parameters()))

        def steps() -> None:
            for x, y in itertools.islice(itertools.cycle(self.content), self.steps):
                optimizer.zero_grad()
                self.loss(model(x), y).backward()
                optimizer.step()

        return Side(f"{self.size} replicas", self.steps * self.size, steps)

    def _pipeline(self, plan: Plan, total: int) -> Side:
        pipeline_layout, rank = arrange(plan), self.worker.rank
        model = copy.deepcopy(self.model)
        x, _ = self.content[0]
        traced = trace(model, (x,))
        window = pipeline_layout.window()
        peers = pipeline_layout.workers if rank in pipeline_layout.workers else ()
        rendezvous = self.worker.rendezvous
        channels = connect(rendezvous, peers, window=window)
        predicted_s = plan.step_s / plan.microbatches
        if not peers:
            return Side(_words(plan), total, _stand_by(rendezvous, pipeline_layout, traced), predicted_s)
        parts = PipelineParts(
            self.loss,
            self._optimizer,
            torch.device("cpu"),
            contextlib.nullcontext,
            rendezvous,
            topology=self.settings.topology,
        )
        pipeline = Pipeline(rank, pipeline_layout, traced, channels, parts)
        batches = total // plan.microbatches if plan.schedule.synchronous else 1
        each = total // batches
        share = 1.0 if plan.schedule is Schedule.STASH else 1 / each

        def steps() -> None:
            for _ in range(batches):
                work = FixedWork(*self._turned(), share, each)
                pipeline.run(_operations(pipeline_layout, rank, work), work)
            pipeline.losses.clear()
            pipeline.spans.clear()

        def close() -> None:
            pipeline.close()
            channels.close()

        return Side(_words(plan), total, steps, predicted_s, close)

    def _turned(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        return tuple(x for x, _ in self.content), tuple(y for _, y in self.content)

    def _optimizer(self, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        return build_optimizer(self.settings.optimizer, list(parameters))


def _stand_by(
    rendezvous: Rendezvous, pipeline_layout: PipelineLayout, traced: TracedModel
) -> Callable[[], None]:
    """What a worker does that the plan has no use for: take part in making the others' groups."""
    stages_of = find_stages(traced, pipeline_layout)
    make_agreements(rendezvous, pipeline_layout, stages_of, {})
    make_tied(pipeline_layout, stages_of, {}, {}, lambda: None, rendezvous)
    replica_groups(pipeline_layout, rendezvous)
    return lambda: None


def _operations(pipeline_layout: PipelineLayout, rank: int, work: FixedWork) -> Any:
    if pipeline_layout.schedule.synchronous:
        return one_batch(pipeline_layout, rank, work.total)
    return stream(pipeline_layout, rank, work)


def _words(plan: Plan) -> str:
    return "-".join(str(stage.replicas) for stage in plan.stages)


def main(words: Sequence[str]) -> None:
    """Print the table, a model at a time."""
    parser = argparse.ArgumentParser(prog="python -m plait_bench.pipeline.comparison")
    parser.add_argument("workers", type=int, nargs="*", default=[2])
    parser.add_argument("--models", nargs="+", choices=list(MINIBATCH), default=list(MINIBATCH))
    parser.add_argument("--minibatch", type=int, help="samples that a worker takes at once")
    parser.add_argument("--repeats", type=int, default=3)
    asked = parser.parse_args(words)

    def show(rows: list[Row]) -> None:
        print("\n".join(markdown(rows).splitlines()[2:]), flush=True)

    print(markdown([]), flush=True)
    _, claims = run(asked.workers, asked.models, asked.repeats, show, asked.minibatch)
    for claim in claims:
        print(claim.render(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
