"""Pipelines in test worlds, and the plain training of one process that they must equal."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.comm.channels import connect
from plait.core.splits import split
from plait.data.seeding import mix
from plait.pipeline.executor import PipelineExecutor
from plait.pipeline.layout import PipelineLayout, microbatches_per_update, one_batch, stream
from plait.pipeline.pipeline_parts import PipelineParts
from plait.planner.schedules.in_flight import Schedule
from plait.planner.schedules.operations import Update
from plait.profiler.trace import TracedModel, trace
from plait.schema.plans.plan import Layout
from plait.training.optimizers.torch_kernels import use_fused_kernels
from plait.workloads.lstm import lstm_tiny
from plait.workloads.transformer import transformer_tiny
from plait.workloads.translation.gnmt import PAD, gnmt_tiny
from plait.workloads.translation.loss import label_smoothing
from support.meeting import rendezvous_of
from support.stages import cut_all
from support.traced_models import Branches, MadeWeights, Masked, Positions, Reshaped

Weights = dict[str, Any]


def token_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def masked_loss(output: dict[str, Tensor], target: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(output["logits"], target["labels"]) + (output["lengths"] * 0.0).mean()


def _seed(seed: int) -> None:
    """As `torch.manual_seed`, which without a GPU formats the stack for three kinds of them."""
    torch.default_generator.manual_seed(seed)


def images(samples: int, step: int) -> tuple[Any, Any]:
    _seed(100 + step)
    return (torch.randn(samples, 2, 6, 6, dtype=torch.float64),), torch.randint(0, 3, (samples,))


def texts(samples: int, step: int) -> tuple[Any, Any]:
    """Sequences whose length changes from step to step."""
    _seed(100 + step)
    tokens = torch.randint(0, 17, (samples, 5 + step % 3))
    return (tokens,), tokens.roll(-1, 1)


def sequences(samples: int, step: int) -> tuple[Any, Any]:
    _seed(100 + step)
    return (torch.randn(samples, 5, 4, dtype=torch.float64),), torch.randint(0, 3, (samples,))


def sentences(samples: int, step: int) -> tuple[Any, Any]:
    """Padded pairs of sentences; both lengths change from step to step, each by itself."""
    _seed(100 + step)
    sides = []
    for length in (7 + step % 3, 5 + step % 2):
        tokens = torch.randint(4, 17, (samples, length))
        tokens[torch.arange(length) >= torch.randint(2, length + 1, (samples, 1))] = PAD
        sides.append(tokens)
    return tuple(sides), sides[1].roll(-1, 1)


def masked(samples: int, step: int) -> tuple[Any, Any]:
    _seed(100 + step)
    inputs = (torch.randint(0, 11, (samples, 7)), torch.randint(1, 7, (samples,)))
    return inputs, {"labels": torch.randint(0, 3, (samples,))}


MODELS: dict[str, tuple[Callable[[], nn.Module], Any, Any]] = {
    "cnn": (Branches, images, F.cross_entropy),
    "lstm": (lambda: lstm_tiny(17, tied=True), texts, token_loss),
    "transformer": (lambda: transformer_tiny(17, 16, tied=True), texts, token_loss),
    "gnmt": (lambda: gnmt_tiny(17, width=6, layers=3), sentences, label_smoothing),
    "masked": (Masked, masked, masked_loss),
    "made weights": (MadeWeights, sequences, F.cross_entropy),
    "positions": (Positions, sequences, F.cross_entropy),
    "reshaped": (Reshaped, sequences, F.cross_entropy),
}


@dataclass(frozen=True)
class Case:
    """A model, cut into stages of equal numbers of layers, and how it is trained."""

    model: str
    layouts: tuple[tuple[tuple[int, ...], ...], ...]
    schedule: Schedule = Schedule.FLUSH
    microbatches: int = 4
    samples: int = 10
    steps: int = 4
    optimizer: str = "adam"
    depths: Mapping[int, int] = field(default_factory=dict)
    vertical_sync: bool = False
    recompute: frozenset[int] = frozenset()
    clip_norm: float | None = None
    hosts: tuple[str, ...] | None = None
    # Enough that replicas sum their gradients during backward.
    cores: int = 64
    device: str = "cpu"

    def pipeline_layout(self, traced: TracedModel) -> PipelineLayout:
        ids = [layer.id for layer in traced.layers]
        count = len(self.layouts[0])
        return PipelineLayout(
            tuple(tuple(ids[own.start : own.stop]) for own in split(len(ids), count)),
            tuple(Layout(layout) for layout in self.layouts),
            self.schedule,
            self.microbatches,
            self.depths,
            self.vertical_sync,
            self.recompute,
        )


def build(case: Case) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[case.model][0]().double().to(case.device)


def make_optimizer(case: Case, parameters: Any) -> torch.optim.Optimizer:
    if case.optimizer == "adam":
        # A large epsilon keeps the rounding of gradients that are truly zero from being blown up.
        return torch.optim.Adam(parameters, lr=0.01, eps=1e-3)
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-2)


def _as_jobs_have_it(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    use_fused_kernels(optimizer)
    return optimizer


_traces: dict[tuple[str, str], TracedModel] = {}


def traced_model(case: Case, model: nn.Module) -> TracedModel:
    """The model's trace; it names parameters by path, so models of one kind share what takes longest."""
    key = case.model, case.device
    if key not in _traces:
        inputs, _ = MODELS[case.model][1](4, 0)
        _traces[key] = trace(build(case), tuple(x.to(case.device) for x in inputs))
    return dataclasses.replace(_traces[key], model=model)


