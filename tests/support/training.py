"""Training runs inside test worlds: the real loop and engines with a worker that needs no launcher."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import nn

from plait.comm.rendezvous import Rendezvous
from plait.core.errors import JobError
from plait.launcher.membership import fixed_memberships
from plait.launcher.run_dir import RunDir
from plait.launcher.worker_process import Worker
from plait.schema.results import RunResult
from plait.schema.settings import (
    UNVERIFIED,
    CheckpointSettings,
    DataSettings,
    ModelSettings,
    OptimizerSettings,
    TrainSettings,
)
from plait.training import checkpoint as checkpoints
from plait.training import components
from plait.training.choose_engine import make_loop
from plait.training.components import Components
from plait.training.setup.memory import make_local_tensors
from plait.workloads import data
from plait.workloads.data.stored import Images, Split
from support.averaging import open_store
from support.meeting import rendezvous_of, world_store


class PlainWorker:
    """A `Worker` of the world this process is in, or alone, without a launcher around it.

    It asks to stop once `stop_file` is there, or after it was asked `stop_after` times whether it does.
    """

    def __init__(
        self,
        stop_file: Path | None = None,
        *,
        hosts: Sequence[str] | None = None,
        address: str | None = None,
        stop_after: float = math.inf,
    ) -> None:
        in_world = dist.is_initialized()
        self.rank = self.id = self.local_rank = dist.get_rank() if in_world else 0
        self.world_size = dist.get_world_size() if in_world else 1
        self.hosts = tuple(hosts or ("localhost",) * self.world_size)
        self.host = self.hosts[self.rank]
        self.memberships = fixed_memberships(self.rank, self.hosts)
        self.timeout_s = 30.0
        self.reports: list[dict[str, Any]] = []
        self._address = address
        self._stop_file = stop_file
        self._questions_left = stop_after

    @cached_property
    def store(self) -> dist.Store:
        """The job's store at its address or, without one, the world's own."""
        return world_store() if self._address is None else open_store(self._address, self.rank)

    @cached_property
    def rendezvous(self) -> Rendezvous:
        return rendezvous_of(self.rank, self.hosts, self.store, self.timeout_s)

    def stop_requested(self) -> bool:
        self._questions_left -= 1
        return self._questions_left < 0 or (self._stop_file is not None and self._stop_file.exists())

    def ask_to_stop(self) -> None:
        self._questions_left = 0

    def report(self, progress: dict[str, Any]) -> None:
        self.reports.append(dict(progress))

    def ask(self, question: Mapping[str, Any]) -> Mapping[str, Any]:
        raise AssertionError("there is no coordinator")

    def join(self, backend: str) -> None:
        """The world is there already."""
        assert backend == "gloo"


def small_net(classes: int = 10, dropout: float = 0.0) -> nn.Module:
    """A convolution without BatchNorm, so that N workers can equal one; of a norm that is quick to trace."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.ReLU(),
        # Behind ReLU: before it, the bias of the convolution would have no gradient but rounding.
        nn.LayerNorm(8),
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


class TwiceNamed(nn.Module):
    """Its last layers, and what they hold, have two names each; the first is not that by which they run."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(10))
        self.kept = nn.ModuleList([nn.BatchNorm1d(32)])
        self.first, self.norm, self.last = nn.Linear(64, 32), self.kept[0], nn.Linear(32, 10)
        self.last.bias = self.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x.flatten(1)).relu()))


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


class Counting(nn.Module):
    """Draws numbers of a law of which trials have no streams."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.flatten(1)) * torch.poisson(torch.ones(10) * 50) / 50


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


def digits(split: Split) -> Images:
    """The digits with a fifth of their test images: evaluations take longer than the few steps of a test."""
    whole: Any = data.build("digits", split)
    if split == "test":
        whole._pixels, whole._labels = whole._pixels[::5], whole._labels[::5]
    return whole


def large_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A loss whose gradient overflows in fp16 at the usual loss scale."""
    return 16 * nn.functional.cross_entropy(output, target)


def broken_gradient(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A loss that is a number and whose gradient is none."""
    return nn.functional.cross_entropy(output, target) + 0 * (output - output).square().sum().sqrt()


