"""What `plait.Elastic` costs a loop with `plait.DataParallel` while nothing fails, and how long a loss takes.

Two workers of this machine run the same loop with and without it, in turn, one thread each; both sides have a
scheduler. Besides seconds it shows the CPU time of a step, which other processes of the machine disturb less.
Then three workers train, one of them is killed, and another one comes in its place.

    python benchmarks/elastic_loop.py [--rounds 21] [--steps 40]
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor, nn

import plait
from plait.workloads.resnet import resnet18_tiny
from plait.workloads.transformer import transformer
from plait_bench.harness import Bench, BenchClaim, Row, at_most, in_turns, seconds_of_all

GOAL = 1.005
STALL_S = 1.0


def _deep(width: int, layers: int) -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)))


# By name: the model and its inputs.
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "ResNet-18 (tiny)": (resnet18_tiny, lambda: torch.randn(16, 1, 8, 8)),
    "transformer (2 x 64)": (
        lambda: transformer(vocabulary=256, context=32, layers=2, heads=4, width=64, dropout=0.0),
        lambda: torch.randint(0, 256, (8, 32)),
    ),
    "4 layers of 1,024": (lambda: _deep(1024, 4), lambda: torch.randn(16, 1024)),
}
SIDES = ("plain", "elastic")


def _loop(case: str, is_elastic: bool, steps: int) -> tuple[Callable[[], None], plait.Elastic | None]:
    """A function that takes `steps` steps, and the Elastic of the loop if it has one."""
    torch.manual_seed(0)
    make_model, make_input = CASES[case]
    model, x = plait.DataParallel(make_model()), make_input()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    elastic = plait.Elastic(model, optimizer, scheduler=scheduler) if is_elastic else None

    def work() -> None:
        numbers: Iterable[int] = range(steps) if elastic is None else elastic.steps(elastic.step + steps)
        for _ in numbers:
            optimizer.zero_grad()
            model(x).float().square().mean().backward()
            optimizer.step()
            scheduler.step()

    return work, elastic


def measure(case: str, rounds: int, steps: int) -> dict[str, list[tuple[float, float]]]:
    """By side: seconds and CPU seconds of a step in each round."""
    torch.set_num_threads(1)
    plait.init("cpu")
    cpu_times: dict[str, list[float]] = {name: [] for name in SIDES}

    def side(name: str) -> Callable[[bool], float]:
        work, _ = _loop(case, name == "elastic", steps)

        def run(counts: bool) -> float:
            started = time.process_time()
            seconds = seconds_of_all(work) / steps
            if counts:
                cpu_times[name].append((time.process_time() - started) / steps)
            return seconds

        return run

    wall_times = in_turns({name: side(name) for name in SIDES}, rounds)
    return {name: list(zip(wall_times[name], cpu_times[name])) for name in SIDES}


def rows_of(case: str, rounds: int, steps: int) -> list[Row]:
    times = plait.launch(measure, case, rounds, steps, workers=2, elastic="2")[0]
    rows: list[Row] = []
    for name, taken in times.items():
        ratios = [[mine[kind] / plain[kind] for mine, plain in zip(taken, times["plain"])] for kind in (0, 1)]
        low, _, high = statistics.quantiles(ratios[0], n=4)
        low_cpu, _, high_cpu = statistics.quantiles(ratios[1], n=4)
        rows.append(
            {
                "model": case,
                "loop": name,
                "step ms": statistics.median(wall for wall, _ in taken) * 1e3,
                "CPU ms": statistics.median(cpu for _, cpu in taken) * 1e3,
                "ratio": statistics.median(ratios[0]),
                "quartiles": f"{low:.3f}-{high:.3f}",
                "CPU ratio": statistics.median(ratios[1]),
                "CPU quartiles": f"{low_cpu:.3f}-{high_cpu:.3f}",
            }
        )
    return rows


def lose_one(case: str) -> list[tuple[str, float]]:
    """What changed, and for how many seconds steps were paused: worker 1 is killed in its fifth step."""
    torch.set_num_threads(1)
    world = plait.init("cpu")
    work, elastic = _loop(case, True, 1)
    assert elastic is not None
    end = time.monotonic() + 60.0
    while time.monotonic() < end:
        if (elastic.worker, elastic.step) == (1, 5):
            os.kill(os.getpid(), signal.SIGKILL)
        work()
        if elastic.step > 5 and world.world_size == 3 and (elastic.changes or elastic.worker > 2):
            break
    return [("been lost" if change.lost else "joined", change.seconds) for change in elastic.changes]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--steps", type=int, default=40)
    asked = parser.parse_args()
    rows = [row for case in CASES for row in rows_of(case, asked.rounds, asked.steps)]
    claims: list[BenchClaim] = [
        at_most(f"{row['model']}: a step takes this much of one without it", float(str(row["ratio"])), GOAL)
        for row in rows
        if row["loop"] == "elastic"
    ]
    stalls = plait.launch(partial(lose_one, "ResNet-18 (tiny)"), workers=3, elastic="1:3", timeout_s=120.0)
    for kind, seconds in stalls[0]:
        claims.append(at_most(f"seconds of pause when a worker has {kind}", seconds, STALL_S))
    command = f"python benchmarks/elastic_loop.py --rounds {asked.rounds} --steps {asked.steps}"
    bench = Bench("elastic_loop", command, rows, claims)
    print(bench.render())
    sys.exit(not bench.holds)


if __name__ == "__main__":
    main()
