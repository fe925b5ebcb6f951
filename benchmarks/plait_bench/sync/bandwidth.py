"""All-reduce over topologies: bandwidth against the backend's own, and how much of it backward hides.

Buffers have the sizes of real models' gradients, cut into buckets as a run would. All ways to sum take
turns in one world; ratios are of medians. Backward sleeps instead of computing in the overlap, so that two
workers on few cores have the processor that a worker with a GPU has to spare.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from plait.core.names import resolve
from plait.launcher.worker_process import Worker
from plait.schema.topology import NATIVE, TOPOLOGIES, Route, Topology, make_topology
from plait.sync.allreduce.buckets import AllReduce, make_buckets
from plait.sync.allreduce.reducers import Members, Native, Reducer, Spec, whole_world
from plait.sync.allreduce.topology_reduce import OverTopology
from plait_bench.harness import (
    BenchClaim,
    Found,
    Row,
    at_least,
    in_turns,
    in_world,
    number,
    seconds_of_all,
    spread,
)
from plait_bench.sleeping import Sleep
from plait_bench.sync.shaped_hosts import bridged_hosts, missing_for_shaping

MODELS = {
    "resnet50": "plait.workloads.resnet:resnet50",
    "vgg16": "plait.workloads.vgg:vgg16",
    "bert-base": "plait.workloads.bert:bert",
}
SLOW_HOSTS = ("w0", "w1", "w2", "w3")
SLOW_RATE = "100mbit"
SLOW_MODEL = "resnet50"
# Longer than the transfer of any of the models between two workers, by any way to sum.
BACKWARD_S = 1.0


def run(models: Sequence[str] = tuple(MODELS), ranks: Sequence[int] = (2, 4, 8), repeats: int = 4) -> Found:
    """Every way to sum on one host, for each model and number of workers, against the backend's own."""
    rows: list[Row] = []
    claims = []
    for count, model in itertools.product(ranks, models):
        found = in_world(count, time_ways, {"model": model, "case": "one host", "repeats": repeats})[0]
        claims.append(_best_claim(f"{model}, {count} workers on one host", found, 0.9))
        rows += found
    return rows, claims


def run_shaped() -> Found:
    """Every way to sum over four hosts, the last behind a slow link; or why that cannot be measured here."""
    words = f"four hosts, one link at {SLOW_RATE}"
    reason = missing_for_shaping()
    if reason is not None:
        return [], [BenchClaim(words, None, "at least 1.5 times native", False, reason)]
    slow = SLOW_HOSTS[-1]
    asked = {"model": SLOW_MODEL, "case": f"4 hosts, {slow} at {SLOW_RATE}", "repeats": 2}
    with bridged_hosts(SLOW_HOSTS) as hosts:
        hosts.shape(slow, SLOW_RATE)
        rows = in_world(hosts.placement(1), time_ways, asked)[0]
    return rows, [_best_claim(words, rows, 1.5)]


def run_overlap(
    models: Sequence[str] = tuple(MODELS),
    names: Sequence[str] = (NATIVE, "star", "ring", "clique"),
    repeats: int = 5,
) -> Found:
    """How much of the transfer a backward of two workers hides, for each model and way to sum."""
    rows: list[Row] = []
    for model in models:
        rows += in_world(2, time_overlap, {"model": model, "names": list(names), "repeats": repeats})[0]
    return rows, overlap_claims(rows)


def gradient_specs(model: str) -> list[Spec]:
    """The buffers that a data-parallel run of the model sums in one step."""
    cpu = torch.device("cpu")
    specs = [bucket.spec for bucket in make_buckets(list(_on_meta(model).parameters()))]
    return [Spec(spec.count, spec.dtype, cpu) for spec in specs]


def _on_meta(model: str) -> nn.Module:
    """The model without memory for its weights."""
    with torch.device("meta"):
        made: nn.Module = resolve(MODELS[model], "model")()
    return made


def time_ways(worker: Worker, model: str, case: str, repeats: int) -> list[Row]:
    """Be one of the workers that time all ways to sum the gradients of one model."""
    members = whole_world(worker.rendezvous)
    specs = gradient_specs(model)
    over = OverTopology(members, specs)
    native = Native(over.buffers, None)
    for buffer in over.buffers:
        buffer.zero_()
    ways: dict[str, Topology | None] = {NATIVE: None, **_distinct(members)}

    def timed(topology: Topology | None) -> Callable[[bool], float]:
        def seconds(counts: bool) -> float:
            if topology is not None:
                over.switch(topology)
            # The first bucket of each way opens connections and touches memory.
            return _time_sums(native if topology is None else over, len(specs) if counts else 1)

        return seconds

    seconds = in_turns({name: timed(topology) for name, topology in ways.items()}, repeats)
    over.close()
    size = sum(spec.size_bytes for spec in specs)
    asked: Row = {"case": case, "model": model, "ranks": worker.world_size, "bytes": size}
    return [{**asked, **_row(name, seconds, size)} for name in ways]


