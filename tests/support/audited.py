"""User code that is easily trained wrongly, and runs of it whose audits are looked at."""

from __future__ import annotations

import contextlib
import contextvars
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor, nn

from plait.data.seeding import mix, seed_all
from plait.launcher.run_dir import RunDir
from plait.pipeline.gradient_sync import GradientReducer
from plait.schema.settings import TrainSettings
from plait.sync.allreduce.buckets import AllReduce
from plait.training import components
from plait.training.audit.record import DifferenceError
from plait.training.choose_engine import make_loop
from plait.training.components import Components
from plait.training.run import Run
from support.training import PlainWorker


class Lora(nn.Module):
    """A layer whose low-rank part is merged into its weight while it is evaluated."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(64, 10)
        self.down = nn.Parameter(torch.randn(4, 64) * 0.1)
        self.up = nn.Parameter(torch.zeros(10, 4))
        self.merged = False

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        if self.merged == mode:
            sign = -1 if mode else 1
            self.base.weight.data += sign * self.up.detach() @ self.down.detach()
            self.merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x.flatten(1))
        return y if self.merged else y + x.flatten(1) @ self.down.T @ self.up.T


class SharedAndCheckpointed(nn.Module):
    """A layer that is used twice, each time under reentrant checkpointing: its gradient comes in parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared, self.last = nn.Linear(64, 16), nn.Linear(16, 16), nn.Linear(16, 10)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x.flatten(1))
        for _ in range(2):
            y = torch.utils.checkpoint.checkpoint(lambda z: self.shared(z).tanh(), y, use_reentrant=True)
        return self.last(y)


class Counting(nn.Module):
    """A block whose forward goes by how often it was called: every tenth time it does something else."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(16, 16), nn.Linear(16, 16)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.other(self.one(x).relu())
        return y * 2 if self.calls % 10 == 0 else y


class CountingInClass(Counting):
    """The same, for all such blocks together."""

    counted = 0

    def forward(self, x: Tensor) -> Tensor:
        CountingInClass.counted += 1
        y = self.other(self.one(x).relu())
        return y * 2 if CountingInClass.counted % 10 == 0 else y


class CountingInDict(Counting):
    """The same, in a dict, by a name that torch's optimizers have."""

    def __init__(self) -> None:
        super().__init__()
        self.state = {"calls": 0}

    def forward(self, x: Tensor) -> Tensor:
        self.state["calls"] += 1
        y = self.other(self.one(x).relu())
        return y * 2 if self.state["calls"] > 9 else y


class Shared(nn.Module):
    """Two blocks that count together, in one dict, and go by the count; `train` counts, too."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(64, 16), nn.Linear(16, 10)
        self.counts = {"calls": 0}
        self.block = SharedBlock(self.counts)
        self.modes = 0

    def train(self, mode: bool = True) -> nn.Module:
        self.modes += 1
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        self.counts["calls"] += 1
        y = self.block(self.one(x.flatten(1)))
        return self.other(y) * (1 + 0.05 * self.counts["calls"]) * (1 + 0.01 * self.modes)


PHASE = contextvars.ContextVar("phase", default=0)
HERE = threading.local()
HERE.calls = 0


def scale(y: Tensor) -> Tensor:
    scale.calls += 1  # type: ignore[attr-defined]
    return y * (1 + 0.05 * scale.calls)  # type: ignore[attr-defined]


scale.calls = 0  # type: ignore[attr-defined]


class CountsOutside(nn.Module):
    """Counts where no module is: in a context, the environment, a thread's own place, a function."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)
        PHASE.set(0)
        HERE.calls = scale.calls = 0  # type: ignore[attr-defined]
        os.environ["PLAIT_TEST_CALLS"] = "0"

    def forward(self, x: Tensor) -> Tensor:
        PHASE.set(PHASE.get() + 1)
        HERE.calls += 1
        os.environ["PLAIT_TEST_CALLS"] = str(int(os.environ["PLAIT_TEST_CALLS"]) + 1)
        calls = PHASE.get() + HERE.calls + int(os.environ["PLAIT_TEST_CALLS"])
        return scale(self.layer(x.flatten(1))) * (1 + 0.05 * calls)


