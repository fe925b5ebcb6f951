"""Memory: what a plan says that each stage holds, against what its worker has resident.

The peak resident bytes of a worker are the most that it has resident (the kernel's VmHWM) while it trains,
less what it has resident just before the first step, its own weights and buffers aside. Libraries have been
used before that. Memory that two workers see counts for both. Models are cut in two, replicated, or cut in
four and dealt to two workers, and take batches that make tens of megabytes: less is lost among what
libraries set aside.

A plan says what tensors take. What an allocator holds besides depends on the system, so workers are measured
whose allocator adds next to nothing (`_ALLOCATOR`). As workers usually run they have more resident: they keep
what is freed for the next step, which makes them faster. And torch's allocator on ARM, mimalloc, cuts memory
for tensors above 512 kB in steps of as much, counts 64 bytes to each tensor, and asks for pages of 2 MB: a
tensor of 512 kB then has 1 MB resident. A transformer's first stage came to 1.45 times the plan's bytes so.

On CUDA it is what torch's allocator has handed out (`max_memory_allocated`), with the memory of other workers
that the worker reads. Its own reserve does not count, there either.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from plait.api.world import choose_device
from plait.core.codec import decode, encode
from plait.data.loader import to_device
from plait.launcher.worker_process import Worker
from plait.measure.profile_job import ProfileRequest, profile_together
from plait.pipeline.executor import PipelineExecutor
from plait.pipeline.layout import arrange
from plait.pipeline.pipeline_parts import PipelineParts
from plait.planner import (
    Plan,
    Schedule,
    Settings,
    data_parallel_plan,
    make_plan,
    measured_machines,
    predict,
)
from plait.profiler.profile import Profile
from plait.profiler.trace import trace
from plait.schema.settings import DataSettings, ModelSettings, TrainSettings
from plait.training.optimizers.build import build_optimizer
from plait.training.setup.data import build_train_data
from plait.training.setup.model import build_model
from plait.workloads.losses import build_loss
from plait_bench.harness import BenchClaim, Found, Row, in_world, number, within, workers
from plait_bench.pipeline.models import job
from plait_bench.pipeline.sides import OurPipeline

SCHEDULES = (Schedule.STASH, Schedule.TWO_BUFFERED, Schedule.FLUSH, Schedule.GPIPE)
PIECES = 8
Device = Literal["cpu", "cuda"]
TWO = workers(2)
# What is freed is no longer resident, at once, and what is between tensors never is: pages are small. For
# builds of torch with mimalloc, and for the others.
_ALLOCATOR = {
    "MIMALLOC_PURGE_DELAY": "0",
    "MIMALLOC_ALLOW_THP": "0",
    "MALLOC_MMAP_THRESHOLD_": str(64 << 10),
}


@dataclass(frozen=True)
class MemoryCase:
    """A model with its microbatches, and the schedules it is measured under.

    It is cut in two stages; `replicated` makes it one with two replicas, `dealt` four, two for each worker.
    """

    settings: TrainSettings
    microbatch: int
    schedules: tuple[Schedule, ...] = SCHEDULES
    replicated: bool = False
    dealt: bool = False

    def plan(self, profile: Profile, schedule: Schedule) -> Plan:
        """How it is laid over two workers."""
        machines = measured_machines((2,), profile.links, profile.sums)
        asked = Settings(schedule, PIECES, straight=not self.replicated)
        if self.dealt:
            # The planner deals stages for the interleaved schedule; the others run them as well.
            plan = make_plan(profile.graph, machines, replace(asked, schedule=Schedule.INTERLEAVED))
            return replace(plan, schedule=schedule)
        make = data_parallel_plan if self.replicated else make_plan
        return make(profile.graph, machines, asked)


def cases(device: Device = "cpu") -> tuple[MemoryCase, ...]:
    """VGG-16 and ResNet-50, tiny, on larger images, transformers, and a VGG-16 that is mostly weights."""
    images = {"shape": [1, 32, 32], "classes": 10, "samples": 512}

    def on_device(settings: TrainSettings) -> TrainSettings:
        return replace(settings, device=device)

    def tiny(name: str, factory: str, microbatch: int) -> MemoryCase:
        common = replace(job("vgg16", 8), name=name, model=ModelSettings(factory))
        data = DataSettings("synthetic", PIECES * microbatch, images)
        return MemoryCase(on_device(replace(common, data=data)), microbatch)

    transformer = MemoryCase(on_device(job("transformer", PIECES * 32)), 32)
    apart = transformer.settings
    options = {**apart.model.args, "tied": True}
    tied = replace(apart, name="tied transformer", model=ModelSettings(apart.model.factory, options))
    dealt = (Schedule.INTERLEAVED, Schedule.STASH, Schedule.FLUSH)
    return (
        tiny("vgg16_tiny", "plait.workloads.vgg:vgg16_tiny", 512),
        tiny("resnet50_tiny", "plait.workloads.resnet:resnet50_tiny", 128),
        transformer,
        replace(transformer, schedules=(Schedule.STASH, Schedule.FLUSH), replicated=True),
        replace(transformer, schedules=dealt, dealt=True),
        replace(transformer, settings=tied),
        MemoryCase(on_device(job("vgg16", PIECES * 16)), 16),
    )


def run(steps: int = 3, chosen: Sequence[MemoryCase] | None = None, device: Device = "cpu") -> Found:
    """Every worker of every case, predicted and measured over `steps` steps.

    On `cuda` the two workers share a GPU where there is only one.
    """
    rows: list[Row] = []
    for case in cases(device) if chosen is None else chosen:
        (profile,) = profile_together(ProfileRequest(case.settings, (case.microbatch,), 2), TWO)
        for schedule in case.schedules:
            rows += _measure(case, case.plan(profile, schedule), steps)
    return rows, claims_of(rows)


def claims_of(rows: Sequence[Row]) -> list[BenchClaim]:
    """Within 15% either way."""
    claims = []
    for row in rows:
        off = 100 * (number(row, "bytes") / float(row["predicted_bytes"] or 1) - 1)
        words = f"{row['case']}, {row['schedule']}: memory of stage {row['stage']} on worker {row['worker']}"
        claims.append(within(f"{words}, percent measured over predicted", off, 15))
    return claims


def _measure(case: MemoryCase, plan: Plan, steps: int) -> list[Row]:
    asked = {"order": encode(case.settings), "planned": encode(plan), "size": case.microbatch, "steps": steps}
    found = in_world(replace(TWO, environment=_ALLOCATOR), peak_bytes, asked, preload=("torch._dynamo",))
    # What a worker with several stages holds depends on how they take turns.
    predicted = dict(predict(plan).simulation.peak_bytes)
    rows: list[Row] = []
    for device in plan.layout().workers:
        own = [number for number, stage in enumerate(plan.stages) if device in stage.devices]
        if len(own) == 1:
            predicted[device] = plan.stages[own[0]].memory_bytes
        rows.append(
            {
                "case": f"{case.settings.name}, microbatches of {case.microbatch}",
                "schedule": plan.schedule.value,
                "plan": "-".join(str(stage.replicas) for stage in plan.stages),
                "stage": "+".join(map(str, own)),
                "worker": device,
                "predicted_bytes": predicted[device],
                "bytes": found[device],
                "ratio": found[device] / predicted[device],
            }
        )
    return rows


def peak_bytes(worker: Worker, order: dict[str, Any], planned: dict[str, Any], size: int, steps: int) -> int:
    """Be one of the two workers whose memory is measured: the most bytes that it has resident."""
    settings = decode(TrainSettings, order, "settings")
    plan = decode(Plan, planned, "plan")
    device = choose_device(settings.device, worker.local_rank)
    use_libraries(device)
    data = build_train_data(settings)
    x, y = to_device(data.batch(0, range(size), 0), device, None)
    layout = arrange(plan)
    model = build_model(settings.model, 0).to(device)
    traced = trace(model, (x,))
    parts = PipelineParts(
        build_loss(settings.loss),
        lambda parameters: build_optimizer(settings.optimizer, list(parameters)),
        device,
        contextlib.nullcontext,
        worker.rendezvous,
        topology=settings.topology,
    )
    ours = OurPipeline(layout, traced, parts, layout.window())
    del model, traced
    meter = _OnGpu(ours, device) if device.type == "cuda" else _Resident(ours.pipeline)
    ours.take((x,), (y,), PIECES, PIECES * steps)
    peak = meter.peak_bytes()
    dist.barrier()
    ours.close()
    return peak


def use_libraries(device: torch.device) -> None:
    """Have libraries load and set aside what they need for any model."""
    layers = [nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(576, 4)]
    model = nn.Sequential(*layers).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        model(torch.randn(4, 1, 8, 8, device=device)).sum().backward()
        optimizer.step()
    square = torch.randn(1024, 1024, device=device, requires_grad=True)
    (square @ square).sum().backward()


def _own_bytes(pipeline: PipelineExecutor) -> int:
    """The worker's weights and buffers, each once."""
    tensors = {t for m in pipeline.modules.values() for t in (*m.parameters(), *m.buffers())}
    return sum(t.numel() * t.element_size() for t in tensors)


class _Resident:
    """What the process has resident at most from now on (Linux), with the weights it has already."""

    def __init__(self, pipeline: PipelineExecutor) -> None:
        gc.collect()
        self._before = _resident("VmRSS") - _own_bytes(pipeline)
        # The kernel counts the peak anew from here.
        Path("/proc/self/clear_refs").write_text("5")

    def peak_bytes(self) -> int:
        return _resident("VmHWM") - self._before


class _OnGpu:
    """The same of torch's memory on a GPU, and of the memory of others that the worker reads there."""

    def __init__(self, ours: OurPipeline, device: torch.device) -> None:
        gc.collect()
        torch.cuda.synchronize(device)
        self._channels, self._device = ours.channels, device
        self._before = torch.cuda.memory_allocated(device) - _own_bytes(ours.pipeline)
        torch.cuda.reset_peak_memory_stats(device)

    def peak_bytes(self) -> int:
        torch.cuda.synchronize(self._device)
        own = torch.cuda.max_memory_allocated(self._device) - self._before
        return own + self._channels.seen_gpu_bytes


def _resident(what: str) -> int:
    """A line of the kernel's account of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (size,) = (line.split()[1] for line in lines if line.startswith(f"{what}:"))
    return int(size) * 1024
