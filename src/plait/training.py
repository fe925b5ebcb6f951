"""Runs from a job: its plan made where it asks for one, then trained on its workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from plait.cluster.hosts import LOCAL, Host
from plait.config import Job, as_job, check_slow
from plait.runtime.folder import choose_folder
from plait.runtime.launch import Display, Placement, Silent, launch
from plait.runtime.settings import TrainSettings


def train(
    job: Job | str | Path | Mapping[str, Any],
    *,
    resume: bool = False,
    run_folder: str | None = None,
    display: Display | None = None,
) -> dict[str, Any]:
    """Run `job`, or the one in a file, on its workers to its end; what it came to, with `run`, its folder.

    The same as `plait train`: the folder is new, `run_folder`, or on resume the latest of this job.
    """
    job = as_job(job)
    settings, placement = job.settings(), job.placement()
    if job.parallel.plan != "data-parallel":
        settings, placement = _planned(job, settings, placement, display or Silent())
    folder = choose_folder(Path(job.run_dir), job.name, resume, run_folder)
    result = launch(settings, placement, folder, display or Silent(), resume=resume, job_text=job.text())
    return {**result, "run": str(folder.path)}


def _planned(
    job: Job, settings: TrainSettings, placement: Placement, display: Display
) -> tuple[TrainSettings, Placement]:
    """The job's settings with its plan, which says how many workers there are where the job does not."""
    from plait.planner import describe_plan
    from plait.runtime.pipeline_trainer import check_pipeline
    from plait.runtime.planned import PlanWish, planned

    wish = job.parallel
    settings, plan = planned(
        settings,
        placement,
        PlanWish(
            wish.plan,
            wish.schedule,
            wish.microbatches,
            wish.vertical_sync,
            wish.depths,
            tuple(wish.recompute),
        ),
    )
    if wish.workers is None and not job.cluster.hosts:
        placement = replace(placement, hosts=(Host(LOCAL, plan.devices_used),))
    workers = sum(host.slots for host in placement.hosts)
    check_slow(wish.slow, workers)
    check_pipeline(settings, workers)
    if wish.plan == "auto":
        display.printed(describe_plan(plan))
    return settings, placement