class SharedBlock(nn.Module):
    def __init__(self, counts: dict[str, int]) -> None:
        super().__init__()
        self.counts = counts

    def forward(self, x: Tensor) -> Tensor:
        self.counts["calls"] += 1
        return x.tanh() * (1 + 0.05 * self.counts["calls"])


class Remembering(nn.Module):
    """A block that keeps what nobody reads: its last output, and how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(16, 16), nn.Linear(16, 16)
        self.calls, self.last = 0, torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        y = self.other(self.one(x).relu())
        self.calls, self.last = self.calls + 1, y.detach()
        return y


def with_block(block: str) -> nn.Module:
    """A model in which cuts pass through a block of that name."""
    kinds = {
        "counting": Counting,
        "counting in its class": CountingInClass,
        "counting in a dict": CountingInDict,
        "remembering": Remembering,
    }
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), kinds[block](), nn.Linear(16, 10))


class OwnRate(torch.optim.SGD):
    """Lowers its own learning rate at each step."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            group["lr"] *= 0.5


class Noisy(torch.optim.SGD):
    """Adds random numbers to the weights."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter += 0.01 * torch.randn_like(parameter)


@contextlib.contextmanager
def flags_alone(model: nn.Module) -> Iterator[None]:
    """Evaluation mode that ends with the flags of modules, whose own `train` is not called."""
    before = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in before.items():
            module.training = training


def rates_anew(optimizer: torch.optim.Optimizer, base_lrs: Sequence[float], factor: float) -> None:
    """Sets learning rates at each step, whatever an optimizer has made of them."""
    for group, base in zip(optimizer.param_groups, base_lrs):
        group["lr"] = base * factor


_take = AllReduce._take


def take_first(self: AllReduce, index: int, place: int, parameter: Tensor) -> None:
    """Of a gradient that comes in parts, the first alone is summed."""
    if self._buckets[index].filled[place]:
        parameter.grad = None
    else:
        _take(self, index, place, parameter)


def clip_each(self: GradientReducer, most: float, device: torch.device, everyone: object = None) -> None:
    """Each stage clips by its own norm."""
    self.clip_stage(most)


def use_model(run: Run) -> None:
    """A look at the model before the first step, which leaves what forward counts."""
    run.components.model(torch.zeros(4, 64, dtype=torch.float64))


def seed_apart(parts: Components, seed: int, step: int, rank: int) -> None:
    """Each worker goes on with random numbers of its own in the update."""
    seed_all(mix(seed, step, rank))


# What is put in the place of a part of an engine, which is then wrong.
BROKEN: dict[str, tuple[str, Any]] = {
    "flags alone": ("plait.training.evaluate.evaluation_mode", flags_alone),
    "rates anew": ("plait.training.components.set_lr", rates_anew),
    "a seed for each worker": ("plait.training.components.Components.seed_step", seed_apart),
    "later parts are lost": ("plait.sync.allreduce.buckets.AllReduce._take", take_first),
    "state in Python is not seen": ("plait.profiler.trace.changed_state", lambda before, state: []),
    "a model that was used": ("plait.training.run_loop.check_loss", use_model),
    "stages clip for themselves": ("plait.pipeline.gradient_sync.GradientReducer.clip_model", clip_each),
}


def audits(
    rank: int, jobs: dict[str, TrainSettings], folder: Path, broken: Mapping[str, str] | None = None
) -> dict[str, tuple[int, float, str]]:
    """By job, the number of audited steps, the largest difference, and the words of what ended the run.

    `broken` says by job which part of the engine is wrong.
    """
    found = {}
    for name, job in jobs.items():
        torch.set_num_threads(1)
        words = ""
        with contextlib.ExitStack() as around:
            if broken is not None:
                around.enter_context(mock.patch(*BROKEN[broken[name]]))
            parts = components.build(job, torch.device("cpu"))
            loop = make_loop(PlainWorker(), job, parts, RunDir(folder / name))
            try:
                loop.train(resume=False)
            except DifferenceError as failure:
                words = str(failure)
        found[name] = loop.run.audits.steps, loop.run.audits.largest, words
        if dist.is_initialized():
            dist.barrier()
    return found
