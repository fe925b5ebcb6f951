"""Runs from a job: its plan made where it asks for one, then trained on its workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from plait.core.logs import kept_warnings
from plait.launch.display import Display, Silent
from plait.launch.run import check_alone, launch
from plait.launch.run_dir import choose_folder
from plait.schema.job import Job, as_job
from plait.schema.results import RunResult


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
    check_alone()
    job = as_job(job)
    display = display or Silent()
    settings, placement = job.settings(), job.placement()
    folder = choose_folder(Path(job.run_dir), job.name, resume, run_folder)
    notes: list[str] = []
    if job.parallel.plan != "data-parallel":
        from plait.measure.auto_plan import plan_job, settings_before  # imports torch
        from plait.planner import describe_plan

        with folder.removed_on_failure(), kept_warnings() as noticed:
            before = settings_before(folder.settings)
            settings, placement, plan, notes = plan_job(job, settings, placement, before)
        notes = [*noticed, *notes]
        for line in [describe_plan(plan)] * (job.parallel.plan == "auto") + notes:
            display.printed(line)
    result = launch(settings, placement, folder, display, resume=resume, job_text=job.text())
    return replace(result, warnings=(*notes, *result.warnings))
