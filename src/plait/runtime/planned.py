"""Choosing the plan of a run: read from its file, or made by measuring the job first."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from plait.core.codec import encode
from plait.core.errors import JobError
from plait.planner import (
    Machines,
    MemorySettings,
    Plan,
    Schedule,
    Settings,
    data_parallel_plan,
    faster_plan,
    fastest_plan,
    load_plan,
    machines,
    measured_machines,
    model_parallel_plan,
)
from plait.profiler.profile import Profile
from plait.runtime import build
from plait.runtime.launch import Placement
from plait.runtime.profiling import profile_together
from plait.runtime.settings import OptimizerSettings, PipelineSettings, TrainSettings

# Microbatches a worker has of each step where nothing else is asked for.
_PER_WORKER = 4
# How long layers are measured at least: a machine's speed changes from one second to the next.
_MEASURE_S = 3.0


@dataclass(frozen=True)
class PlanWish:
    """What a job says of its plan: `auto`, `model-parallel` or a file, and what it sets over that."""

    plan: str
    schedule: str | None = None
    microbatches: int | None = None
    vertical_sync: bool = False
    depths: Mapping[int, int] = field(default_factory=dict)
    recompute: tuple[int, ...] = ()

    @property
    def leaves_pieces_open(self) -> bool:
        """Whether the planner may choose how a batch is cut, and whether updates wait for all of it."""
        return (
            self.plan == "auto"
            and self.schedule is None
            and self.microbatches is None
            and not (self.vertical_sync or self.depths or self.recompute)
        )


def planned(settings: TrainSettings, placement: Placement, wish: PlanWish) -> tuple[TrainSettings, Plan]:
    """`settings` with the plan that `wish` asks for, and the plan; measures the job where it must."""
    if wish.plan in ("auto", "model-parallel"):
        plan = _make(settings, placement, wish)
    else:
        plan = _read(Path(wish.plan), settings, wish)
    chosen = PipelineSettings(encode(plan), wish.vertical_sync, dict(wish.depths), wish.recompute)
    return replace(settings, pipeline=chosen), plan


def _read(path: Path, settings: TrainSettings, wish: PlanWish) -> Plan:
    plan = load_plan(path)
    if wish.schedule not in (None, plan.schedule.value):
        plan = replace(plan, schedule=Schedule(wish.schedule), depths=())
    plan = replace(plan, microbatches=wish.microbatches or plan.microbatches)
    if plan.microbatches > settings.data.batch_size:
        raise JobError(
            f"data.batch_size: found {settings.data.batch_size}, but the plan cuts a batch into "
            f"{plan.microbatches} microbatches; use a larger batch or fewer parallel.microbatches"
        )
    return plan


def _make(settings: TrainSettings, placement: Placement, wish: PlanWish) -> Plan:
    workers = sum(host.slots for host in placement.hosts)
    batch = settings.data.batch_size
    microbatches = wish.microbatches or min(batch, _PER_WORKER * workers)
    small, whole = max(1, round(batch / microbatches)), math.ceil(batch / workers)
    build.check(settings)
    sizes = {small, whole} if wish.leaves_pieces_open else {small}
    with tempfile.TemporaryDirectory() as logs:
        found = profile_together(settings, placement, sorted(sizes), Path(logs), least_s=_MEASURE_S)
    profiles = dict(zip(sorted(sizes), found))
    cluster = _machines(placement, profiles[small])
    memory = MemorySettings(_optimizer_copies(settings.optimizer))
    asked = Settings(_schedule(settings, wish), microbatches, memory=memory)
    graph = profiles[small].loaded_graph()
    if wish.plan == "model-parallel":
        return model_parallel_plan(graph, cluster, asked)
    best = fastest_plan(graph, cluster, asked)
    if wish.leaves_pieces_open and batch >= workers:
        one_each = Settings(Schedule.FLUSH, workers, memory=memory)
        best = faster_plan(best, data_parallel_plan(profiles[whole].loaded_graph(), cluster, one_each))
    return best


def _schedule(settings: TrainSettings, wish: PlanWish) -> Schedule:
    """The schedule of a pipeline: the job's, or stash where nothing in the job needs whole batches."""
    if wish.schedule is not None:
        return Schedule(wish.schedule)
    needs_batches = settings.clip_norm is not None or settings.sync.kind != "all-reduce"
    open_ = wish.plan == "auto" and not wish.vertical_sync
    return Schedule.FLUSH if needs_batches and open_ else Schedule.STASH


def _machines(placement: Placement, profile: Profile) -> Machines:
    """Hosts with as many workers each are two levels; others are one, as fast as its slowest link."""
    slots = [host.slots for host in placement.hosts]
    if not profile.links:
        return machines(sum(slots), 1e9)
    two_levels = len(slots) > 1 and len(set(slots)) == 1 and slots[0] > 1
    counts = (slots[0], len(slots)) if two_levels else (sum(slots),)
    return measured_machines(counts, profile.links, profile.sums, overhead_s=profile.overhead_s)


def _optimizer_copies(optimizer: OptimizerSettings) -> float:
    """Numbers that the optimizer keeps for each weight."""
    if optimizer.kind == "sgd":
        return 1.0 if optimizer.options.get("momentum") else 0.0
    return 2.0
