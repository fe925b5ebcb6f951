"""Training runs inside test worlds: the real trainer with a worker that needs no launcher."""

from __future__ import annotations

import random
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import nn

from plait.comm.rendezvous import Rendezvous
from plait.launch.run_dir import RunDir
from plait.schema.settings import (
    CheckpointSettings,
    DataSettings,
    ModelSettings,
    OptimizerSettings,
    TrainSettings,
)
from plait.training import checkpoint as checkpoints
from plait.training import components
from plait.training.engines.data_parallel import DataParallelEngine
from plait.training.engines.pipeline import PipelineEngine
from plait.training.loop import Loop
from plait.training.run import Run
from plait.workloads import data
from support.meeting import rendezvous_of


class TestWorker:
    """What the trainer asks of a worker, without processes around it."""

    __test__ = False

    def __init__(self, rank: int = 0, world_size: int = 1, stop_file: Path | None = None) -> None:
        self.rank = self.id = rank
        self.world_size = world_size
        self.memberships = None
        self.local_rank = rank
        self.host = "localhost"
        self.hosts = ("localhost",) * world_size
        self.timeout_s = 30.0
        self.reports: list[dict[str, Any]] = []
        self._stop_file = stop_file
        self._asked_to_stop = False

    @cached_property
    def rendezvous(self) -> Rendezvous:
        return rendezvous_of(self.rank, self.hosts, getattr(self, "store", None), self.timeout_s)

    def stop_requested(self) -> bool:
        return self._asked_to_stop or (self._stop_file is not None and self._stop_file.exists())

    def ask_to_stop(self) -> None:
        self._asked_to_stop = True

    def report(self, progress: dict[str, Any]) -> None:
        self.reports.append(dict(progress))


def small_net(classes: int = 10, dropout: float = 0.0) -> nn.Module:
    """A convolution without BatchNorm, so that N workers can equal one."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(256, classes),
    )


def norm_net(classes: int = 10) -> nn.Module:
    """A convolution with BatchNorm and dropout: running statistics and random numbers to restore."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(256, classes),
    )


class HalfUsed(nn.Module):
    """A model with a parameter that no forward pass uses."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(64, 10)
        self.unused = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x.flatten(1))


class NanAtFirst(nn.Module):
    """A model whose first evaluation is not a number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)
        self.evaluations = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x.flatten(1))
        if self.training:
            return y
        self.evaluations += 1
        return y * float("nan") if self.evaluations == 1 else y


class Drawing(nn.Module):
    """A model that remembers what it drew at random, from each source, in its last training step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)
        self.register_buffer("drawn", torch.zeros(3, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            numbers = (int(torch.randint(1 << 30, ())), random.getrandbits(30), numpy.random.randint(1 << 30))
            self.drawn.copy_(torch.tensor(numbers))
        return self.layer(x.flatten(1))


class DrawingByRank(Drawing):
    """The same with a place for each of two workers, who come to hold the largest of their integers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("by_rank", torch.zeros(2, 3, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if self.training:
            self.by_rank[dist.get_rank() if dist.is_initialized() else 0] = self.drawn
        return y


def half_of_digits(split: str) -> torch.utils.data.Dataset[Any]:
    """Every second of the digits."""
    whole = data.build("digits", split)
    return torch.utils.data.Subset(whole, range(0, len(whole), 2))


def large_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A loss whose gradient overflows in fp16 at the usual loss scale."""
    return 16 * nn.functional.cross_entropy(output, target)


def digits_job(**changes: Any) -> TrainSettings:
    values: dict[str, Any] = {
        "name": "t",
        "model": ModelSettings("support.training:small_net"),
        "data": DataSettings("digits", 64),
        "optimizer": OptimizerSettings("sgd", {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3}),
        "steps": 50,
        "precision": "float64",
        "device": "cpu",
        "log_every_steps": 1,
        "checkpoint": CheckpointSettings(every_steps=10_000),
    }
    return TrainSettings(**{**values, **changes})


def train_here(
    settings: TrainSettings, folder: Path, resume: bool = False, stop_file: Path | None = None
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The result and the weights of a run in this process, or of this rank of the world it is in."""
    torch.set_num_threads(1)
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    parts = components.build(settings, torch.device("cpu"))
    run = Run(TestWorker(rank, size, stop_file), settings, parts, RunDir(folder))  # type: ignore[arg-type]
    result = Loop(run, DataParallelEngine(run)).train(resume)
    return result, {name: value.clone() for name, value in parts.model.state_dict().items()}


def train_rank(
    rank: int, settings: TrainSettings, folder: Path, resume: bool = False, stop_file: Path | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """As `train_here`, for `run_ranks`: weights as nested lists, which any process can read."""
    result, weights = train_here(settings, folder, resume, stop_file)
    return result, {name: value.tolist() for name, value in weights.items()}


def pipeline_rank(rank: int, settings: TrainSettings, folder: Path, resume: bool = False) -> dict[str, Any]:
    """The result of a pipelined run on this rank of a world, whose workers are on one host."""
    torch.set_num_threads(1)
    size = dist.get_world_size()
    parts = components.build(settings, torch.device("cpu"))
    worker: Any = TestWorker(rank, size)
    run = Run(worker, settings, parts, RunDir(folder))
    return Loop(run, PipelineEngine(run, ["here"] * size)).train(resume)


def train_each(rank: int, jobs: dict[str, TrainSettings], folder: Path) -> dict[str, dict[str, Any]]:
    """The results of several jobs, one after the other, each in a folder of its name: worlds start slowly."""
    found = {}
    for name, settings in jobs.items():
        run = pipeline_rank if settings.pipeline is not None else train_rank
        answer: Any = run(rank, settings, folder / name)
        found[name] = answer if isinstance(answer, dict) else answer[0]
        dist.barrier()
    return found


def saved_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of a run's newest checkpoint."""
    return checkpoints.load(checkpoints.list_checkpoints(RunDir(folder).checkpoints)[0]).model


def largest_difference(a: dict[str, Any], b: dict[str, Any]) -> float:
    assert a.keys() == b.keys()
    return max(float((_tensor(a[k]) - _tensor(b[k])).abs().max()) for k in a)


def _tensor(value: Any) -> torch.Tensor:
    return torch.as_tensor(value, dtype=torch.float64)
