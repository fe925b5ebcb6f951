"""What `plait train` costs against a loop written by hand.

The same job, in the same processes, in turn: a plain PyTorch loop (with DistributedDataParallel on two
workers) and Plait's trainer with its events, seeding, progress and stop checks. One thread a worker.

    python benchmarks/train_overhead.py [--rounds 11] [--steps 25]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.distributed_c10d import _get_default_store
from torch.nn.parallel import DistributedDataParallel

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

    def run(self, steps: int) -> float:
        started = time.perf_counter()
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
        return (time.perf_counter() - started) / steps


class Ours:
    """The same job in Plait's trainer; every call goes on for `steps` more steps."""

    def __init__(self, settings: TrainSettings, rank: int, world_size: int, folder: Path) -> None:
        parts = components.build(settings, torch.device("cpu"))
        worker: Any = LoneWorker(rank, world_size)
        run = Run(worker, settings, parts, RunDir(folder))
        self.loop = RunLoop(run, whole_model_engine(run))
        self.loop.start(resume=False)

    def run(self, steps: int) -> float:
        loop = self.loop
        loop.begin(loop.run.trial.step + steps)
        started = time.perf_counter()
        loop.take_steps()
        return (time.perf_counter() - started) / steps


def measure(rank: int, world_size: int, name: str, rounds: int, steps: int, store: str, answer: Any) -> None:
    torch.set_num_threads(1)
    if world_size > 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    with tempfile.TemporaryDirectory() as folder:
        settings = settings_of(name, steps)
        sides = {
            "plain": Plain(settings, rank, world_size),
            "plait": Ours(settings, rank, world_size, Path(folder)),
        }
        times: dict[str, list[float]] = {side: [] for side in sides}
        for round_ in range(rounds + 1):
            for side in ("plain", "plait") if round_ % 2 else ("plait", "plain"):
                if world_size > 1:
                    dist.barrier()
                seconds = sides[side].run(steps)
                if round_ > 0:  # the first round warms up
                    times[side].append(seconds)
    if rank == 0:
        answer.put(times)


def run_case(world_size: int, name: str, rounds: int, steps: int) -> dict[str, Any]:
    context = mp.get_context("spawn")
    answer = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        args = (world_size, name, rounds, steps, store, answer)
        mp.spawn(measure, args=args, nprocs=world_size, join=True)
    times = answer.get()
    ratios = [ours / plain for ours, plain in zip(times["plait"], times["plain"])]
    quartiles = statistics.quantiles(ratios, n=4)
    return {
        "workers": world_size,
        "job": name,
        "plain_ms": statistics.median(times["plain"]) * 1e3,
        "plait_ms": statistics.median(times["plait"]) * 1e3,
        "ratio": statistics.median(ratios),
        "quartiles": (quartiles[0], quartiles[2]),
        "goal": GOALS[world_size],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--steps", type=int, default=25)
    asked = parser.parse_args()
    print(f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}")
    print(f"claim: a step takes at most {GOALS[1]}x a plain loop's, {GOALS[2]}x DDP's on two workers")
    print(f"{'workers':7}  {'job':34} {'plain ms':>8}  {'plait ms':>8}  {'ratio (quartiles)':>20}  holds")
    failed = False
    for world_size in GOALS:
        for name in JOBS:
            row = run_case(world_size, name, asked.rounds, asked.steps)
            low, high = row["quartiles"]
            holds = row["ratio"] <= row["goal"]
            failed |= not holds
            ratio = f"{row['ratio']:.3f} ({low:.3f}-{high:.3f})"
            print(
                f"{world_size:7}  {name:34} {row['plain_ms']:8.2f}  {row['plait_ms']:8.2f}  {ratio:>20}  "
                f"{'yes' if holds else 'NO'}",
                flush=True,
            )
    sys.exit(failed)


if __name__ == "__main__":
    main()
