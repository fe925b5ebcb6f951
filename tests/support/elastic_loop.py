"""A loop with `plait.Elastic`, and what happens to its workers; light, as new processes import it."""

from __future__ import annotations

import copy
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import ExponentialLR, StepLR
from torch.utils.data import TensorDataset

import plait

EPOCHS, STEPS = 4, 24
# Steps in which, in this order, worker 1 is killed, all wait for the one in its place, worker 2 leaves, and
# the function of worker 0 ends.
KILLED, JOINED, LEFT, ENDED = 4, 6, 11, 17


class Counted(nn.Linear):
    """A layer that counts its forwards in training."""

    def __init__(self) -> None:
        super().__init__(3, 4)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, input: Tensor) -> Tensor:
        self.seen += 1
        return super().forward(input)


class Loop:
    """A loop over 4 epochs of 6 batches, the last of which is smaller, with all that may be registered.

    If `is_fused`, it is the first of two trials, which have unlike learning rates.
    """

    def __init__(self, device: str = "cpu", topology: str = "default", is_fused: bool = False) -> None:
        self.world = plait.init(device)
        torch.manual_seed(0)
        x = torch.randn(33, 3, dtype=torch.float64)
        model = nn.Sequential(Counted(), nn.Tanh(), nn.Linear(4, 1)).double().to(self.world.device)
        self.fused = plait.fuse([model, copy.deepcopy(model)]) if is_fused else None
        self.model = plait.DataParallel(self.fused or model, topology)
        self.optimizer: torch.optim.Optimizer = (
            plait.FusedOptimizer(self.fused, "sgd", lr=[0.1, 0.03], momentum=0.9)
            if self.fused is not None
            else torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        )
        self.scheduler, self.of_epochs = StepLR(self.optimizer, 5), ExponentialLR(self.optimizer, 0.5)
        self.loader = plait.DataLoader(TensorDataset(x, x.square().sum(1, keepdim=True)), batch_size=6)
        self.counts = {"steps": 0}
        state = {"scheduler": self.scheduler, "of_epochs": self.of_epochs, "counts": self.counts}
        self.elastic = plait.Elastic(self.model, self.optimizer, loader=self.loader, **state)

    def batches(self) -> Iterator[Any]:
        while self.loader.epoch < EPOCHS:
            yield from self.loader
            self.of_epochs.step()

    def step(self, inputs: Tensor, target: Tensor) -> None:
        inputs, target = inputs.to(self.world.device), target.to(self.world.device)
        self.optimizer.zero_grad()
        self.loss(inputs, target).backward()
        self.optimizer.step()
        self.scheduler.step()
        self.counts["steps"] += 1

    def loss(self, inputs: Tensor, target: Tensor) -> Tensor:
        if self.fused is None:
            return mse_loss(self.model(inputs), target)
        each = self.fused.map(mse_loss, self.model(plait.Shared(inputs)), plait.Shared(target))
        return each.nan_to_num().sum()  # a worker without samples has none

    def result(self) -> dict[str, Any]:
        model = self.model if self.fused is None else self.fused.trial(0)
        weights = [parameter.tolist() for parameter in model.parameters()]
        rate, (seen,) = self.optimizer.param_groups[0]["lr"], model.buffers()
        rate = rate if self.fused is None else rate.of(0)
        steps = (self.elastic.step, self.counts["steps"], int(seen))
        changes = [(c.step, c.members, c.joined, c.left, c.lost) for c in self.elastic.changes]
        stalls = [change.seconds for change in self.elastic.changes]
        return {"weights": weights, "rate": rate, "steps": steps, "changes": changes, "stalls": stalls}


def run_alone(_rank: int = 0) -> dict[str, Any]:
    loop = Loop()
    for batch in loop.batches():
        loop.step(*batch)
    return loop.result()


def eventful(device: str = "cpu", is_fused: bool = False) -> dict[str, Any] | None:
    """The loop of workers of which one is killed in backward, one leaves, and one ends before the others."""
    loop = Loop(device, is_fused=is_fused)
    elastic, worker = loop.elastic, loop.elastic.worker

    def kill(gradient: Tensor) -> None:
        if (worker, elastic.step) == (1, KILLED):
            os.kill(os.getpid(), signal.SIGKILL)

    next(loop.model.parameters()).register_hook(kill)
    for batch in loop.batches():
        if elastic.step == JOINED and worker in (0, 2):
            await_event(lambda: elastic._members.is_asked)
        if (worker, elastic.step) == (2, LEFT):
            elastic.leave()
        if (worker, elastic.step) == (0, ENDED):
            return None
        loop.step(*batch)
    return loop.result()


def await_event(has_come: Callable[[], bool], seconds: float = 90.0) -> None:
    end = time.monotonic() + seconds
    while not has_come():
        assert time.monotonic() < end
        time.sleep(0.01)
