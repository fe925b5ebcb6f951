"""User code that is easily trained wrongly, and runs of it whose audits are looked at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor, nn

from plait.launch.run_dir import RunDir
from plait.schema.settings import TrainSettings
from plait.training import components
from plait.training.audit.record import DifferenceError
from plait.training.worker import make_loop
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
    kinds = {"counting": Counting, "remembering": Remembering}
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


def audits(rank: int, jobs: dict[str, TrainSettings], folder: Path) -> dict[str, tuple[int, float, str]]:
    """By job, the number of audited steps, the largest difference, and the words of what ended the run."""
    found = {}
    for name, job in jobs.items():
        torch.set_num_threads(1)
        loop = make_loop(
            PlainWorker(), job, components.build(job, torch.device("cpu")), RunDir(folder / name)
        )
        words = ""
        try:
            loop.train(resume=False)
        except DifferenceError as failure:
            words = str(failure)
        found[name] = loop.run.audits.steps, loop.run.audits.largest, words
        if dist.is_initialized():
            dist.barrier()
    return found
