"""Plait trains PyTorch models on whatever devices there are.

Importing it starts nothing and loads no optional dependency: names are imported when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.adapt.monitors.gradients import GradientNoiseScale, GradientVariance
    from plait.adapt.monitors.step_times import StepTimer, Throughput
    from plait.api.averaging import Averaging
    from plait.api.data_loader import DataLoader
    from plait.api.data_parallel import DataParallel
    from plait.api.elastic import Elastic
    from plait.api.launching import launch
    from plait.api.pipeline import Pipeline
    from plait.api.stages.step_loss import StepLoss
    from plait.api.world import World, init
    from plait.fusion import FusedModule, FusedOptimizer, Shared, fuse
    from plait.fusion.verify.loop_audit import AuditReport, audit
    from plait.jobs.open_run import OpenedRun, open_run
    from plait.jobs.study import study
    from plait.jobs.sweep import sweep
    from plait.jobs.train import train
    from plait.pipeline.verify.verify_stages import verify_stages
    from plait.planner import Cluster, Plan, machines
    from plait.planner import make_plan as plan
    from plait.profiler.profile import Profile
    from plait.profiler.profile import profile_model as profile
    from plait.schema.job import Job, make_job, read_job
    from plait.schema.results import RunResult, SweepResult, TrialResult
    from plait.workloads.lion import Lion

__version__ = "0.1.0"

__all__ = [
    "AuditReport",
    "Averaging",
    "Cluster",
    "DataLoader",
    "DataParallel",
    "Elastic",
    "FusedModule",
    "FusedOptimizer",
    "GradientNoiseScale",
    "GradientVariance",
    "Job",
    "Lion",
    "OpenedRun",
    "Pipeline",
    "Plan",
    "Profile",
    "RunResult",
    "Shared",
    "StepLoss",
    "StepTimer",
    "SweepResult",
    "Throughput",
    "TrialResult",
    "World",
    "__version__",
    "audit",
    "fuse",
    "init",
    "launch",
    "machines",
    "make_job",
    "open_run",
    "plan",
    "profile",
    "read_job",
    "study",
    "sweep",
    "train",
    "verify_stages",
]

# Where each name is found, and what it is called there.
_HOMES: dict[str, tuple[str, str]] = {
    "AuditReport": ("plait.fusion.verify.loop_audit", "AuditReport"),
    "Averaging": ("plait.api.averaging", "Averaging"),
    "Cluster": ("plait.planner", "Cluster"),
    "DataLoader": ("plait.api.data_loader", "DataLoader"),
    "DataParallel": ("plait.api.data_parallel", "DataParallel"),
    "Elastic": ("plait.api.elastic", "Elastic"),
    "FusedModule": ("plait.fusion", "FusedModule"),
    "FusedOptimizer": ("plait.fusion", "FusedOptimizer"),
    "GradientNoiseScale": ("plait.adapt.monitors.gradients", "GradientNoiseScale"),
    "GradientVariance": ("plait.adapt.monitors.gradients", "GradientVariance"),
    "Job": ("plait.schema.job", "Job"),
    "Lion": ("plait.workloads.lion", "Lion"),
    "OpenedRun": ("plait.jobs.open_run", "OpenedRun"),
    "Pipeline": ("plait.api.pipeline", "Pipeline"),
    "Plan": ("plait.planner", "Plan"),
    "Profile": ("plait.profiler.profile", "Profile"),
    "RunResult": ("plait.schema.results", "RunResult"),
    "Shared": ("plait.fusion", "Shared"),
    "StepLoss": ("plait.api.stages.step_loss", "StepLoss"),
    "StepTimer": ("plait.adapt.monitors.step_times", "StepTimer"),
    "SweepResult": ("plait.schema.results", "SweepResult"),
    "Throughput": ("plait.adapt.monitors.step_times", "Throughput"),
    "TrialResult": ("plait.schema.results", "TrialResult"),
    "World": ("plait.api.world", "World"),
    "audit": ("plait.fusion.verify.loop_audit", "audit"),
    "fuse": ("plait.fusion", "fuse"),
    "init": ("plait.api.world", "init"),
    "launch": ("plait.api.launching", "launch"),
    "machines": ("plait.planner", "machines"),
    "make_job": ("plait.schema.job", "make_job"),
    "open_run": ("plait.jobs.open_run", "open_run"),
    "plan": ("plait.planner", "make_plan"),
    "profile": ("plait.profiler.profile", "profile_model"),
    "read_job": ("plait.schema.job", "read_job"),
    "study": ("plait.jobs.study", "study"),
    "sweep": ("plait.jobs.sweep", "sweep"),
    "train": ("plait.jobs.train", "train"),
    "verify_stages": ("plait.pipeline.verify.verify_stages", "verify_stages"),
}


if not TYPE_CHECKING:  # a checker knows the names from above, and that there are no others

    def __getattr__(name: str) -> object:
        if name in _HOMES:
            module, there = _HOMES[name]
            return getattr(importlib.import_module(module), there)
        raise AttributeError(f"module 'plait' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
