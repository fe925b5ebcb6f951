"""Ordinary training code that a careless engine trains wrong without a word, and the loop it must equal.

Each case names its model, loss, optimizer and data as a job does, and the ways of training (`modes`) in which
it is easily trained wrong. `settings(case, mode)` is the job, `WORKERS[mode]` how many workers it takes, and
`plain(case, mode)` the state by name after the same steps of a loop of one's own, where that is defined. What
holds whatever the schedule, `holds` says of a trained state.
"""

from __future__ import annotations

import collections
import itertools
import random
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset, IterableDataset, default_collate

from plait.core.names import resolve
from plait.data.batches import DataSource
from plait.data.call_model import forward
from plait.data.loader import to_device
from plait.data.sampler import Position, batches
from plait.planner.schedules.in_flight import Schedule
from plait.schema.settings import (
    CheckpointSettings,
    DataSettings,
    EvaluateSettings,
    ModelSettings,
    OptimizerSettings,
    TrainSettings,
)
from plait.training.audit.schedule import USUAL_COST, is_audited
from plait.training.setup.model import build_model
from plait.workloads.losses import build_loss
from support.plans import in_stages, straight_layout

HERE = "support.silent_cases:"
SAMPLES, BATCH, STEPS, EVALUATE_EVERY = 16, 8, 6, 3
# Forwards after which something happens that the first ones do not show.
LATE = 6
# Workers of each way of training. Stages are cut in two; replicas both hold the one stage there is.
WORKERS = {"one": 1, "accumulate": 1, "two": 2, "replicas": 2}
WORKERS |= dict.fromkeys(("flush", "recompute", "zero-bubble", "stash", "2bw"), 2)
STAGES = ("flush", "recompute", "zero-bubble", "stash", "2bw")
# Those in stages that take a batch in two microbatches.
PARTS = ("flush", "recompute", "zero-bubble", "replicas")


# Models. Each takes four numbers and gives three logits, unless its data says otherwise.


class Net(nn.Module):
    """Two linear layers, with something in between."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.between(self.a(x)).tanh())

    def between(self, h: Tensor) -> Tensor:
        return h


class ByTask(Net):
    """Chooses its last layer by the task's name, which comes with the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({"even": nn.Linear(3, 3), "odd": nn.Linear(3, 3)})

    def forward(self, x: Tensor, task: str) -> Tensor:
        return self.heads[task](super().forward(x))


class ByTaskInside(Net):
    """Hands the task's name on to a module, which chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.c, self.chooser = nn.Linear(3, 3), Chooser()

    def forward(self, x: Tensor, task: str) -> Tensor:
        return self.chooser(self.c(super().forward(x)).tanh(), task)


class Chooser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.even, self.odd = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, h: Tensor, task: str) -> Tensor:
        return self.even(h) if task == "even" else self.odd(h)


class Tempered(Net):
    """Divides by a temperature that comes with the batch, in training only."""

    def forward(self, x: Tensor, temperature: float) -> Tensor:
        h = self.a(x).tanh()
        return self.b(h / temperature if self.training else h)


class TemperedInverse(Net):
    """Computes a number of the temperature first."""

    def forward(self, x: Tensor, temperature: float) -> Tensor:
        return self.b(self.a(x).tanh() * (1.0 / temperature))


class MeanTeacher(nn.Module):
    """A teacher that follows the student's weights in forward, and is used at its end."""

    def __init__(self, by_data: bool = True) -> None:
        super().__init__()
        self.student, self.teacher = Net(), Net().requires_grad_(False)
        # As it begins where the student does, forwards without updates move nothing.
        self.teacher.load_state_dict(self.student.state_dict())
        self.by_data = by_data

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.follow()
        y = self.student(x)
        with torch.no_grad():
            aim = self.teacher(x)
        return y + 0.1 * (y * aim)

    def follow(self) -> None:
        for own, other in zip(self.teacher.parameters(), self.student.parameters()):
            if self.by_data:
                own.data.mul_(0.9).add_(other.data, alpha=0.1)
            else:
                with torch.no_grad():
                    own.lerp_(other, 0.1)


def momentum_encoder() -> nn.Module:
    return MeanTeacher(by_data=False)


