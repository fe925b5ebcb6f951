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
from functools import partial

import torch
from torch import nn

from plait.comm.channels import connect
from plait.comm.rendezvous import Rendezvous
from plait.launcher.worker_process import Worker
from plait.measure.profile_job import ProfileRequest, profile_here
from plait.pipeline.gradient_sync import find_stages, make_gradient_reducers, new_members, stage_replicas
from plait.pipeline.layout import PipelineLayout, arrange
from plait.pipeline.pipeline_parts import PipelineParts
from plait.pipeline.updates.tied_weights import make_tied
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
from plait.profiler.traced_model import TracedModel
from plait.schema.settings import TrainSettings
from plait.sync.allreduce.autotune import resolve_topology
from plait.sync.allreduce.buckets import AllReduce
from plait.sync.allreduce.reducers import whole_world
from plait.training.optimizers.build import build_optimizer
from plait.training.setup.data import build_train_data
from plait.training.setup.model import build_model
from plait.workloads.losses import build_loss
from plait_bench.harness import (
    BenchClaim,
    Found,
    Row,
    in_turns,
    in_world,
    number,
    seconds_of_all,
    spread,
    table,
)
from plait_bench.pipeline.models import job
from plait_bench.pipeline.sides import OurPipeline

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
        **spread(rates, "samples_per_s"),
        "over_data_parallel": statistics.median(rates) / base,
        "repeats": len(rates),
    }


class _World:
    """One model with its data and plans; every side trains a copy."""

    def __init__(self, worker: Worker, settings: TrainSettings, minibatch: int) -> None:
        self.worker = worker
        self.size = worker.world_size
        self.settings = settings
        self.model = build_model(settings.model, 0)
        self.loss = build_loss(settings.loss)
        data = build_train_data(settings)
        groups = [range(i * minibatch, (i + 1) * minibatch) for i in range(PIECES)]
        self.content = [data.batch(0, group, 0) for group in groups]
        (self.profile,) = profile_here(worker, ProfileRequest(settings, (minibatch,)))
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
                sync.sum_gradients(torch.zeros(0, dtype=torch.float64))
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
        layout = arrange(plan)
        xs, ys = zip(*self.content)
        traced = trace(copy.deepcopy(self.model), (xs[0],))
        rendezvous, predicted_s = self.worker.rendezvous, plan.step_s / plan.microbatches
        words = "-".join(str(stage.replicas) for stage in plan.stages)
        if rendezvous.rank not in layout.workers:
            return Side(words, total, _stand_by(rendezvous, layout, traced), predicted_s)
        cpu, no_cast = torch.device("cpu"), contextlib.nullcontext
        topology = self.settings.topology
        parts = PipelineParts(self.loss, self._optimizer, cpu, no_cast, rendezvous, topology=topology)
        ours = OurPipeline(layout, traced, parts, layout.window())

        def steps() -> None:
            ours.take(xs, ys, plan.microbatches, total)
            ours.pipeline.timings.clear()

        return Side(words, total, steps, predicted_s, ours.close)

    def _optimizer(self, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        return build_optimizer(self.settings.optimizer, list(parameters))


def _stand_by(rendezvous: Rendezvous, layout: PipelineLayout, traced: TracedModel) -> Callable[[], None]:
    """What a worker does that the plan has no use for: take part in making the others' groups."""
    connect(rendezvous, (), window=layout.window())
    stages_of, members_of = find_stages(traced, layout), partial(new_members, rendezvous)
    make_gradient_reducers(rendezvous, layout, stages_of, {}, members_of)
    make_tied(layout, stages_of, {}, {}, lambda: None, rendezvous)
    stage_replicas(layout, members_of)
    return lambda: None


def main(words: Sequence[str]) -> None:
    """Print the rows, a model at a time, and the claims."""
    parser = argparse.ArgumentParser(prog="python -m plait_bench.pipeline.comparison")
    parser.add_argument("workers", type=int, nargs="*", default=[2])
    parser.add_argument("--models", nargs="+", choices=list(MINIBATCH), default=list(MINIBATCH))
    parser.add_argument("--minibatch", type=int, help="samples that a worker takes at once")
    parser.add_argument("--repeats", type=int, default=3)
    asked = parser.parse_args(words)

    def show(rows: list[Row]) -> None:
        print(table(rows), end="\n\n", flush=True)

    _, claims = run(asked.workers, asked.models, asked.repeats, show, asked.minibatch)
    print("\n".join(claim.render() for claim in claims))


if __name__ == "__main__":
    main(sys.argv[1:])
