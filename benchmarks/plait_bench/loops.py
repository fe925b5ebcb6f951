"""Loops of scripts side by side: small models, steps in turn, seconds and CPU seconds, ratios, claims.

The CPU time of a step is disturbed less than its seconds by other processes of the machine.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

import torch
from torch import Tensor, nn

from plait.workloads.resnet import resnet18_tiny
from plait.workloads.transformer import transformer
from plait_bench.harness import Bench, BenchClaim, Row, at_most, in_turns, number, seconds_of_all

# By loop: seconds and CPU seconds of a step in each round.
Times = dict[str, list[tuple[float, float]]]


def _deep(width: int, layers: int) -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)))


# By name: the model and its inputs.
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "ResNet-18 (tiny)": (resnet18_tiny, lambda: torch.randn(16, 1, 8, 8)),
    "transformer (2 x 64)": (
        lambda: transformer(vocabulary=256, context=32, layers=2, heads=4, width=64, dropout=0.0),
        lambda: torch.randint(0, 256, (8, 32)),
    ),
    "40 layers of 64": (lambda: _deep(64, 40), lambda: torch.randn(16, 64)),
    "4 layers of 1,024": (lambda: _deep(1024, 4), lambda: torch.randn(16, 1024)),
}


def take_step(model: nn.Module, x: Tensor, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(x).float().square().mean().backward()
    optimizer.step()


def time_steps(loops: Mapping[str, Callable[[], object]], rounds: int, steps: int) -> Times:
    """Run loops of `steps` steps in turn; all workers call it together."""

    def timed(work: Callable[[], object]) -> Callable[[bool], tuple[float, float]]:
        def run(_: bool) -> tuple[float, float]:
            started = time.process_time()
            return seconds_of_all(work) / steps, (time.process_time() - started) / steps

        return run

    return in_turns({name: timed(work) for name, work in loops.items()}, rounds)


def rows_of(case: Row, times: Sequence[Times], base: str) -> list[Row]:
    """A row for each loop from the times of each worker; ratios are those to the loop `base`."""
    wall_s = {name: [wall for wall, _ in taken] for name, taken in times[0].items()}
    cpu_s = {
        name: [statistics.mean(cpu for _, cpu in taken) for taken in zip(*(each[name] for each in times))]
        for name in wall_s
    }
    rows: list[Row] = []
    for name in wall_s:
        row: Row = {**case, "loop": name}
        for kind, taken in (("", wall_s), ("CPU ", cpu_s)):
            ratios = [ours / theirs for ours, theirs in zip(taken[name], taken[base])]
            low, middle, high = statistics.quantiles(ratios, n=4)
            row |= {
                f"{kind or 'step '}ms": statistics.median(taken[name]) * 1e3,
                f"{kind}ratio": middle,
                f"{kind}quartiles": f"{low:.3f}-{high:.3f}",
            }
        rows.append(row)
    return rows


def claims_of(
    rows: Sequence[Row], columns: Sequence[str], loop: str, of: str, goal: float
) -> list[BenchClaim]:
    """That a step of `loop` takes at most `goal` of the base's, `of` in words, for each case."""
    return [
        at_most(
            f"{', '.join(str(row[each]) for each in columns)}: a step takes this much of {of}",
            number(row, "ratio"),
            goal,
        )
        for row in rows
        if row["loop"] == loop
    ]


def parser_of(description: str, **defaults: int) -> argparse.ArgumentParser:
    """Takes an option for each of `defaults`."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser


def show(name: str, asked: argparse.Namespace, rows: list[Row], claims: list[BenchClaim]) -> NoReturn:
    """Print the bench of a script; the exit status says whether the claims hold."""
    options = [f"--{option} {value}" for option, value in vars(asked).items()]
    bench = Bench(name, " ".join([f"python benchmarks/{name}.py", *options]), rows, claims)
    print(bench.render())
    sys.exit(not bench.holds)
