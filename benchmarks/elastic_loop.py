"""What `plait.Elastic` costs a loop with `plait.DataParallel` while nothing fails, and how long a loss takes.

Two workers of this machine run the same loop with and without it, in turn, one thread each; both sides have a
scheduler. Then three workers train, one of them is killed, and another one comes in its place.

    python benchmarks/elastic_loop.py [--rounds 21] [--steps 40]
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from functools import partial

import torch

import plait
from plait_bench.harness import at_most
from plait_bench.loops import MODELS, Times, claims_of, parser_of, rows_of, show, take_step, time_steps

GOAL = 1.005
STALL_S = 1.0
CASES = ("ResNet-18 (tiny)", "transformer (2 x 64)", "4 layers of 1,024")


def _loop(case: str, is_elastic: bool, steps: int) -> tuple[Callable[[], None], plait.Elastic | None]:
    """A function that takes `steps` steps, and the Elastic of the loop if it has one."""
    torch.manual_seed(0)
    make_model, make_input = MODELS[case]
    model, x = plait.DataParallel(make_model()), make_input()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    elastic = plait.Elastic(model, optimizer, scheduler=scheduler) if is_elastic else None

    def work() -> None:
        numbers: Iterable[int] = range(steps) if elastic is None else elastic.steps(elastic.step + steps)
        for _ in numbers:
            take_step(model, x, optimizer)
            scheduler.step()

    return work, elastic


def measure(case: str, rounds: int, steps: int) -> Times:
    torch.set_num_threads(1)
    plait.init("cpu")
    loops = {name: _loop(case, name == "elastic", steps)[0] for name in ("plain", "elastic")}
    return time_steps(loops, rounds, steps)


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
    asked = parser_of(__doc__, rounds=21, steps=40).parse_args()
    rows = []
    for case in CASES:
        times = plait.launch(measure, case, asked.rounds, asked.steps, workers=2, elastic="2")
        rows += rows_of({"model": case}, times, "plain")
    claims = claims_of(rows, ["model"], "elastic", "one without it", GOAL)
    stalls = plait.launch(partial(lose_one, CASES[0]), workers=3, elastic="1:3", timeout_s=120.0)
    for kind, seconds in stalls[0]:
        claims.append(at_most(f"seconds of pause when a worker has {kind}", seconds, STALL_S))
    show("elastic_loop", asked, rows, claims)


if __name__ == "__main__":
    main()
