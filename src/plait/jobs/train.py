"""Runs from a job: its plan made where it asks for one, then trained on its workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from plait.core.codec import encode
from plait.launch.display import Display, Silent
from plait.launch.run import launch
from plait.launch.run_dir import RunDir, choose_folder
from plait.schema.hosts import LOCAL, Host
from plait.schema.job import Job, as_job
from plait.schema.job_checks import check_slow
from plait.schema.placement import Placement
from plait.schema.results import RunResult
from plait.schema.settings import TrainSettings


def train(
    job: Job | str | Path | Mapping[str, Any],
    *,
    resume: bool = False,
    run_folder: str | None = None,
    display: Display | None = None,
) -> RunResult:
    """Run `job`, or the one in a file, on its workers to its end; what it came to.

    The same as `plait train`: the folder is new, `run_folder`, or on resume the latest of this job.
    """
    job = as_job(job)
    settings, placement = job.settings(), job.placement()
    # Where a run goes on, its folder is there, and holds the plan it had.
    before = choose_folder(Path(job.run_dir), job.name, True, run_folder) if resume else None
    if job.parallel.plan != "data-parallel":
        settings, placement = _planned(job, settings, placement, display or Silent(), before)
    folder = before or choose_folder(Path(job.run_dir), job.name, False, run_folder)
    return launch(settings, placement, folder, display or Silent(), resume=resume, job_text=job.text())


def _planned(
    job: Job, settings: TrainSettings, placement: Placement, display: Display, before: RunDir | None
) -> tuple[TrainSettings, Placement]:
    """The job's settings with its plan, which says how many workers there are where the job does not."""
    from plait.measure.auto_plan import (
        describe_clipping,
        describe_memory,
        describe_updates,
        on_fewer_workers,
        other_microbatch,
        planned,
        settings_before,
    )
    from plait.planner import describe_plan
    from plait.training.engines.pipeline import check_pipeline

    parallel = job.parallel
    settings, plan = planned(
        settings,
        placement,
        parallel,
        settings_before(before.settings) if before is not None else None,
    )
    if parallel.workers is None and not job.cluster.hosts:
        placement = replace(placement, hosts=(Host(LOCAL, plan.devices_used),))
    workers = sum(host.slots for host in placement.hosts)
    words = [describe_plan(plan)] if parallel.plan == "auto" else []
    if parallel.needs_planning and plan.devices_used < workers:
        words.append(f"{plan.devices_used} of {workers} workers run it: the plan has no use for the others")
        plan, placement = on_fewer_workers(plan, placement)
        workers = plan.devices_used
        assert settings.pipeline is not None
        settings = replace(settings, pipeline=replace(settings.pipeline, plan=encode(plan)))
    check_slow(parallel.slow, workers)
    check_pipeline(settings, workers)
    words += [describe_updates(plan, settings), describe_clipping(plan, settings)]
    words += [describe_memory(plan), "" if parallel.needs_planning else other_microbatch(plan, settings)]
    for line in filter(None, words):
        display.printed(line)
    return settings, placement