class Clamped(Net):
    """Keeps the weights that it trains within bounds, in forward."""

    def between(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            self.b.weight.clamp_(-0.2, 0.2)
        return h


class EvaluatesWithAverage(nn.Module):
    """Follows the weights of a layer in forward, and evaluates with what follows and the layer's bias."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.register_buffer("average", self.b.weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).tanh()
        if self.training:
            with torch.no_grad():
                self.average.lerp_(self.b.weight, 0.1)
            return self.c(self.b(h).tanh())
        return self.c(F.linear(h, self.average, self.b.bias).tanh())


class CountsInDict(Net):
    def __init__(self) -> None:
        super().__init__()
        self.state = {"calls": 0}

    def between(self, h: Tensor) -> Tensor:
        self.state["calls"] += 1
        return h * 2 if self.state["calls"] > LATE else h


class EverySeventh(Net):
    def __init__(self) -> None:
        super().__init__()
        self.n = 0

    def between(self, h: Tensor) -> Tensor:
        self.n += 1
        return h * 2 if self.n % (LATE + 1) == 0 else h


class Countdown(Net):
    def __init__(self) -> None:
        super().__init__()
        self.left = LATE

    def between(self, h: Tensor) -> Tensor:
        if self.left:
            self.left -= 1
            return h * 0.5
        return h


class Annealer:
    def __init__(self) -> None:
        self.calls = 0

    def step(self) -> float:
        self.calls += 1
        return max(1.0, self.calls / LATE)


class Anneals(Net):
    def __init__(self) -> None:
        super().__init__()
        self.annealer = Annealer()

    def between(self, h: Tensor) -> Tensor:
        return h * self.annealer.step()


class Window(Net):
    """Adds the mean of what the last forwards left."""

    def __init__(self) -> None:
        super().__init__()
        self.window: collections.deque[Tensor] = collections.deque(maxlen=LATE)

    def between(self, h: Tensor) -> Tensor:
        past = sum(self.window) / len(self.window) if len(self.window) == LATE else 0.0
        self.window.append(h.detach().mean(0))
        return h + past


class OwnNumbers(Net):
    """Leaves out by a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = random.Random(0)

    def between(self, h: Tensor) -> Tensor:
        return h * self.numbers.choice([0.5, 1.0, 2.0])


class StatefulBlock(nn.Module):
    """A block inside of a model that counts, in a list: it can stay in one stage."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.calls = nn.Linear(4, 4), [0]

    def forward(self, x: Tensor) -> Tensor:
        self.calls[0] += 1
        return self.net(x).tanh() / max(1, self.calls[0] - LATE)


def counting_block() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), StatefulBlock(), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 3))


_CALLS = {"count": 0}


class WritesGlobal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        _CALLS["count"] += 1
        return self.a(x).tanh()


class ReadsGlobal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.b = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(x) / max(1, _CALLS["count"] - LATE)


def through_a_global() -> nn.Module:
    _CALLS["count"] = 0
    return nn.Sequential(WritesGlobal(), nn.Linear(4, 4), ReadsGlobal())


class CountsInClass(Net):
    calls = 0

    def __init__(self) -> None:
        super().__init__()
        CountsInClass.calls = 0

    def between(self, h: Tensor) -> Tensor:
        CountsInClass.calls += 1
        return h / max(1, CountsInClass.calls - LATE)


class Masked(Net):
    """Weights that were pruned, whose gradients a hook masks."""

    def __init__(self) -> None:
        super().__init__()
        mask = (torch.arange(18).reshape(3, 6) % 2).double()
        self.b.weight.data.mul_(mask)
        self.b.weight.register_hook(lambda grad: grad * mask)
        self.a.weight.register_hook(lambda grad: grad * 0.5)


class ClippedByHook(Net):
    """Weights whose gradients are clipped once they are there."""

    def __init__(self) -> None:
        super().__init__()
        for layer in (self.a, self.b):
            layer.weight.register_post_accumulate_grad_hook(self.clip)

    @staticmethod
    def clip(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_((torch.arange(parameter.numel()).view_as(parameter) % 2).to(parameter.dtype))


class Lora(nn.Module):
    """A linear layer with an update of low rank, which is merged into its weights for evaluation."""

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__()
        self.base = nn.Linear(width_in, width_out).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, width_in) * 0.3)
        self.up = nn.Parameter(torch.randn(width_out, 2) * 0.3)
        self.merged = False

    def train(self, mode: bool = True) -> Lora:
        super().train(mode)
        if mode == self.merged:
            self.base.weight.data += (self.up @ self.down).data * (-1 if mode else 1)
            self.merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        return y if self.merged else y + F.linear(F.linear(x, self.down), self.up)


def lora() -> nn.Module:
    return nn.Sequential(Lora(4, 6), nn.Tanh(), Lora(6, 6), nn.Tanh(), Lora(6, 3))


class SwapsAverage(Net):
    """Evaluates with the average of its weights, which `train` puts in their place and takes out again."""

    def __init__(self) -> None:
        super().__init__()
        self.average = [p.detach().clone() for p in self.parameters()]
        self.swapped = False

    def train(self, mode: bool = True) -> SwapsAverage:
        super().train(mode)
        if mode == self.swapped:
            for parameter, other in zip(self.parameters(), self.average):
                kept = parameter.data.clone()
                parameter.data.copy_(other)
                other.copy_(kept)
            self.swapped = not mode
        return self


class FrozenNorm(Net):
    """A normalisation that is kept in evaluation mode on purpose."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.norm.running_mean.fill_(0.3)
        self.norm.eval()

    def between(self, h: Tensor) -> Tensor:
        return self.norm(h)


class FromPretrained(Net):
    """Comes in evaluation mode, as models that were loaded do."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.eval()

    def between(self, h: Tensor) -> Tensor:
        return self.norm(h)


class CheckpointedTwice(nn.Module):
    """Calls one layer twice, checkpointed the old way, and has a weight that it does not use."""

    def __init__(self, unused: bool = True) -> None:
        super().__init__()
        self.a, self.shared, self.b = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        if unused:
            self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).tanh()
        for _ in range(2):
            h = checkpoint(lambda y: self.shared(y).tanh(), h, use_reentrant=True)
        return self.b(h)


def checkpointed_all_used() -> nn.Module:
    return CheckpointedTwice(unused=False)


class ActNorm(Net):
    """Begins with the statistics of the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(6)), nn.Parameter(torch.zeros(6))
        self.register_buffer("ready", torch.zeros(()))

    def between(self, h: Tensor) -> Tensor:
        if not self.ready:
            with torch.no_grad():
                self.scale.copy_(1 / (h.std(0) + 1e-3))
                self.shift.copy_(-h.mean(0) * self.scale)
                self.ready.fill_(1)
        return h * self.scale + self.shift