class Masked(nn.Module):
    """A model with a mask that is infinite in places, as a buffer and as a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)
        self.register_buffer("mask", torch.tensor([0.0, -math.inf]))
        self.frozen = nn.Parameter(torch.tensor(math.inf), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.flatten(1)) * torch.softmax(self.mask, 0)[0] + 1 / self.frozen


def digits_job(**changes: Any) -> TrainSettings:
    values: dict[str, Any] = {
        "name": "t",
        "model": ModelSettings("support.training:small_net"),
        "data": DataSettings("support.training:digits", 64),
        "optimizer": OptimizerSettings("sgd", {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3}),
        "steps": 50,
        "precision": "float64",
        "device": "cpu",
        "log_every_steps": 1,
        "checkpoint": CheckpointSettings(every_steps=10_000),
    }
    return TrainSettings(**{**values, **changes})


def unverified_job(**changes: Any) -> TrainSettings:
    """`digits_job` without verification and audits, which take a third of a small run's CPU time.

    For tests that compare the run with another one themselves; tests/training/test_audit.py and the modules
    `test_*verif*.py` and `test_*audit*.py` test verification.
    """
    return digits_job(**{"verify": UNVERIFIED} | changes)


def train_with(
    worker: Worker, settings: TrainSettings, folder: Path, resume: bool = False, in_pieces: bool = False
) -> tuple[RunResult, Components]:
    """The result of a run as this worker gives it, and what it was trained on."""
    torch.set_num_threads(1)
    cpu = torch.device("cpu")
    local_tensors = make_local_tensors(settings, cpu) if in_pieces else None
    parts = components.build(settings, cpu, local_tensors=local_tensors)
    return make_loop(worker, settings, parts, RunDir(folder)).train(resume), parts


def train_here(
    settings: TrainSettings, folder: Path, resume: bool = False, stop_file: Path | None = None
) -> tuple[RunResult, dict[str, torch.Tensor]]:
    """The result and the weights of a run in this process, or of this rank of the world it is in."""
    result, parts = train_with(PlainWorker(stop_file), settings, folder, resume)
    tensors = {n: v for n, v in parts.model.state_dict().items() if isinstance(v, torch.Tensor)}
    return result, {name: value.clone() for name, value in tensors.items()}


def train_rank(
    rank: int,
    settings: TrainSettings,
    folder: Path,
    resume: bool = False,
    stop_file: Path | None = None,
    in_pieces: bool = False,
    **given: Any,
) -> tuple[RunResult, dict[str, Any]]:
    """A run of any kind on this rank of a world: its result, and of a worker with a whole model its weights.

    These are nested lists, which any process can read. `given` are further arguments of `PlainWorker`.
    """
    result, parts = train_with(PlainWorker(stop_file, **given), settings, folder, resume, in_pieces)
    whole = parts.model.state_dict() if settings.pipeline is None else {}
    return result, {name: value.tolist() for name, value in whole.items() if isinstance(value, torch.Tensor)}


def train_each(rank: int, jobs: dict[str, TrainSettings], folder: Path) -> dict[str, RunResult]:
    """The results of several jobs, one after the other, each in a folder of its name: worlds start slowly."""
    found = {}
    for name, settings in jobs.items():
        found[name], _ = train_rank(rank, settings, folder / name)
        dist.barrier()
    return found


def refused_rank(rank: int, settings: TrainSettings, folder: Path) -> str:
    """The words in which a run is refused on this rank of the world; none where it is not."""
    try:
        train_rank(rank, settings, folder)
    except JobError as failure:
        return str(failure)
    return ""


def saved_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of a run's newest checkpoint."""
    return checkpoints.load(checkpoints.list_checkpoints(RunDir(folder).checkpoints)[0]).model


def largest_difference(a: dict[str, Any], b: dict[str, Any]) -> float:
    assert a.keys() == b.keys()
    return max(float((_tensor(a[k]) - _tensor(b[k])).abs().max()) for k in a)


def _tensor(value: Any) -> torch.Tensor:
    return torch.as_tensor(value, dtype=torch.float64)
