"""All-reduce over topologies: bandwidth against the backend's own, and how much of it backward hides.

Buffers have the sizes of real models' gradients, cut into buckets as a run would. All ways to sum take
turns in one world; ratios are of medians. Backward sleeps instead of computing in the overlap, so that two
workers on few cores have the processor that a worker with a GPU has to spare.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from plait.core.names import resolve
from plait.launch.display import Silent
from plait.launch.supervisor import Launch, Supervisor
from plait.launch.worker import Worker
from plait.schema.hosts import LOCAL, Host
from plait.schema.placement import Placement
from plait.schema.topology import NATIVE, TOPOLOGIES, Route, Topology, make_topology
from plait.sync.allreduce.buckets import AllReduce, make_buckets
from plait.sync.allreduce.sums import Members, Native, Reducer, Spec, whole_world
from plait.sync.allreduce.tree import OverTopology
from plait_bench.harness import BenchClaim, Row
from plait_bench.sync.shaped_hosts import NIC, hosts_on_a_bridge, missing_for_shaping

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


def bandwidth_rows(
    models: tuple[str, ...] = tuple(MODELS), ranks: tuple[int, ...] = (2, 4, 8), repeats: int = 4
) -> list[Row]:
    """Every way to sum on one host, for each model and number of workers."""
    rows: list[Row] = []
    for count in ranks:
        for model in models:
            rows += _rows_of((Host(LOCAL, count),), "bandwidth_worker", _ask(model, "one host", repeats))
    return rows


def shaped_rows(model: str = SLOW_MODEL, repeats: int = 2) -> tuple[list[Row], str | None]:
    """Every way to sum over four hosts, the last behind a slow link; or why that cannot be measured here."""
    reason = missing_for_shaping()
    if reason is not None:
        return [], reason
    slow = SLOW_HOSTS[-1]
    asked = _ask(model, f"4 hosts, {slow} at {SLOW_RATE}", repeats)
    with hosts_on_a_bridge(SLOW_HOSTS, slow, SLOW_RATE) as shell:
        hosts = tuple(Host(name, 1) for name in SLOW_HOSTS)
        return _rows_of(hosts, "bandwidth_worker", asked, shell=shell, nic=NIC), None


def overlap_rows(
    models: tuple[str, ...] = tuple(MODELS),
    names: tuple[str, ...] = (NATIVE, "star", "ring", "clique"),
    repeats: int = 5,
) -> list[Row]:
    """How much of the transfer a backward of two workers hides, for each model and way to sum."""
    rows: list[Row] = []
    for model in models:
        asked = {"model": model, "names": list(names), "repeats": repeats}
        rows += _rows_of((Host(LOCAL, 2),), "overlap_worker", asked)
    return rows


def _rows_of(hosts: tuple[Host, ...], entry: str, settings: dict[str, Any], **reached: str) -> list[Row]:
    """The rows that rank 0 of a new world returned from a function of this module."""
    with tempfile.TemporaryDirectory() as logs:
        launch = Launch(
            Placement(hosts, threads=1, **reached),  # type: ignore[arg-type]
            entry=f"{__name__}:{entry}",
            settings=settings,
            logs=Path(logs),
        )
        rows: list[Row] = Supervisor(launch, Silent()).run()[0]["rows"]
    return rows


def _ask(model: str, case: str, repeats: int) -> dict[str, Any]:
    return {"model": model, "case": case, "repeats": repeats}


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


def bandwidth_worker(worker: Worker, settings: dict[str, Any]) -> dict[str, Any]:
    """Be one of the workers that time all ways to sum the gradients of one model."""
    worker.join("gloo")
    members = whole_world(worker.rendezvous)
    specs = gradient_specs(settings["model"])
    over = OverTopology(members, specs)
    native = Native(over.buffers, None)
    for buffer in over.buffers:
        buffer.zero_()
    ways: dict[str, Topology | None] = {NATIVE: None, **_distinct(members)}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    # The first bucket of each way opens connections and touches memory.
    for round_ in range(settings["repeats"] + 1):
        for name, topology in ways.items():
            if topology is not None:
                over.switch(topology)
            reducer: Reducer = native if topology is None else over
            taken = _time_sums(reducer, 1 if round_ == 0 else len(specs))
            seconds[name] += [taken] if round_ else []
    over.close()
    size = sum(spec.size_bytes for spec in specs)
    asked = {"case": settings["case"], "model": settings["model"], "ranks": worker.world_size, "bytes": size}
    return {"rows": [{**asked, **_row(name, seconds, size)} for name in ways]}


def _distinct(members: Members) -> dict[str, Topology]:
    """All topologies, those with the same routes on these hosts once, under all their names."""
    found: dict[tuple[Route, ...], list[str]] = {}
    for name in TOPOLOGIES:
        found.setdefault(make_topology(name, members.hosts).routes, []).append(name)
    return {", ".join(names): Topology(names[0], routes) for routes, names in found.items()}


def _time_sums(reducer: Reducer, count: int) -> float:
    dist.barrier()
    started = time.perf_counter()
    for pending in [reducer.start(index) for index in range(count)]:
        pending.wait()
    dist.barrier()
    return time.perf_counter() - started


def _row(name: str, seconds: dict[str, list[float]], size: int) -> Row:
    own, native = statistics.median(seconds[name]), statistics.median(seconds[NATIVE])
    return {
        "topology": name,
        "sum_s": own,
        "sum_min_s": min(seconds[name]),
        "sum_max_s": max(seconds[name]),
        "bytes_per_s": size / own,
        "over_native": native / own,
        "repeats": len(seconds[name]),
    }


class _SleepingGradient(torch.autograd.Function):
    """The input as it is; its backward sleeps, then has a gradient for the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, gradient: Tensor, seconds: float) -> Tensor:
        ctx.gradient, ctx.seconds = gradient, seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        time.sleep(ctx.seconds)
        return grads[0], ctx.gradient, None, None


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
            x = _SleepingGradient.apply(x, weight, gradient, seconds)  # type: ignore[no-untyped-call]
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
            self.sync.agree(torch.zeros(1))
        seconds = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return float(seconds)


