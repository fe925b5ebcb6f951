"""What `plait train` costs against a loop written by hand.

The same job, in the same processes, in turn: a plain PyTorch loop (with DistributedDataParallel on two
workers) and Plait's trainer with its events, seeding, progress and stop checks. One thread a worker.

    python benchmarks/train_overhead.py [--rounds 11] [--steps 25]
"""

from __future__ import annotations

import json
import os
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.distributed_c10d import _get_default_store
from torch.nn.parallel import DistributedDataParallel

import plait
from plait.comm.rendezvous import Rendezvous
from plait.launcher.membership import fixed_memberships
from plait.launcher.run_dir import RunDir
from plait.schema.settings import (
    CheckpointSettings,
    DataSettings,
    ModelSettings,
    OptimizerSettings,
    TrainSettings,
    VerifySettings,
)
from plait.training import components
from plait.training.choose_engine import whole_model_engine
from plait.training.run import Run
from plait.training.run_loop import RunLoop
from plait_bench.loops import Times, claims_of, parser_of, rows_of, show, time_steps

GOALS = {1: 1.03, 2: 1.05}
JOBS = {
    "ResNet-18 (tiny), digits": ("plait.workloads.resnet:resnet18_tiny", {}, "digits", {}, 64),
    "VGG-16 (tiny), digits": ("plait.workloads.vgg:vgg16_tiny", {}, "digits", {}, 128),
    "transformer (2 x 64, 32 tokens)": (
        "plait.workloads.transformer:transformer",
        {"vocabulary": 256, "context": 32, "layers": 2, "heads": 4, "width": 64, "dropout": 0.1},
        "synthetic",
        {"shape": [32], "vocabulary": 256},
        16,
    ),
}


class LoneWorker:
    """The trainer's view of a worker, with a real look at a stop file and a report that goes nowhere."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = self.local_rank = self.id = rank
        self.world_size = world_size
        self.host = "localhost"
        self.timeout_s = 60.0
        self.hosts = (self.host,) * world_size
        self.memberships = fixed_memberships(rank, self.hosts)

    @property
    def rendezvous(self) -> Rendezvous:
        return Rendezvous(
            _get_default_store(), b"a benchmark", self.rank, self.hosts, timeout_s=self.timeout_s
        )

    def stop_requested(self) -> bool:
        return os.path.exists("/tmp/plait-benchmark-never-stops")

    def report(self, progress: dict[str, Any]) -> None:
        json.dumps(progress)


def settings_of(name: str, steps: int) -> TrainSettings:
    factory, args, kind, options, batch = JOBS[name]
    return TrainSettings(
        name="bench",
        model=ModelSettings(factory, args),
        data=DataSettings(kind, batch, options),
        optimizer=OptimizerSettings("sgd", {"lr": 0.01, "momentum": 0.9}),
        steps=steps,
        device="cpu",
        checkpoint=CheckpointSettings(every_steps=1_000_000),
        # A round is a few steps; what audits cost a long run is measured by benchmarks/audit_cost.py.
        verify=VerifySettings(audit="off"),
    )


class Plain:
    """The job as a person writes it, fetching whole batches from the same data set."""

    def __init__(self, settings: TrainSettings, rank: int, world_size: int) -> None:
        parts = components.build(settings, torch.device("cpu"))
        self.model: torch.nn.Module = parts.model
        if world_size > 1:
            self.model = DistributedDataParallel(parts.model)
        self.loss, self.optimizer = parts.loss, parts.optimizer
        self.data = parts.train_set.dataset
        self.batch, self.rank, self.world_size = settings.data.batch_size, rank, world_size

    def run(self, steps: int) -> None:
        done = 0
        share = self.batch // self.world_size
        while done < steps:
            order = torch.randperm(len(self.data), generator=torch.Generator().manual_seed(done))
            for begin in range(0, len(order) - self.batch + 1, self.batch):
                chosen = order[begin + self.rank * share : begin + (self.rank + 1) * share]
                self.optimizer.zero_grad(set_to_none=True)
                x, y = self.data.collated_batch(chosen.tolist())
                self.loss(self.model(x), y).backward()
                self.optimizer.step()
                done += 1
                if done == steps:
                    break


class Ours:
    """The same job in Plait's trainer; every call goes on for `steps` more steps."""

    def __init__(self, settings: TrainSettings, rank: int, world_size: int, folder: Path) -> None:
        parts = components.build(settings, torch.device("cpu"))
        worker: Any = LoneWorker(rank, world_size)
        run = Run(worker, settings, parts, RunDir(folder))
        self.loop = RunLoop(run, whole_model_engine(run))
        self.loop.start(resume=False)

    def run(self, steps: int) -> None:
        loop = self.loop
        loop.begin(loop.run.trial.step + steps)
        loop.take_steps()


def measure(name: str, rounds: int, steps: int) -> Times:
    torch.set_num_threads(1)
    world = plait.init("cpu")
    settings = settings_of(name, steps)
    with tempfile.TemporaryDirectory() as folder:
        sides = {
            "plain": Plain(settings, world.rank, world.world_size),
            "plait": Ours(settings, world.rank, world.world_size, Path(folder)),
        }
        loops = {side: partial(each.run, steps) for side, each in sides.items()}
        return time_steps(loops, rounds, steps)


def main() -> None:
    asked = parser_of(__doc__, rounds=11, steps=25).parse_args()
    rows, claims = [], []
    for workers, goal in GOALS.items():
        found = []
        for name in JOBS:
            times = plait.launch(measure, name, asked.rounds, asked.steps, workers=workers)
            found += rows_of({"workers": workers, "job": name}, times, "plain")
        of = "a plain loop's" if workers == 1 else "DistributedDataParallel's"
        claims += claims_of(found, ["workers", "job"], "plait", of, goal)
        rows += found
    show("train_overhead", asked, rows, claims)


if __name__ == "__main__":
    main()