class Remembers(Net):
    """Carries something over for each row of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(BATCH, 6))

    def between(self, h: Tensor) -> Tensor:
        y = h + 0.5 * self.rows[: len(h)]
        with torch.no_grad():
            self.rows[: len(h)] = h
        return y


class MemoryBank(Net):
    """Keeps the last features of each sample, by the sample's number."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", torch.zeros(SAMPLES, 6))

    def forward(self, x: Tensor, number: Tensor) -> Tensor:
        h = self.a(x).tanh()
        y = h + 0.5 * self.bank[number]
        if self.training:
            with torch.no_grad():
                self.bank[number] = h.detach()
        return self.b(y)


class ExtraState(Net):
    """Has state of its own kind in its state_dict."""

    def __init__(self) -> None:
        super().__init__()
        self.note = {"name": "net", "scale": torch.full((2,), 0.5)}

    def get_extra_state(self) -> Any:
        return self.note

    def set_extra_state(self, state: Any) -> None:
        self.note = state

    def between(self, h: Tensor) -> Tensor:
        return h * self.note["scale"].to(h)[0]


class HiddenBuffer(Net):
    """Follows its weights in a buffer that is in no state_dict."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()), persistent=False)

    def between(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.lerp_(self.a.weight.mean(), 0.2)
        return h + self.mean


class Cache(Net):
    """Makes a table once it knows the size."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = None

    def between(self, h: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.arange(6).to(h)
        return h + self.table


class SparseTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.b = nn.Embedding(12, 6, sparse=True), nn.Linear(6, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.b(self.table(tokens).mean(1).tanh())


class Lazy(Net):
    def __init__(self) -> None:
        super().__init__()
        self.b = nn.LazyLinear(3)


class WeightsInList(nn.Module):
    """Finds its weights in a list, besides where they hang."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.b = ListedBlock(), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.block(x).tanh())


class ListedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.a = nn.Linear(4, 4), nn.Linear(4, 6)
        self.listed = [self.a.weight, self.a.bias]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.first(x).tanh(), *self.listed)


class TiedInMemory(Net):
    """Two weights in one memory, made as they are trained: a conversion would hold them apart."""

    def __init__(self) -> None:
        super().__init__()
        self.double()
        self.c = nn.Linear(4, 6, dtype=torch.float64)
        self.c.weight = nn.Parameter(self.a.weight.detach())

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.b(self.c(x).relu())


class NumberedTwice(nn.Module):
    """Calls a part of a Sequential by itself, besides the module that it is in."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.b, self.c = Twice(), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.block(x) + self.block.inner[0](x)
        return self.c(self.b(h).tanh())


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * 2


# Losses.


class LearnedTemperature(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output / self.temperature, target) + 0.1 * self.temperature.square()


class Centred(nn.Module):
    """Takes a running mean of the outputs away, as DINO does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(3))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        loss = F.cross_entropy(output - self.centre.to(output), target)
        if self.training:
            with torch.no_grad():
                self.centre.mul_(0.5).add_(output.mean(0), alpha=0.5)
        return loss


class AnnealedLoss:
    """Counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return F.cross_entropy(output, target) / self.calls


# A loss that is there once for all that a process trains.
annealed = AnnealedLoss()
_LOSSES = {"calls": 0}


def annealed_by_global(output: Tensor, target: Tensor) -> Tensor:
    _LOSSES["calls"] += 1
    return F.cross_entropy(output, target) / _LOSSES["calls"]


def annealed_in_training(output: Tensor, target: Tensor) -> Tensor:
    """Knows by the gradient that it trains, and counts then only."""
    _LOSSES["calls"] += output.requires_grad
    return F.cross_entropy(output, target) / max(1, _LOSSES["calls"])


# Optimizers.


class _Own(torch.optim.Optimizer):
    """What these have in common: a rate, and `update(parameter, group, state)`."""

    def __init__(self, params: Any, lr: float = 0.1, **group: Any) -> None:
        super().__init__(params, {"lr": lr, **group})

    def trained(self) -> Iterator[tuple[nn.Parameter, dict[str, Any]]]:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    yield parameter, group


class ScheduleFree(_Own):
    """Averages weights; how far it is, is kept in its groups."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr, k=0, weight_sum=0.0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            group["weight_sum"] += group["k"] ** 0.5
            share = group["k"] ** 0.5 / group["weight_sum"]
            for p in group["params"]:
                if p.grad is not None:
                    z = self.state[p].setdefault("z", p.clone())
                    z.sub_(p.grad, alpha=group["lr"])
                    p.lerp_(z, share)


class HasModes(ScheduleFree):
    """Evaluates with other weights than it trains, between which its modes switch."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            group["train_mode"] = False

    def train(self) -> None:
        self._switch(True, 2.0)

    def eval(self) -> None:
        self._switch(False, 0.5)

    def step(self, closure: Any = None) -> None:
        assert all(group["train_mode"] for group in self.param_groups), "not in training mode"
        super().step()

    @torch.no_grad()
    def _switch(self, mode: bool, factor: float) -> None:
        for group in self.param_groups:
            if group["train_mode"] != mode:
                group["train_mode"] = mode
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], 1 - factor)


