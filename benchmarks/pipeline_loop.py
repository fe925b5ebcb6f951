"""What a step of `plait.Pipeline` in a loop costs against the same plan in a job.

Two workers of this machine train the same model with both, in turn, under the same plan and schedule, one
thread each. Besides seconds it shows the CPU time of a step, which other processes disturb less.

    python benchmarks/pipeline_loop.py [--rounds 11] [--steps 20]
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

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
from plait_bench.harness import Bench, BenchClaim, Row, at_most, in_turns, seconds_of_all

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


def measure(case: str, plan: Plan, rounds: int, steps: int) -> dict[str, list[tuple[float, float]]]:
    """By door: seconds and CPU seconds of a step in each round."""
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
        alone = world_of_one("cpu")
        loader = plait.DataLoader(dataset, settings.data.batch_size, drop_last=True, world=alone)
        batches = itertools.chain.from_iterable(itertools.repeat(loader))
        x, _ = next(batches)
        make = partial(torch.optim.SGD, lr=1e-3, momentum=0.9)
        pipe = plait.Pipeline(
            model, plan, example_inputs=(x,), loss=loss, optimizer=make, microbatches=MICROBATCHES
        )

        def library() -> None:
            for inputs, target in itertools.islice(batches, steps):
                pipe.step(inputs, target)
            pipe.drain()

        cpu_times: dict[str, list[float]] = {"job": [], "library": []}

        def side(name: str, work: Callable[[], None]) -> Callable[[bool], float]:
            def run(counts: bool) -> float:
                started = time.process_time()
                seconds = seconds_of_all(work) / steps
                if counts:
                    cpu_times[name].append((time.process_time() - started) / steps)
                return seconds

            return run

        sides = {"job": side("job", lambda: loop.advance(steps)), "library": side("library", library)}
        wall_times = in_turns(sides, rounds)
        loop.engine.close()
        pipe.close()
    return {name: list(zip(wall_times[name], cpu_times[name])) for name in sides}


def row_of(case: str, schedule: str, rounds: int, steps: int) -> Row:
    plan = plan_of(case, schedule)
    times = plait.launch(measure, case, plan, rounds, steps, workers=2)
    # The CPU time of both workers together.
    cpu = {
        door: [sum(worker[door][n][1] for worker in times) for n in range(rounds)]
        for door in ("job", "library")
    }
    wall = {door: [seconds for seconds, _ in times[0][door]] for door in ("job", "library")}
    ratios = [ours / job for ours, job in zip(wall["library"], wall["job"])]
    low, _, high = statistics.quantiles(ratios, n=4)
    return {
        "model": case,
        "schedule": schedule,
        "job ms": statistics.median(wall["job"]) * 1e3,
        "library ms": statistics.median(wall["library"]) * 1e3,
        "ratio": statistics.median(ratios),
        "quartiles": f"{low:.3f}-{high:.3f}",
        "CPU ratio": statistics.median(ours / job for ours, job in zip(cpu["library"], cpu["job"])),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--schedule", action="append", choices=SCHEDULES, help="only this one")
    asked = parser.parse_args()
    schedules = asked.schedule or SCHEDULES
    rows = [row_of(case, each, asked.rounds, asked.steps) for case in CASES for each in schedules]
    claims: list[BenchClaim] = [
        at_most(
            f"{row['model']}, {row['schedule']}: a step takes this much of the job's",
            float(str(row["ratio"])),
            GOAL,
        )
        for row in rows
    ]
    command = f"python benchmarks/pipeline_loop.py --rounds {asked.rounds} --steps {asked.steps}"
    bench = Bench("pipeline_loop", command, rows, claims)
    print(bench.render())
    sys.exit(not bench.holds)


if __name__ == "__main__":
    main()
