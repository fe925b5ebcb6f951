"""What a step of a loop with `plait.DataParallel` costs against torch's DistributedDataParallel.

Two workers of this machine run the same loop with both, in turn, one thread each.

    python benchmarks/ddp_loop.py [--rounds 11] [--steps 20]
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import plait
from plait_bench.loops import MODELS, Times, claims_of, parser_of, rows_of, show, take_step, time_steps

GOAL = 1.0
WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "torch": DistributedDataParallel,
    "plait": plait.DataParallel,
    "ring": partial(plait.DataParallel, topology="ring"),
}


def measure(case: str, rounds: int, steps: int) -> Times:
    torch.set_num_threads(1)
    plait.init("cpu")
    make_model, make_input = MODELS[case]

    def loop(wrap: Callable[[nn.Module], nn.Module]) -> Callable[[], None]:
        torch.manual_seed(0)
        model, x = wrap(make_model()), make_input()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

        def work() -> None:
            for _ in range(steps):
                take_step(model, x, optimizer)

        return work

    return time_steps({name: loop(wrap) for name, wrap in WRAPPERS.items()}, rounds, steps)


def main() -> None:
    asked = parser_of(__doc__, rounds=11, steps=20).parse_args()
    rows = []
    for case in MODELS:
        times = plait.launch(measure, case, asked.rounds, asked.steps, workers=2)
        rows += rows_of({"model": case}, times, "torch")
    show("ddp_loop", asked, rows, claims_of(rows, ["model"], "plait", "torch's", GOAL))


if __name__ == "__main__":
    main()