class StepsInGroup(_Own):
    """Momentum with a bias correction by the step, a number of the group, as apex keeps it."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
        for p, group in self.trained():
            mean = self.state[p].setdefault("mean", torch.zeros_like(p))
            mean.lerp_(p.grad, 0.1)
            p.sub_(mean, alpha=group["lr"] / (1 - 0.9 ** group["step"]))


class CountsItself(_Own):
    """Counts its steps in an attribute, and keeps what a checkpoint cannot hold."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.steps = 0
        self.seen: list[int] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.steps += 1
        self.seen.append(self.steps)
        for p, group in self.trained():
            p.sub_(p.grad, alpha=group["lr"] / self.steps)


class Around(_Own):
    """Another optimizer with something around it, as Lookahead is."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        own = [p for group in self.param_groups for p in group["params"]]
        self.base = torch.optim.SGD(own, lr=lr, momentum=0.9)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.base.step()
        for p, _ in self.trained():
            slow = self.state[p].setdefault("slow", p.clone())
            p.copy_(slow.lerp_(p, 0.5))


class GlobalNorm(_Own):
    """Divides by the norm over all parameters."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        norm = torch.stack([p.grad.square().sum() for p, _ in self.trained()]).sum().sqrt()
        for p, group in self.trained():
            p.sub_(p.grad / (norm + 1e-3), alpha=group["lr"])


