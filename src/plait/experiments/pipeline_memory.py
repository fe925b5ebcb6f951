"""Memory: what a plan says that each stage holds, against what its worker has resident.

The peak resident bytes of a stage are the most that its worker has resident (the kernel's VmHWM) while it
trains, less what it has resident just before the first step, its own weights and buffers aside. Libraries
have been used before that, and allocators give back at once what is freed, so that neither counts. Memory
that two workers see counts for both. Models are cut in two, or replicated, and take batches that make tens
of megabytes: less is lost among what libraries set aside.
"""

from __future__ import annotations

import contextlib
import gc
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from plait.cluster.channels import connect
from plait.cluster.hosts import LOCAL, Host
from plait.cluster.supervisor import Supervisor, Unwatched
from plait.cluster.worker import Worker
from plait.core.codec import decode, encode
from plait.experiments.bench import Claim, Row
from plait.experiments.pipeline_models import job
from plait.experiments.pipeline_sides import FixedWork
from plait.planner import Plan, Schedule, Settings, data_parallel_plan, make_plan, measured_machines
from plait.profiler.trace import trace
from plait.runtime import build
from plait.runtime.arrangement import arrange, one_batch, stream
from plait.runtime.launch import Placement
from plait.runtime.loading import SeededSamples
from plait.runtime.optim import build_optimizer
from plait.runtime.pipeline import Parts, Pipeline
from plait.runtime.profiling import profile_together
from plait.runtime.settings import DataSettings, ModelSettings, TrainSettings
from plait.workloads.losses import build_loss

SCHEDULES = (Schedule.STASH, Schedule.TWO_BUFFERED, Schedule.FLUSH, Schedule.GPIPE)
PIECES = 8
TWO = Placement((Host(LOCAL, 2),), threads=1)
# What is freed is no longer resident, at once: for builds of torch with mimalloc, and for the others.
_ALLOCATOR = {"MIMALLOC_PURGE_DELAY": "0", "MALLOC_MMAP_THRESHOLD_": str(64 << 10)}


@dataclass(frozen=True)
class Case:
    """A model with its microbatches, and the schedules it is measured under."""

    settings: TrainSettings
    microbatch: int
    schedules: tuple[Schedule, ...] = SCHEDULES
    replicated: bool = False


def cases() -> tuple[Case, ...]:
    """VGG-16 and ResNet-50, tiny, on larger images, a transformer, and a VGG-16 that is mostly weights."""
    images = {"shape": [1, 32, 32], "classes": 10, "samples": 512}

    def tiny(name: str, factory: str, microbatch: int) -> Case:
        common = replace(job("vgg16", 8), name=name, model=ModelSettings(factory))
        data = DataSettings("synthetic", PIECES * microbatch, images)
        return Case(replace(common, data=data), microbatch)

    transformer = Case(job("transformer", PIECES * 32), 32)
    return (
        tiny("vgg16_tiny", "plait.workloads.vgg:vgg16_tiny", 512),
        tiny("resnet50_tiny", "plait.workloads.resnet:resnet50_tiny", 128),
        transformer,
        replace(transformer, schedules=(Schedule.STASH, Schedule.FLUSH), replicated=True),
        Case(job("vgg16", PIECES * 16), 16),
    )


def run(steps: int = 3, chosen: Sequence[Case] | None = None) -> tuple[list[Row], list[Claim]]:
    """Every stage of every case, predicted and measured over so many steps."""
    rows: list[Row] = []
    for case in cases() if chosen is None else chosen:
        with tempfile.TemporaryDirectory() as logs:
            profile = profile_together(case.settings, TWO, case.microbatch, Path(logs), repeats=2)
        machines = measured_machines((2,), profile.links, profile.sums)
        for schedule in case.schedules:
            asked = Settings(schedule, PIECES, straight=not case.replicated)
            make = data_parallel_plan if case.replicated else make_plan
            rows += _measure(case, make(profile.graph, machines, asked), steps)
    return rows, claims_of(rows)