def sizes(case: Case) -> list[int]:
    """Samples of each microbatch of a step: uneven where they do not divide."""
    return [len(own) for own in split(case.samples, case.microbatches)]


def microbatch(case: Case, number: int) -> tuple[Any, Any]:
    """Inputs and target of the run's microbatch `number`."""
    step, place = divmod(number, case.microbatches)
    inputs, target = MODELS[case.model][1](case.samples, step)
    begin = sum(sizes(case)[:place])
    part = slice(begin, begin + sizes(case)[place])
    inputs = tuple(x[part].to(case.device) for x in inputs)
    if isinstance(target, dict):
        return inputs, {k: v[part].to(case.device) for k, v in target.items()}
    return inputs, target[part].to(case.device)


def count(case: Case, number: int) -> int:
    return sizes(case)[number % case.microbatches]


@dataclass
class CaseWork:
    """The microbatches of one pipeline of a case; `first` is the number of the run's first one."""

    case: Case
    pipeline_layout: PipelineLayout
    rank: int
    first: int = 0
    total: int = 0

    def __post_init__(self) -> None:
        self.pipeline = self.pipeline_layout.pipeline_of(self.rank)

    def number(self, microbatch: int, pipeline: int | None = None) -> int:
        pipeline = self.pipeline if pipeline is None else pipeline
        return self.first + microbatch * self.pipeline_layout.pipelines + pipeline

    def content(self, index: int) -> tuple[Any, Any]:
        return microbatch(self.case, self.number(index))

    def weight(self, index: int) -> float:
        if self.case.schedule is Schedule.STASH:
            return 1.0
        if self.case.schedule is Schedule.TWO_BUFFERED:
            size = microbatches_per_update(self.pipeline_layout, 0)
            members = self._members(index // size, size)
        else:
            members = list(range(self.first, self.first + self.case.microbatches))
        return count(self.case, self.number(index)) / sum(count(self.case, m) for m in members)

    def samples(self, index: int) -> tuple[int, ...]:
        return (count(self.case, self.number(index)),)

    def seed(self, index: int, stage: int) -> int:
        return mix(1, self.number(index), stage)

    def set_rate(self, update: Update) -> None:
        pass

    def factor(self, update: Update) -> float:
        if self.case.schedule is not Schedule.STASH:
            return 1.0
        replicas = self.pipeline_layout.layout.replicas(update.stage)
        members = self._members(update.version - 1, replicas)
        replica = self.pipeline_layout.layouts[self.pipeline].stages[update.stage].index(self.rank)
        mine = self.number((update.version - 1) * replicas + replica)
        whole = sum(count(self.case, m) for m in members)
        return count(self.case, mine) / whole if mine in members else 1.0

    def _members(self, round_: int, size: int) -> list[int]:
        """The microbatches of all pipelines in a round."""
        numbers = [
            self.number(b, p)
            for b in range(round_ * size, (round_ + 1) * size)
            for p in range(self.pipeline_layout.pipelines)
        ]
        return [n for n in numbers if n < self.first + self.total]


@dataclass(frozen=True)
class AllOf:
    """An interval that does not shrink."""

    pipeline_layout: PipelineLayout
    total: int

    def admits(self, pipeline: int, microbatch: int) -> bool:
        return microbatch < self.pipeline_layout.local(self.total, pipeline)


def train_in_pipeline(rank: int, case: Case) -> tuple[Weights, list[float]]:
    """This rank's stages after the case's steps, by name, and its losses."""
    model = build(case)
    traced = traced_model(case, model)
    pipeline_layout = case.pipeline_layout(traced)
    hosts = case.hosts or ("here",) * len(pipeline_layout.workers)
    device = torch.device(case.device)
    rendezvous = rendezvous_of(rank, hosts)
    channels = connect(rendezvous, pipeline_layout.workers, device=device)
    parts = PipelineParts(
        MODELS[case.model][2],
        lambda parameters: _as_jobs_have_it(make_optimizer(case, parameters)),
        device,
        contextlib.nullcontext,
        rendezvous,
        case.clip_norm,
        cores=case.cores,
    )
    pipeline = PipelineExecutor(rank, pipeline_layout, traced, channels, parts)
    if case.schedule.synchronous:
        for step in range(case.steps):
            work = CaseWork(case, pipeline_layout, rank, step * case.microbatches, case.microbatches)
            local = pipeline_layout.local(case.microbatches, pipeline_layout.pipeline_of(rank))
            pipeline.run(one_batch(pipeline_layout, rank, local), work)
    else:
        total = case.steps * case.microbatches
        work = CaseWork(case, pipeline_layout, rank, 0, total)
        pipeline.run(stream(pipeline_layout, rank, AllOf(pipeline_layout, total)), work)
    channels.close()
    weights = {
        name: value.detach().cpu().numpy()
        for module in pipeline.modules.values()
        for name, value in module.state_dict().items()
    }
    return weights, [float(loss) for _, loss in sorted(pipeline.losses.items())]


def train_plainly(case: Case) -> Weights:
    """One process, the whole model, gradients accumulated over the microbatches of each step."""
    model = build(case)
    optimizer = make_optimizer(case, list(model.parameters()))
    for step in range(case.steps):
        optimizer.zero_grad()
        for place in range(case.microbatches):
            inputs, target = microbatch(case, step * case.microbatches + place)
            loss = MODELS[case.model][2](model(*inputs), target)
            (loss * (sizes(case)[place] / case.samples)).backward()
        if case.clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), case.clip_norm)
        optimizer.step()
    return {name: v.detach().cpu().numpy() for name, v in copy.deepcopy(model).state_dict().items()}