class OwnRate(_Own):
    """Lowers its own rate."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p, group in self.trained():
            p.sub_(p.grad, alpha=group["lr"])
        for group in self.param_groups:
            group["lr"] *= 0.7


class Noisy(_Own):
    """Adds noise to its updates."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p, group in self.trained():
            p.sub_(p.grad + 0.1 * torch.randn_like(p), alpha=group["lr"])


class KeepsGradients(_Own):
    """Goes by the difference to the gradient before, which it keeps as it is."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p, group in self.trained():
            before = self.state[p].get("before")
            p.sub_(p.grad if before is None else p.grad + 0.5 * (p.grad - before), alpha=group["lr"])
            self.state[p]["before"] = p.grad


# Data.


class Rows(Dataset[Any]):
    """Four numbers and one of three classes a sample, whatever the split."""

    def __init__(self, split: str) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(SAMPLES, 4, generator=generator, dtype=torch.float64)
        self.y = torch.randint(0, 3, (SAMPLES,), generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> Any:
        return self.x[i], self.y[i]


class WithTask(Rows):
    """Batches say of what task they are, by their first sample."""

    def collate_fn(self, samples: list[Any]) -> Any:
        x, y = default_collate(samples)
        return {"x": x, "task": "odd" if int(y[0]) % 2 else "even"}, y


class WithTemperature(Rows):
    def collate_fn(self, samples: list[Any]) -> Any:
        x, y = default_collate(samples)
        return {"x": x, "temperature": 1.0 + float(x[0, 0].abs())}, y


class WithNumber(Rows):
    def __getitem__(self, i: int) -> Any:
        return (self.x[i], torch.tensor(i)), self.y[i]


class Tokens(Rows):
    def __getitem__(self, i: int) -> Any:
        return (torch.arange(5) * (i + 1)) % 12, self.y[i]


class Augmented(Rows):
    """Noise from a generator of its own."""

    def __init__(self, split: str) -> None:
        super().__init__(split)
        self.numbers = torch.Generator().manual_seed(1)

    def __getitem__(self, i: int) -> Any:
        return self.x[i] + torch.randn(4, generator=self.numbers, dtype=torch.float64), self.y[i]


class KeepsNoise(Rows):
    """Noise of the global generator, drawn where a sample is read first, and kept."""

    def __init__(self, split: str) -> None:
        super().__init__(split)
        self.kept: dict[int, Tensor] = {}

    def __getitem__(self, i: int) -> Any:
        if i not in self.kept:
            self.kept[i] = self.x[i] + torch.randn(4)
        return self.kept[i], self.y[i]


class ByEpoch(Rows):
    """Samples that depend on the epoch, which is set from outside."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, i: int) -> Any:
        return self.x[i] * (1 + self.epoch), self.y[i]


class Drawn(IterableDataset[Any]):
    """A stream that draws its samples from a generator that it was made with."""

    def __init__(self, split: str) -> None:
        self.generator = torch.Generator().manual_seed(3 if split == "train" else 4)

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[Any]:
        example, target = Rows("train")[0]
        for _ in range(SAMPLES):
            yield torch.randn(example.shape, generator=self.generator), target


class CountsEpochs(IterableDataset[Any]):
    """A stream that says after its last sample that an epoch is over."""

    def __init__(self, split: str) -> None:
        self.rows, self.epoch = Rows(split), 0

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[Any]:
        for x, y in zip(self.rows.x, self.rows.y):
            yield x * (1 + self.epoch), y
        self.epoch += 1


