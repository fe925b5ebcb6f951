"""Runs from a job: its plan made where it asks for one, then trained on its workers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from plait.core.logs import kept_warnings
from plait.core.names import searching
from plait.launch.display import Display, Silent
from plait.launch.run import StartWorkers, check_alone, launch
from plait.launch.run_dir import RunKind, choose_folder, new_run
from plait.launch.supervisor import Supervisor
from plait.schema.job import Job, as_job
from plait.schema.results import RunResult
from plait.schema.sync_options import lease_of
from plait.schema.topology_spec import check_topology


def train(
    job: Job | str | Path | Mapping[str, Any],
    *,
    resume: bool = False,
    run_folder: str | None = None,
    display: Display | None = None,
) -> RunResult:
    """Run `job`, or the one in a file, on its workers to its end; what it came to.

    The same as `plait train`: the folder is new, `run_folder`, or on resume that of the job's latest run.
    Modules that the job names are looked for where this process finds them, in the current folder and in that
    of the job file.
    """
    check_alone()
    return train_on(as_job(job), resume, run_folder, display or Silent(), Supervisor)


def train_on(
    job: Job, resume: bool, run_folder: str | None, display: Display, start: StartWorkers
) -> RunResult:
    """Run `job` on workers that `start` provides."""
    settings, placement = job.settings(), job.placement
    check_topology(settings.topology, placement.workers)
    run_dir, messages = Path(job.run_dir), list[str]()
    with searching(os.getcwd(), job.folder):
        folder = choose_folder(run_dir, job.name, resume, run_folder, RunKind.TRAIN)
        if job.parallel.plan != "data-parallel":
            from plait.measure.auto_plan import plan_job, settings_before
            from plait.planner import describe_plan

            before = settings_before(folder.settings) if folder is not None and resume else None
            with kept_warnings() as noticed:
                settings, placement, plan, warnings = plan_job(job, settings, placement, before)
            messages = [*noticed, *warnings]
            for line in [describe_plan(plan)] * (job.parallel.plan == "auto") + messages:
                display.printed(line)
        if job.parallel.elastic or placement.workers > 1:
            lease_s = lease_of(settings.sync.kind, settings.sync.options)
            placement = replace(placement, lease_s=lease_s)
        folder = folder or new_run(run_dir, job.name)
        result = launch(settings, placement, folder, display, resume=resume, job_text=job.text(), start=start)
    return replace(result, warnings=(*messages, *result.warnings))