def train_many(rank: int, cases: tuple[Case, ...]) -> list[tuple[Weights, list[float]]]:
    """Several cases one after the other in one world, which costs more to start than most cases."""
    return [train_in_pipeline(rank, case) for case in cases]


class Delayed:
    """One process that applies the same delayed gradients, from formulas instead of a schedule.

    Every stage s with R replicas of D devices from it on keeps d = ceil(D / R) microbatches in flight, so
    microbatch b sees floor(b / R) - d + 1 updates there under stash, and under 2bw all batches but the
    one before its own. What several stages share is as old in all of them as in the first. Gradients of a
    round are averaged over its samples.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        self.model = build(case)
        traced = traced_model(case, self.model)
        self.pipeline_layout = case.pipeline_layout(traced)
        self.layout = Layout(case.layouts[0])
        self.pipelines = len(case.layouts)
        stages = cut_all(traced, self.pipeline_layout.stages)
        self.names = [dict.fromkeys(n for n, _ in _all_parameters(s.module)) for s in stages]
        self.first = {name: first for s in stages for name, first in s.first_names.items()}
        self.stage_of: dict[str, int] = {}
        for stage, names in enumerate(self.names):
            for name in names:
                self.stage_of.setdefault(self.first[name], stage)
        self.masters = dict(self.model.named_parameters())
        self.optimizers = {n: make_optimizer(case, [p]) for n, p in self.masters.items()}
        self.history = {n: [p.detach().clone()] for n, p in self.masters.items()}

    def train(self) -> Weights:
        total = self.case.steps * self.case.microbatches
        rows = -(-total // self.pipelines)
        for row in range(rows):
            together = [row * self.pipelines + p for p in range(self.pipelines)]
            for number in (n for n in together if n < total):
                self._backward(number, row, total)
            for stage in range(len(self.names)):
                size = self._round(stage)
                if (row + 1) % size == 0 or row == rows - 1:
                    self._update(stage)
        return {n: v.detach().cpu().numpy() for n, v in copy.deepcopy(self.model).state_dict().items()}

    def _round(self, stage: int) -> int:
        if self.case.schedule is Schedule.STASH:
            return self.layout.replicas(stage)
        return microbatches_per_update(self.pipeline_layout, stage)

    def _version(self, stage: int, row: int) -> int:
        if self.case.schedule is Schedule.TWO_BUFFERED:
            return max(0, row // self._round(stage) - 1)
        replicas = self.layout.replicas(stage)
        if self.case.vertical_sync:
            first = self.layout.replicas(0)
            return max(0, row // first - self._depth(0) + 1) * first // replicas
        return max(0, row // replicas - self._depth(stage) + 1)

    def _depth(self, stage: int) -> int:
        usual = math.ceil(self.layout.devices_from(stage) / self.layout.replicas(stage))
        return self.case.depths.get(stage, usual)

    def _backward(self, number: int, row: int, total: int) -> None:
        used = {}
        for name in (name for names in self.names for name in names):
            first = self.first[name]
            version = self._version(self.stage_of[first], row)
            used[name] = self.history[first][version].clone().requires_grad_()
        inputs, target = microbatch(self.case, number)
        output = torch.func.functional_call(self.model, used, inputs, tie_weights=False)
        MODELS[self.case.model][2](output, target).backward()
        for stage, names in enumerate(self.names):
            size = self._round(stage) * self.pipelines
            begin = number // size * size
            whole = sum(count(self.case, n) for n in range(begin, min(begin + size, total)))
            share = count(self.case, number) / whole
            for name in names:
                grad = used[name].grad
                master = self.masters[self.first[name]]
                if grad is not None:
                    part = grad * share
                    master.grad = part if master.grad is None else master.grad + part

    def _clip(self, stage: int) -> None:
        """Clip the gradients of the parameters that the same stages use, of `stage` among them, together."""
        together: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for first in dict.fromkeys(self.first[name] for name in self.names[stage]):
            users = [s for s, names in enumerate(self.names) if first in {self.first[n] for n in names}]
            if self.masters[first].grad is not None:
                together.setdefault(tuple(users), []).append(self.masters[first])
        for parameters in together.values():
            nn.utils.clip_grad_norm_(parameters, self.case.clip_norm)

    def _update(self, stage: int) -> None:
        if self.case.clip_norm is not None:
            self._clip(stage)
        for first in dict.fromkeys(self.first[name] for name in self.names[stage]):
            # A tied parameter is updated once a round, with the gradients of all its stages.
            if self.masters[first].grad is not None:
                self.optimizers[first].step()
                self.optimizers[first].zero_grad()
                self.history[first].append(self.masters[first].detach().clone())


def _all_parameters(module: nn.Module) -> Any:
    return module.named_parameters(remove_duplicate=False)