class ByRank(IterableDataset[Any]):
    """A stream that divides itself by rank, as is done for DistributedDataParallel, after `after` samples."""

    def __init__(self, split: str, after: int = 0) -> None:
        self.rows, self.after = Rows(split), after

    def __len__(self) -> int:
        return len(self.numbers())

    def numbers(self) -> list[int]:
        is_one_of_many = torch.distributed.is_initialized()
        rank = torch.distributed.get_rank() if is_one_of_many else 0
        world = torch.distributed.get_world_size() if is_one_of_many else 1
        return [*range(self.after), *range(self.after + rank, SAMPLES, world)]

    def __iter__(self) -> Iterator[Any]:
        return (self.rows[i] for i in self.numbers())


# Cases.


@dataclass(frozen=True)
class SilentCase:
    """Code that is easily trained wrong in `modes`, as a job names it."""

    name: str
    modes: tuple[str, ...]
    model: str = "Net"
    loss: str = "cross-entropy"
    optimizer: str = ""
    data: str = "Rows"
    options: Mapping[str, Any] = field(default_factory=dict)
    # The way of training that the others must equal, where there are random numbers that a loop cannot know.
    against: str | None = None
    # Of a trained state and the one that it began with: what is so under any schedule.
    holds: Callable[[dict[str, Tensor], dict[str, Tensor]], bool] | None = None


def _pruned_stay(found: dict[str, Tensor], before: dict[str, Tensor]) -> bool:
    kept = before["b.weight"] == 0
    return bool((found["b.weight"][kept] == 0).all()) and not torch.equal(
        found["b.weight"], before["b.weight"]
    )


def _masked_stay(found: dict[str, Tensor], before: dict[str, Tensor]) -> bool:
    moved = found["b.weight"] != before["b.weight"]
    return not bool(moved.flatten()[::2].any()) and bool(moved.any())


