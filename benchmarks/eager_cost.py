"""What an eager step costs the host: eight fused trials against the same eight one after another.

    python benchmarks/eager_cost.py [--only vit --only densenet] [--family image] [--trials 8]

On a GPU an eager step of a small model takes as long as the host needs to dispatch it. Here the models of
`benchmarks/model_zoo.py` run on a CPU with their tiny batches, where kernels cost next to nothing: CPU time
of a lone step (forward, loss, backward, Adam) and of a fused one, in turn, and the operations of each. The
ratio is what fused trials gain if the host is the limit. `first` is the first fused step with its
verification. One thread; the median of the rounds, with the lowest and highest ratio.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from gpu_guard import kernels_of
from model_zoo import FAMILIES, Case, cases, loss_of, run
from plait.fusion import FusedOptimizer, fuse
from plait.fusion.speed import autotune

ROUNDS, ROWS = 7, 2
LEAST_S = 0.05
Step = Callable[[], Any]
HEAD = "model                          lone us  fused us  ratio (from - to)     lone ops  fused ops  first s"


def small(batch: Any) -> Any:
    """The first rows of a batch."""
    return pytree.tree_map_only(torch.Tensor, lambda leaf: leaf[:ROWS], batch)


def lone_step(case: Case) -> Step:
    model, batch = case.make().train(), small(case.batches()[0])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        loss_of(run(model, batch)).backward()
        optimizer.step()

    return step


def fused_step(case: Case, trials: int) -> Step:
    batches = [small(batch) for batch in case.batches()]
    fused = fuse([case.make().train() for _ in range(trials)], verify=batches)
    batch = pytree.tree_map(lambda leaf: torch.stack([leaf] * trials), batches[0])
    optimizer = FusedOptimizer(fused, "adam", lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        fused.map(loss_of, run(fused, batch)).sum().backward()
        optimizer.step()

    return step


def cpu_seconds(step: Step) -> float:
    """CPU seconds of one step, the mean of enough of them."""
    count, start = 0, time.process_time()
    while (spent := time.process_time() - start) < LEAST_S:
        step()
        count += 1
    return spent / count


def row(case: Case, trials: int) -> str:
    lone, begin = lone_step(case), time.process_time()
    fused = fused_step(case, trials)
    fused()
    first_s = time.process_time() - begin
    for _ in range(3):
        lone()
        fused()
    pairs = [(cpu_seconds(lone), cpu_seconds(fused)) for _ in range(ROUNDS)]
    alone, together = (1e6 * statistics.median(each) for each in zip(*pairs))
    ratios = sorted(trials * a / b for a, b in pairs)
    cpu = torch.device("cpu")
    counts = f"{kernels_of(lone, cpu):9}  {kernels_of(fused, cpu):9}"
    spread = f"{statistics.median(ratios):5.2f} ({ratios[0]:.2f} - {ratios[-1]:.2f})"
    return f"{case.name:28} {alone:9.0f} {together:9.0f}  {spread:22} {counts}  {first_s:7.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", default=[], help="models of these names")
    parser.add_argument("--family", action="append", default=[], choices=FAMILIES)
    parser.add_argument("--trials", type=int, default=8)
    asked = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    # A GPU has one kernel for a convolution of all trials; on a CPU several ways launch one for each.
    autotune.measure = lambda ways, operands: next(name for name in ways if name != "gathered")
    print(HEAD)
    for case in cases():
        if (asked.only and case.name not in asked.only) or (asked.family and case.family not in asked.family):
            continue
        torch.manual_seed(0)
        try:
            print(row(case, asked.trials), flush=True)
        except Exception as failure:
            words = " ".join(str(failure).split())
            print(f"{case.name:28} {type(failure).__name__}: {words[:150]}", flush=True)


if __name__ == "__main__":
    main()