def overlap_worker(worker: Worker, settings: dict[str, Any]) -> dict[str, Any]:
    """Be one of the workers that measure how much of a transfer backward hides."""
    worker.join("gloo")
    members = whole_world(worker.rendezvous)
    model = _Sleeper(settings["model"])
    steps = _Steps(model, AllReduce(list(model.parameters()), members=members))
    rows: list[Row] = []
    for name in settings["names"]:
        steps.sync.switch(None if name == NATIVE else make_topology(name, members.hosts))
        asked = {"case": "overlap", "model": settings["model"], "ranks": worker.world_size}
        rows.append(
            {**asked, "bytes": steps.sync.gradient_bytes, "topology": name} | _overlap(steps, settings)
        )
    steps.sync.close()
    return {"rows": rows}


def _overlap(steps: _Steps, settings: dict[str, Any]) -> Row:
    cases = {
        "backward": (BACKWARD_S, False),
        "both": (BACKWARD_S, True),
        "sums": (0.0, True),
        "gradients": (0.0, False),
    }
    taken: dict[str, list[float]] = {name: [] for name in cases}
    for round_ in range(settings["repeats"] + 1):
        for name, case in cases.items():
            seconds = steps.take(*case)
            taken[name] += [seconds] if round_ else []
    found = {name: statistics.median(seconds) for name, seconds in taken.items()}
    # A step that does not sleep makes its gradients and sums them.
    transfer = found["sums"] - found["gradients"]
    return {
        "backward_s": found["backward"],
        "transfer_s": transfer,
        "step_s": found["both"],
        "step_min_s": min(taken["both"]),
        "step_max_s": max(taken["both"]),
        "hidden": 1 - (found["both"] - found["backward"]) / transfer,
        "repeats": settings["repeats"],
    }


def bandwidth_claims(rows: list[Row]) -> list[BenchClaim]:
    """On one host, for each model and number of workers: our best topology against the backend's own."""
    cases = dict.fromkeys((row["model"], row["ranks"]) for row in rows if row.get("case") == "one host")
    return [
        _best_claim(f"{model}, {ranks} workers on one host", rows, ("one host", model, ranks), 0.9)
        for model, ranks in cases
    ]


def shaped_claims(rows: list[Row], reason: str | None) -> list[BenchClaim]:
    """Over hosts of which one has a slow link: our best topology against the backend's own."""
    words = f"four hosts, one link at {SLOW_RATE}"
    if reason is not None:
        return [BenchClaim(f"{words}: {reason}", None, "at least 1.5 times native", False)]
    (case,) = dict.fromkeys((row["case"], row["model"], row["ranks"]) for row in rows)
    return [_best_claim(words, rows, case, 1.5)]


def overlap_claims(rows: list[Row]) -> list[BenchClaim]:
    """For each model whose transfer is shorter than backward: the share hidden where steps are fastest."""
    claims = []
    for model in dict.fromkeys(row["model"] for row in rows):
        own = [r for r in rows if r["model"] == model and r["topology"] != NATIVE]
        best = min(own, key=lambda r: float(r["step_s"] or 0))
        value = float(best["hidden"] or 0)
        longer = float(best["backward_s"] or 0) > float(best["transfer_s"] or 0)
        words = f"{model}, {best['topology']}: share of the transfer that a longer backward hides"
        claims.append(BenchClaim(words, value, "at least 0.7", value >= 0.7 and longer))
    return claims


def _best_claim(words: str, rows: list[Row], case: tuple[Any, ...], goal: float) -> BenchClaim:
    own = [r for r in rows if (r.get("case"), r.get("model"), r.get("ranks")) == case]
    best = max((r for r in own if r["topology"] != NATIVE), key=lambda r: float(r["over_native"] or 0))
    value = float(best["over_native"] or 0)
    return BenchClaim(
        f"{words}: {best['topology']} over native", value, f"at least {goal:g} times native", value >= goal
    )