_STATE = ("flush", "recompute", "stash")
CASES = {
    case.name: case
    for case in (
        SilentCase("task name", STAGES, "ByTask", data="WithTask"),
        SilentCase("task name inside", STAGES, "ByTaskInside", data="WithTask"),
        SilentCase("temperature", STAGES, "Tempered", data="WithTemperature"),
        SilentCase("inverse temperature", STAGES, "TemperedInverse", data="WithTemperature"),
        SilentCase("mean teacher", STAGES, "MeanTeacher"),
        SilentCase("momentum encoder", STAGES, "momentum_encoder"),
        SilentCase("clamped weights", STAGES, "Clamped"),
        SilentCase("count in a dict", _STATE, "CountsInDict"),
        SilentCase("every seventh forward", _STATE, "EverySeventh"),
        SilentCase("countdown", _STATE, "Countdown"),
        SilentCase("annealer", _STATE, "Anneals"),
        SilentCase("window", _STATE, "Window"),
        SilentCase("own random numbers", _STATE, "OwnNumbers"),
        SilentCase("counting block", (*_STATE, "replicas"), "counting_block"),
        SilentCase("global", _STATE, "through_a_global"),
        SilentCase("class attribute", _STATE, "CountsInClass"),
        SilentCase("masked gradients", ("two", *STAGES), "Masked", holds=_pruned_stay),
        SilentCase("gradients clipped by a hook", ("two", *STAGES), "ClippedByHook", holds=_masked_stay),
        SilentCase("merged in evaluation", ("one", "two", "flush", "stash"), "lora"),
        SilentCase("swapped in evaluation", ("one", "two", "flush"), "SwapsAverage"),
        SilentCase("frozen norm", ("one", "flush"), "FrozenNorm"),
        SilentCase("from evaluation mode", ("one", "flush"), "FromPretrained"),
        SilentCase("checkpointed twice", ("two",), "CheckpointedTwice"),
        SilentCase("checkpointed, all used", ("two",), "checkpointed_all_used"),
        SilentCase("schedule-free", ("resume", "flush"), optimizer="ScheduleFree"),
        SilentCase("optimizer with modes", ("one", "resume", "two", "flush", "stash"), optimizer="HasModes"),
        SilentCase("steps in groups", ("resume", "flush"), optimizer="StepsInGroup"),
        SilentCase("steps in the optimizer", ("resume", "flush"), optimizer="CountsItself"),
        SilentCase("optimizer around another", ("one", "two", "flush"), optimizer="Around"),
        SilentCase("stream that draws", ("two", "flush"), data="Drawn", against="one"),
        SilentCase(
            "stream that counts epochs", ("two", "flush", "replicas"), data="CountsEpochs", against="one"
        ),
        SilentCase("stream by rank", ("two", "flush", "replicas"), data="ByRank"),
        SilentCase(
            "stream by rank, later", ("two", "flush", "replicas"), data="ByRank", options={"after": BATCH}
        ),
        SilentCase("first batch", ("two", "replicas"), "ActNorm"),
        SilentCase("noise", ("two",), optimizer="Noisy", against="one"),
        SilentCase("rows carried over", ("two", "replicas"), "Remembers"),
        SilentCase("memory bank", ("two", "replicas"), "MemoryBank", data="WithNumber"),
        SilentCase("kept gradients", ("two", "replicas", "flush", "zero-bubble"), optimizer="KeepsGradients"),
        SilentCase("loss with weights", ("one", "flush"), loss=f"{HERE}LearnedTemperature"),
        SilentCase("loss with a centre", ("one", "two", "flush"), loss=f"{HERE}Centred"),
        SilentCase("loss that counts", ("accumulate", "two", "flush"), loss=f"{HERE}AnnealedLoss"),
        SilentCase("loss instance", ("accumulate", "two", "flush"), loss=f"{HERE}annealed"),
        SilentCase("loss by a global", ("accumulate", "two"), loss=f"{HERE}annealed_by_global"),
        SilentCase("loss by gradient mode", ("accumulate", "two"), loss=f"{HERE}annealed_in_training"),
        SilentCase("norm of all", STAGES, optimizer="GlobalNorm"),
        SilentCase("own rate", ("one", "resume", "flush", "stash"), optimizer="OwnRate"),
        SilentCase("set_epoch", ("one", "two", "flush"), data="ByEpoch"),
        SilentCase("own augmentation", ("two",), data="Augmented"),
        SilentCase("kept augmentation", ("two",), data="KeepsNoise"),
        SilentCase("extra state", ("one", "two", "flush"), "ExtraState"),
        SilentCase("sparse table", ("two", "flush", "stash", "replicas"), "SparseTable", data="Tokens"),
        SilentCase("lazy", ("one", "flush"), "Lazy"),
        SilentCase("weights in a list", ("flush", "stash", "2bw"), "WeightsInList"),
        SilentCase("tied in memory", ("one", "two", "flush"), "TiedInMemory"),
        SilentCase("numbered twice", ("flush",), "NumberedTwice"),
    )
}


def settings(case: SilentCase, mode: str, **changes: Any) -> TrainSettings:
    """The job of a case, in one of the ways of training, which begins with losses that were not called."""
    annealed.calls = _LOSSES["calls"] = 0
    kind = f"{HERE}{case.optimizer}" if case.optimizer else "sgd"
    values: dict[str, Any] = {
        "name": "silent",
        "model": ModelSettings(f"{HERE}{case.model}"),
        "data": DataSettings(f"{HERE}{case.data}", BATCH, case.options),
        "loss": case.loss,
        "optimizer": OptimizerSettings(kind, {"lr": 0.1} if case.optimizer else {"lr": 0.1, "momentum": 0.5}),
        "steps": STEPS,
        "precision": "float64",
        "device": "cpu",
        # Microbatches of an evaluation are as large as the batches of a plain loop.
        "evaluate": EvaluateSettings(EVALUATE_EVERY, batch_size=BATCH * (2 if mode in PARTS else 1)),
        "checkpoint": CheckpointSettings(every_steps=10_000),
        "accumulate": 2 if mode == "accumulate" else 1,
    }
    job = TrainSettings(**{**values, **changes})
    if mode in ("replicas", *STAGES):
        job = _planned(job, mode)
    return job


def _planned(job: TrainSettings, mode: str) -> TrainSettings:
    layout = straight_layout((2,) if mode == "replicas" else (1, 1))
    names = {"replicas": "flush", "recompute": "flush"}
    schedule = Schedule(names.get(mode, mode))
    pieces = 2 if schedule.synchronous else 1
    # The layers are those of the whole model on one worker, also where a run would refuse it.
    recompute = (0, 1) if mode == "recompute" else ()
    return in_stages(job, layout, schedule, pieces, recompute=recompute)