def claims_of(rows: Sequence[Row]) -> list[Claim]:
    """Within 15% either way."""
    claims = []
    for row in rows:
        off = 100 * (float(row["bytes"] or 0) / float(row["predicted_bytes"] or 1) - 1)
        words = f"{row['case']}, {row['schedule']}: memory of stage {row['stage']} on worker {row['worker']}"
        claim = f"{words}, percent measured over predicted"
        claims.append(Claim(claim, off, "at most 15 either way", abs(off) <= 15))
    return claims


def _measure(case: Case, plan: Plan, steps: int) -> list[Row]:
    order = {"settings": encode(case.settings), "plan": encode(plan), "microbatch": case.microbatch}
    with tempfile.TemporaryDirectory() as logs:
        entry = "plait.experiments.pipeline_memory:worker"
        placement = replace(TWO, environment=_ALLOCATOR)
        launch = placement.launch(entry, {**order, "steps": steps}, Path(logs), preload=("torch._dynamo",))
        found = Supervisor(launch, Unwatched()).run()
    return [
        {
            "case": f"{case.settings.name}, microbatches of {case.microbatch}",
            "schedule": plan.schedule.value,
            "plan": "-".join(str(stage.replicas) for stage in plan.stages),
            "stage": number,
            "worker": device,
            "predicted_bytes": stage.memory_bytes,
            "bytes": found[device]["bytes"],
            "ratio": found[device]["bytes"] / stage.memory_bytes,
        }
        for number, stage in enumerate(plan.stages)
        for device in stage.devices
    ]


def worker(worker: Worker, order: dict[str, Any]) -> dict[str, Any]:
    """Be one of the two workers whose memory is measured."""
    worker.join("gloo")
    settings = decode(TrainSettings, order["settings"], "settings")
    plan = decode(Plan, order["plan"], "plan")
    use_libraries()
    data = SeededSamples(build.build_data(settings.data, "train"), 0)
    x, y = data.__getitems__([(0, i) for i in range(order["microbatch"])])
    arrangement = arrange(plan)
    model = build.build_model(settings.model, 0)
    traced = trace(model, (x,))
    window = arrangement.window()
    channels = connect(worker.rank, ["here"] * 2, arrangement.workers, deadline_s=120, window=window)
    parts = Parts(
        build_loss(settings.loss),
        lambda parameters: build_optimizer(settings.optimizer, list(parameters)),
        torch.device("cpu"),
        contextlib.nullcontext,
    )
    pipeline = Pipeline(worker.rank, arrangement, traced, channels, parts)
    del model, traced
    batches = [PIECES] * order["steps"] if plan.schedule.synchronous else [PIECES * order["steps"]]
    with _watching(pipeline) as peak:
        for total in batches:
            work = FixedWork((x,), (y,), 1 / total, total)
            together = plan.schedule.synchronous
            ops = (
                one_batch(arrangement, worker.rank, total)
                if together
                else stream(arrangement, worker.rank, work)
            )
            pipeline.run(ops, work)
    dist.barrier()
    pipeline.close()
    channels.close()
    return {"bytes": peak[0]}


def use_libraries() -> None:
    """Have libraries load and set aside what they need for any model."""
    model = nn.Sequential(nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(576, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        model(torch.randn(4, 1, 8, 8)).sum().backward()
        optimizer.step()
    square = torch.randn(1024, 1024, requires_grad=True)
    (square @ square).sum().backward()


@contextlib.contextmanager
def _watching(pipeline: Pipeline) -> Any:
    """A list that holds the stage's peak resident bytes once the block has run (Linux)."""
    gc.collect()
    tensors = [t for m in pipeline.modules.values() for t in (*m.parameters(), *m.buffers())]
    before = _resident("VmRSS") - sum(t.numel() * t.element_size() for t in tensors)
    # The kernel counts the peak anew from here.
    Path("/proc/self/clear_refs").write_text("5")
    found: list[int] = []
    yield found
    found.append(_resident("VmHWM") - before)


def _resident(what: str) -> int:
    """A line of the kernel's account of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (size,) = (line.split()[1] for line in lines if line.startswith(f"{what}:"))
    return int(size) * 1024
