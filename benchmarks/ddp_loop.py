"""What a step of a loop with `plait.DataParallel` costs against torch's DistributedDataParallel.

Two workers of this machine run the same loop with both, in turn, one thread each. Besides seconds it shows
the CPU time of a step, which other processes of the machine disturb less.

    python benchmarks/ddp_loop.py [--rounds 11] [--steps 20]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import plait
from plait.api.launching import launch
from plait.workloads.resnet import resnet18_tiny
from plait.workloads.transformer import transformer
from plait_bench.harness import Bench, BenchClaim, Row, at_most, in_turns, seconds_of_all

GOAL = 1.0


def _deep(width: int, layers: int) -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)))


# By name: the model and its inputs.
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "ResNet-18 (tiny)": (resnet18_tiny, lambda: torch.randn(16, 1, 8, 8)),
    "transformer (2 x 64)": (
        lambda: transformer(vocabulary=256, context=32, layers=2, heads=4, width=64, dropout=0.0),
        lambda: torch.randint(0, 256, (8, 32)),
    ),
    "40 layers of 64": (lambda: _deep(64, 40), lambda: torch.randn(16, 64)),
    "4 layers of 1,024": (lambda: _deep(1024, 4), lambda: torch.randn(16, 1024)),
}
WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "torch": DistributedDataParallel,
    "plait": plait.DataParallel,
    "ring": partial(plait.DataParallel, topology="ring"),
}


def measure(case: str, rounds: int, steps: int) -> dict[str, list[tuple[float, float]]]:
    """By wrapper: seconds and CPU seconds of a step in each round."""
    torch.set_num_threads(1)
    plait.init("cpu")
    make_model, make_input = CASES[case]

    def side(wrap: Callable[[nn.Module], nn.Module]) -> Callable[[bool], float]:
        torch.manual_seed(0)
        model, x = wrap(make_model()), make_input()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

        def run(counts: bool) -> float:
            def work() -> None:
                for _ in range(steps):
                    optimizer.zero_grad()
                    model(x).float().square().mean().backward()
                    optimizer.step()

            started = time.process_time()
            seconds = seconds_of_all(work) / steps
            if counts:
                cpu_times.setdefault(id(wrap), []).append((time.process_time() - started) / steps)
            return seconds

        return run

    cpu_times: dict[int, list[float]] = {}
    sides = {name: side(wrap) for name, wrap in WRAPPERS.items()}
    wall_times = in_turns(sides, rounds)
    return {name: list(zip(wall_times[name], cpu_times[id(wrap)])) for name, wrap in WRAPPERS.items()}


def rows_of(case: str, rounds: int, steps: int) -> list[Row]:
    times = launch(measure, case, rounds, steps, workers=2)[0]
    rows: list[Row] = []
    for name, taken in times.items():
        ratios = [
            [ours[kind] / torchs[kind] for ours, torchs in zip(taken, times["torch"])] for kind in (0, 1)
        ]
        low, _, high = statistics.quantiles(ratios[0], n=4)
        rows.append(
            {
                "model": case,
                "wrapper": name,
                "step ms": statistics.median(wall for wall, _ in taken) * 1e3,
                "CPU ms": statistics.median(cpu for _, cpu in taken) * 1e3,
                "ratio": statistics.median(ratios[0]),
                "quartiles": f"{low:.3f}-{high:.3f}",
                "CPU ratio": statistics.median(ratios[1]),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--steps", type=int, default=20)
    asked = parser.parse_args()
    rows = [row for case in CASES for row in rows_of(case, asked.rounds, asked.steps)]
    claims: list[BenchClaim] = [
        at_most(f"{row['model']}: a step takes this much of torch's", float(str(row["ratio"])), GOAL)
        for row in rows
        if row["wrapper"] == "plait"
    ]
    command = f"python benchmarks/ddp_loop.py --rounds {asked.rounds} --steps {asked.steps}"
    bench = Bench("ddp_loop", command, rows, claims)
    print(bench.render())
    sys.exit(not bench.holds)


if __name__ == "__main__":
    main()