def parts_of(mode: str) -> int | None:
    """In how many parts, one after the other, a plain loop takes a batch; None where no loop is the same."""
    return {"one": 1, "two": 1, "stash": 1, "2bw": None}.get(mode, 2)


def plain(case: SilentCase, mode: str, late: Collection[str] = (), **changes: Any) -> dict[str, Tensor]:
    """The model's state after a loop that knows nothing of Plait, with the same samples in the same order.

    Under stash, the gradients of the parameters `late`, those of the first of two stages, are computed with
    the weights of one update before, except for the first batch after a look at the test split, for a step
    that is audited, and for the one after it.
    """
    parts = parts_of(mode)
    assert parts is not None, f"{mode} updates late: no plain loop is the same"
    job = settings(case, "one", **changes)
    model = build_model(job.model, job.seed).double()
    model.train()
    # What is kept in evaluation mode on purpose stays so.
    if isinstance(model, FrozenNorm):
        model.norm.eval()
    loss = build_loss(job.loss, {})
    own = getattr(loss, "loss", None)
    trained = [p for p in model.parameters() if p.requires_grad]
    trained += list(own.double().parameters()) if isinstance(own, nn.Module) else []
    kind = resolve(job.optimizer.kind, "", ValueError) if case.optimizer else torch.optim.SGD
    optimizer = kind(trained, **job.optimizer.options)
    if hasattr(optimizer, "train"):
        optimizer.train()
    data = resolve(job.data.kind, "", ValueError)("train", **job.data.options)
    source = DataSource(data)
    order = batches(Position(), SAMPLES, BATCH, seed=job.seed, shuffle=not source.is_stream, keep_last=True)
    delayed = [p for name, p in model.named_parameters() if name in late and p.requires_grad]
    before = [p.detach().clone() for p in delayed]
    for step, batch in enumerate(itertools.islice(order, STEPS)):
        audited = [is_audited(job, each, USUAL_COST) for each in (step - 1, step)]
        if step % EVALUATE_EVERY == 0 or any(audited):
            before = [p.detach().clone() for p in delayed]
        newest = [p.detach().clone() for p in delayed]
        _fill(delayed, before)
        if hasattr(data, "set_epoch"):
            data.set_epoch(batch.epoch)
        optimizer.zero_grad()
        for inputs, target, count in _parts(source, batch, parts, job.seed):
            (loss(forward(model, inputs), target) * (count / len(batch.samples))).backward()
        _fill(delayed, newest)
        before = newest
        optimizer.step()
        # The last checkpoint is of before the last look.
        if (step + 1) % EVALUATE_EVERY == 0 and step + 1 < STEPS:
            if hasattr(optimizer, "eval"):
                optimizer.eval()
            _evaluate(model, loss, own, source, job.seed)
            if hasattr(optimizer, "train"):
                optimizer.train()
    return {n: v for n, v in model.state_dict().items() if isinstance(v, Tensor)}


def _fill(parameters: list[nn.Parameter], values: list[Tensor]) -> None:
    with torch.no_grad():
        for parameter, value in zip(parameters, values):
            parameter.copy_(value)


def _parts(source: DataSource, batch: Any, parts: int, seed: int) -> Iterator[tuple[Any, Any, int]]:
    """A batch in parts, each made of its own samples, as workers and microbatches are."""
    own = len(batch.samples) // parts
    for i in range(parts):
        part = source.batch(batch.epoch, batch.samples[i * own : (i + 1) * own], seed)
        inputs, target = to_device(part, torch.device("cpu"), torch.float64)
        yield inputs, target, own


def _evaluate(model: nn.Module, loss: Any, own: Any, source: DataSource, seed: int) -> None:
    """A look at the test split, as loops have it."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    if isinstance(own, nn.Module):
        own.eval()
    with torch.no_grad():
        for begin in range(0, SAMPLES, BATCH):
            content = source.batch(0, range(begin, begin + BATCH), seed)
            inputs, target = to_device(content, torch.device("cpu"), torch.float64)
            loss(forward(model, inputs), target)
    model.train()
    if isinstance(own, nn.Module):
        own.train()
    for module, mode in modes:
        module.training = mode