def _distinct(members: Members) -> dict[str, Topology]:
    """All topologies, those with the same routes on these hosts once, under all their names."""
    found: dict[tuple[Route, ...], list[str]] = {}
    for name in TOPOLOGIES:
        found.setdefault(make_topology(name, members.hosts).routes, []).append(name)
    return {", ".join(names): Topology(names[0], routes) for routes, names in found.items()}


def _time_sums(reducer: Reducer, count: int) -> float:
    def sums() -> None:
        for wait in [reducer.start(index) for index in range(count)]:
            wait()

    return seconds_of_all(sums)


def _row(name: str, seconds: dict[str, list[float]], size: int) -> Row:
    own, native = statistics.median(seconds[name]), statistics.median(seconds[NATIVE])
    return {
        "topology": name,
        **spread(seconds[name], "sum_s"),
        "bytes_per_s": size / own,
        "over_native": native / own,
        "repeats": len(seconds[name]),
    }


class _Sleeper(nn.Module):
    """The parameters of a model, with a backward that sleeps as long for each and then has its gradient."""

    def __init__(self, model: str) -> None:
        super().__init__()
        shapes = [p.shape for p in _on_meta(model).parameters()]
        self.weights = nn.ParameterList(torch.zeros(shape) for shape in shapes)
        self._gradients = [torch.zeros(shape) for shape in shapes]
        self.backward_s = BACKWARD_S

    def forward(self, x: Tensor) -> Tensor:
        seconds = self.backward_s / len(self._gradients)
        for weight, gradient in zip(self.weights, self._gradients):
            x = Sleep.apply(x, weight, 0.0, seconds, 0.0, "", gradient)  # type: ignore[no-untyped-call]
        return x


@dataclass
class _Steps:
    """Steps of two workers: with or without a backward that takes time, with or without sums."""

    model: _Sleeper
    sync: AllReduce

    def take(self, backward_s: float, summed: bool) -> float:
        """Seconds of the slower worker."""
        self.model.backward_s = backward_s
        self.sync.begin()
        self.sync.before_backward(last=summed)
        dist.barrier()
        started = time.perf_counter()
        self.model(torch.zeros(1, requires_grad=True)).sum().backward()
        if summed:
            self.sync.sum_gradients(torch.zeros(1))
        seconds = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return float(seconds)


def time_overlap(worker: Worker, model: str, names: list[str], repeats: int) -> list[Row]:
    """Be one of the workers that measure how much of a transfer backward hides."""
    members = whole_world(worker.rendezvous)
    sleeper = _Sleeper(model)
    steps = _Steps(sleeper, AllReduce(list(sleeper.parameters()), members=members))
    asked: Row = {"case": "overlap", "model": model, "ranks": worker.world_size}
    asked["bytes"] = steps.sync.gradient_bytes
    rows: list[Row] = []
    for name in names:
        steps.sync.switch(None if name == NATIVE else make_topology(name, members.hosts))
        rows.append({**asked, "topology": name, **_overlap(steps, repeats)})
    steps.sync.close()
    return rows


def _overlap(steps: _Steps, repeats: int) -> Row:
    taken = in_turns(
        {
            "backward": lambda _: steps.take(BACKWARD_S, False),
            "both": lambda _: steps.take(BACKWARD_S, True),
            "sums": lambda _: steps.take(0.0, True),
            "gradients": lambda _: steps.take(0.0, False),
        },
        repeats,
    )
    found = {name: statistics.median(seconds) for name, seconds in taken.items()}
    # A step that does not sleep makes its gradients and sums them.
    transfer = found["sums"] - found["gradients"]
    return {
        "backward_s": found["backward"],
        "transfer_s": transfer,
        **spread(taken["both"], "step_s"),
        "hidden": 1 - (found["both"] - found["backward"]) / transfer,
        "repeats": repeats,
    }


def overlap_claims(rows: Sequence[Row]) -> list[BenchClaim]:
    """For each model whose transfer is shorter than backward: the share hidden where steps are fastest."""
    claims = []
    for model in dict.fromkeys(row["model"] for row in rows):
        own = [r for r in rows if r["model"] == model and r["topology"] != NATIVE]
        best = min(own, key=lambda r: number(r, "step_s"))
        is_longer = number(best, "backward_s") > number(best, "transfer_s")
        words = f"{model}, {best['topology']}: share of the transfer that a longer backward hides"
        claims.append(at_least(words, number(best, "hidden") if is_longer else None, 0.7))
    return claims


def _best_claim(words: str, rows: Sequence[Row], goal: float) -> BenchClaim:
    """Our best topology against the backend's own."""
    best = max((r for r in rows if r["topology"] != NATIVE), key=lambda r: number(r, "over_native"))
    words = f"{words}: {best['topology']} over native"
    return at_least(words, number(best, "over_native"), goal, " times native")
