"""What a step of `plait.Pipeline` in a loop costs against the same plan in a job.

Two workers of this machine train the same model with both, in turn, under the same plan and schedule, one
thread each. The workers of the first stage alone read data, as in a job.

    python benchmarks/pipeline_loop.py [--rounds 11] [--steps 20]
"""

from __future__ import annotations

import itertools
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import plait
from plait.api.joined_workers import JoinedWorker
from plait.api.world import world_of_one
from plait.core.names import resolve
from plait.launcher.display import Silent
from plait.launcher.run_dir import RunDir
from plait.planner import Plan, Schedule, Settings
from plait.schema.settings import PipelineSettings, TrainSettings
from plait.training import components
from plait.training.choose_engine import make_job_loop
from plait_bench.loops import Times, claims_of, parser_of, rows_of, show, time_steps

GOAL = 1.01
SCHEDULES = ("flush", "gpipe", "zero-bubble", "stash", "2bw")
# By name: the model, its arguments, the data and the batch size.
CASES: dict[str, dict[str, Any]] = {
    "transformer (4 x 128)": {
        "model": "plait.workloads.transformer:transformer",
        "model_args": {
            "vocabulary": 256, "context": 32, "layers": 4, "heads": 4, "width": 128, "dropout": 0.0,
        },
        "data": {"kind": "synthetic", "batch_size": 32, "shape": [32], "vocabulary": 256},
    },
    "VGG-16 (tiny)": {
        "model": "plait.workloads.vgg:vgg16_tiny",
        "data": {"kind": "digits", "batch_size": 32},
    },
}  # fmt: skip
MICROBATCHES = 4


def settings_of(case: str) -> TrainSettings:
    return plait.make_job(
        {
            "name": "bench",
            **CASES[case],
            "optimizer": {"kind": "sgd", "lr": 1e-3, "momentum": 0.9},
            "steps": 1_000_000,
            "device": "cpu",
            "checkpoint": {"every_steps": 1_000_000},
            "verify": "off",
        }
    ).settings()


def plan_of(case: str, schedule: str) -> Plan:
    """Two stages of the model."""
    settings = settings_of(case)
    model = resolve(settings.model.factory, "model")(**settings.model.args)
    data = components.build(settings, torch.device("cpu")).train_set
    inputs, _ = data.first_batch(settings.data.batch_size // MICROBATCHES, settings.seed)
    wanted = Settings(Schedule(schedule), MICROBATCHES, straight=True)
    return plait.plan(plait.profile(model, inputs), plait.machines(2, 1e10), wanted)


def measure(case: str, plan: Plan, rounds: int, steps: int) -> Times:
    torch.set_num_threads(1)
    world = plait.init("cpu")
    settings = replace(settings_of(case), pipeline=PipelineSettings(plan))
    parts = components.build(settings, world.device)
    dataset, loss = parts.train_set.dataset, parts.loss
    with tempfile.TemporaryDirectory() as folder:
        loop = make_job_loop(JoinedWorker(world, Silent()), settings, parts, RunDir(Path(folder)))
        loop.start(resume=False)
        loop.begin(settings.steps or 0)
        torch.manual_seed(settings.seed)
        model = resolve(settings.model.factory, "model")(**settings.model.args)
        loader = plait.DataLoader(dataset, settings.data.batch_size, world=world_of_one("cpu"))
        x, _ = next(iter(loader))
        make = partial(torch.optim.SGD, lr=1e-3, momentum=0.9)
        pipe = plait.Pipeline(
            model, plan, example_inputs=(x,), loss=loss, optimizer=make, microbatches=MICROBATCHES
        )
        epoch = loader if pipe.reads_inputs else _without_contents(x, len(dataset))
        batches = itertools.chain.from_iterable(itertools.repeat(epoch))

        def library() -> None:
            for inputs, target in itertools.islice(batches, steps):
                pipe.step(inputs, target)
            pipe.drain()

        times = time_steps({"job": lambda: loop.advance(steps), "library": library}, rounds, steps)
        loop.engine.close()
        pipe.close()
    return times


def _without_contents(example: Tensor, samples: int) -> list[tuple[Tensor, None]]:
    """The batches of an epoch for a worker that reads no data: their shapes."""
    starts = range(0, samples, len(example))
    sizes = [min(len(example), samples - start) for start in starts]
    return [(torch.empty_like(example[:size], device="meta"), None) for size in sizes]


def main() -> None:
    parser = parser_of(__doc__, rounds=11, steps=20)
    parser.add_argument("--schedule", action="append", choices=SCHEDULES, help="only this one")
    asked = parser.parse_args()
    rows = []
    for case, schedule in itertools.product(CASES, asked.schedule or SCHEDULES):
        plan = plan_of(case, schedule)
        times = plait.launch(measure, case, plan, asked.rounds, asked.steps, workers=2)
        rows += rows_of({"model": case, "schedule": schedule}, times, "job")
    show("pipeline_loop", asked, rows, claims_of(rows, ["model", "schedule"], "library", "the job's", GOAL))


if __name__ == "__main__":
    main()
