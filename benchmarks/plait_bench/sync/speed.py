"""How much of the ideal throughput each sync keeps when workers are unlike: steps that sleep, a small model.

All syncs and cases run in one world, one after the other. A worker's ideal is what it would do alone: the
sleeps that it really drew. Throughput is the sum of the workers' own rates.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from plait.comm.collectives import all_gather_values
from plait.launcher.worker_process import Worker
from plait.schema.settings import SlowSettings
from plait.schema.sync_options import LOCKSTEP, read_options
from plait.schema.topology import make_topology
from plait.sync.allreduce.buckets import AllReduce
from plait.sync.allreduce.reducers import whole_world
from plait.sync.averaging.peers import find_lost
from plait.sync.make_averaging import AveragingWorkers, make_averaging
from plait_bench.harness import BenchClaim, Found, Row, at_least, ends_of, in_world, number, of_repeats, say

STEP_S = 0.1
# How long each sync is measured in each case, this many times.
SECONDS = 3.0
REPEATS = 3
GOAL = 0.88


CASES = {
    "homogeneous": SlowSettings(),
    "one worker x2": SlowSettings({1: 2.0}),
    "one worker x4": SlowSettings({1: 4.0}),
    "four workers x2": SlowSettings(dict.fromkeys((1, 3, 5, 7), 2.0)),
    "jitter 0.1:0.1": SlowSettings(jitter=(0.1, 0.1)),
    "jitter 0.1:0.5": SlowSettings(jitter=(0.1, 0.5)),
}
SYNCS: dict[str, tuple[str, dict[str, Any]]] = {
    "all-reduce": ("all-reduce", {}),
    "all-reduce, star": ("all-reduce", {"topology": "star"}),
    "partial-reduce": ("partial-reduce", {}),
    "ad-psgd": ("ad-psgd", {}),
    "pair-sync": ("pair-sync", {}),
    "pair-averaging": ("pair-averaging", {}),
    "hetpipe D=0": ("hetpipe", {"staleness": 0}),
    "hetpipe D=4": ("hetpipe", {"staleness": 4}),
    "local-sgd H=8": ("local-sgd", {"every": 8}),
}

# The cases, the syncs, and the seconds and repeats of a quick course.
QUICK_CASES = ("homogeneous", "one worker x4")
QUICK_SYNCS = ("all-reduce, star", "partial-reduce", "ad-psgd", "hetpipe D=4")
QUICK_COURSE = (1.0, 2)


def run(quick: bool = False) -> Found:
    """The fraction of ideal throughput of each sync, 8 workers, six cases of slow workers; `quick`: fewer."""
    rows = speed_rows(QUICK_CASES, QUICK_SYNCS, 4, *QUICK_COURSE) if quick else speed_rows()
    what = "partial reduce's fraction of ideal throughput"
    return rows, partial_reduce_claims(rows, lambda row: f"{row['case']}: {what}, {row['workers']} workers")


def speed_rows(
    cases: Sequence[str] = tuple(CASES),
    syncs: Sequence[str] = tuple(SYNCS),
    workers: int = 8,
    seconds: float = SECONDS,
    repeats: int = REPEATS,
) -> list[Row]:
    """One row for each case and sync: the median, the least and the most of the repeats."""
    asked = {"cases": list(cases), "syncs": list(syncs), "seconds": seconds, "repeats": repeats}
    rows: list[Row] = in_world(workers, measure_all, asked)[0]
    return rows


def _slowest_s(case: SlowSettings, workers: int) -> float:
    """About how long a step takes that waits for all."""
    likely, stumble_s = case.jitter or (0.0, 0.0)
    stumbles = 1 - (1 - likely) ** workers
    return STEP_S * max(case.factors.values(), default=1.0) + stumbles * stumble_s


def partial_reduce_claims(rows: Sequence[Row], words: Callable[[Row], str]) -> list[BenchClaim]:
    """Partial reduce keeps its share of the ideal in every row of it, which `words` describes."""
    own = [row for row in rows if row["sync"] == "partial-reduce"]
    column = "fraction_of_ideal"
    return [at_least(words(row), number(row, column), GOAL, ends=ends_of(row, column)) for row in own]


def measure_all(
    worker: Worker, cases: list[str], syncs: list[str], seconds: float, repeats: int
) -> list[Row]:
    """Be one of the workers that measure every sync in every case; within a case the syncs take turns."""
    rows: list[Row] = []
    for case in cases:
        turns = itertools.product(range(repeats), syncs)
        rows += [_measure(worker, case, sync, seconds, repeat) for repeat, sync in turns]
        say(f"{case}: {len(syncs)} syncs on {worker.world_size} workers, {repeats} times")
    return of_repeats(
        rows, ("case", "sync", "workers"), ("fraction_of_ideal", "lowest_worker", "steps_per_s")
    )


def _measure(worker: Worker, case: str, sync: str, seconds: float, repeat: int) -> Row:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    kind, given = SYNCS[sync]
    step = _sleeping_step(worker.rank, CASES[case], model)
    if kind == "all-reduce":
        together, finish = _with_all_reduce(worker, model, given.get("topology"))
    else:
        together, finish = _with_averaging(worker, model, kind, given, f"bench/{case}/{sync}/{repeat}")
    dist.barrier()
    equal = kind == "all-reduce" or kind in LOCKSTEP
    count = max(10, round(seconds / _slowest_s(CASES[case], worker.world_size))) if equal else None
    work = _work(step, together, count, seconds)
    finish()
    found = all_gather_values(work)
    rates = [steps / elapsed for steps, _, elapsed in found]
    ideal = [steps / slept for steps, slept, _ in found]
    return {
        "case": case,
        "sync": sync,
        "workers": worker.world_size,
        "fraction_of_ideal": sum(rates) / sum(ideal),
        "lowest_worker": min(r / i for r, i in zip(rates, ideal)),
        "steps_per_s": sum(rates),
    }


def _sleeping_step(rank: int, case: SlowSettings, model: nn.Module) -> Callable[[], float]:
    """A step: forward and backward of a small model and a sleep; returns how long it slept."""
    draws = random.Random(rank)
    likely, stumble_s = case.jitter or (0.0, 0.0)
    x, y = torch.randn(8, 64), torch.randint(10, (8,))

    def step() -> float:
        nn.functional.cross_entropy(model(x), y).backward()
        seconds = STEP_S * case.factors.get(rank, 1.0)
        if draws.random() < likely:
            seconds += stumble_s
        time.sleep(seconds)
        return seconds

    return step


def _with_all_reduce(
    worker: Worker, model: nn.Module, topology: str | None
) -> tuple[Callable[[Callable[[], float]], float], Callable[[], None]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    members = whole_world(worker.rendezvous)
    sync = AllReduce(list(model.parameters()), members=members)
    if topology is not None:
        sync.switch(make_topology(topology, members.hosts))

    def together(step: Callable[[], float]) -> float:
        sync.begin()
        sync.before_backward(last=True)
        slept = step()
        sync.sum_gradients(torch.zeros(1, dtype=torch.float64))
        optimizer.step()
        return slept

    return together, sync.close


def _with_averaging(
    worker: Worker, model: nn.Module, kind: str, given: dict[str, Any], prefix: str
) -> tuple[Callable[[Callable[[], float]], float], Callable[[], None]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    options = read_options(kind, given, worker.world_size)
    weights = list(model.parameters())
    size = worker.world_size
    lost = find_lost(worker.memberships, range(size))
    workers = AveragingWorkers(
        worker.rendezvous, worker.store, prefix, [worker.host] * size, worker.rank, lost
    )
    averaging = make_averaging(workers, [lambda: weights], options, 0)

    def together(step: Callable[[], float]) -> float:
        optimizer.zero_grad()
        slept = step()
        optimizer.step()
        averaging.after_update()
        return slept

    def finish() -> None:
        averaging.synchronize()
        dist.barrier()
        averaging.close()

    return together, finish


def _work(
    step: Callable[[], float],
    together: Callable[[Callable[[], float]], float],
    count: int | None,
    seconds: float,
) -> tuple[int, float, float]:
    """Steps for `seconds`, or `count` of them, after a first one that is not counted.

    How many they were, how long they slept, and how long they took.
    """
    together(step)
    steps, slept_s, elapsed_s = 0, 0.0, 0.0
    started = time.monotonic()
    while steps < count if count is not None else elapsed_s < seconds:
        slept_s += together(step)
        steps += 1
        elapsed_s = time.monotonic() - started
    return steps, slept_s, elapsed_s
