"""A run from a job on given workers: its plan made where it asks for one, then trained."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

from plait.core.files import write_atomic
from plait.core.logs import kept_warnings
from plait.core.names import searching
from plait.launcher.display import Display
from plait.launcher.launchers import Launcher
from plait.launcher.launchers.attempts import run_on_hosts
from plait.launcher.run import StartWorkers, launch
from plait.launcher.run_dir import RunKind, choose_folder, new_run
from plait.launcher.supervisor import Supervisor
from plait.schema.job import Job
from plait.schema.results import RunResult
from plait.schema.sync_options import lease_of
from plait.schema.topology_spec import check_topology


def train_on(
    job: Job,
    resume: bool,
    run_folder: str | None,
    display: Display,
    start: StartWorkers,
    objects: Mapping[str, bytes] = MappingProxyType({}),
) -> RunResult:
    """Run `job` on workers that `start` provides; `objects` are files that its folder is to have."""
    settings, placement = job.settings(), job.placement
    check_topology(settings.topology, placement.workers)
    run_dir, messages = Path(job.run_dir), list[str]()
    with contextlib.ExitStack() as stack:
        stack.enter_context(searching(os.getcwd(), job.folder))
        folder = choose_folder(run_dir, job.name, resume, run_folder, RunKind.TRAIN)
        if job.parallel.plan != "data-parallel":
            from plait.measure.auto_plan import plan_job, settings_before
            from plait.planner import describe_plan

            before = settings_before(folder.settings) if folder is not None and resume else None
            with kept_warnings() as noticed, _findable(objects):
                settings, placement, plan, warnings = plan_job(job, settings, placement, before)
            messages = [*noticed, *warnings]
            for line in [describe_plan(plan)] * (job.parallel.plan == "auto") + messages:
                display.printed(line)
        if job.parallel.elastic or placement.workers > 1:
            lease_s = lease_of(settings.sync.kind, settings.sync.options)
            placement = replace(placement, lease_s=lease_s)
        folder = folder or new_run(run_dir, job.name)
        # Workers find objects as they find modules.
        stack.enter_context(searching(str(folder.path.absolute()) if objects else None))
        result = launch(
            settings,
            placement,
            folder,
            display,
            resume=resume,
            job_text=job.text(),
            start=start,
            objects=objects,
        )
        if job.lora is not None and result.reason == "finished":
            from plait.jobs.adapter import save_adapter  # slow to import

            save_adapter(folder)
    return replace(result, warnings=(*messages, *result.warnings))


def train_on_hosts(
    job: Job,
    resume: bool,
    run_folder: str | None,
    display: Display,
    objects: Mapping[str, bytes] = MappingProxyType({}),
) -> RunResult:
    """Run `job` on workers that are started on its hosts, again and again if hosts are lost."""

    def run(here: Job, launcher: Launcher, folder: Path | None) -> RunResult:
        start = partial(Supervisor, launcher=launcher)
        named = run_folder if folder is None else str(folder)
        return train_on(here, resume or folder is not None, named, display, start, objects)

    return run_on_hosts(job, display, run)


@contextlib.contextmanager
def _findable(objects: Mapping[str, bytes]) -> Iterator[None]:
    """Let processes that measure a job find its objects, before the run has a folder."""
    if not objects:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="plait-objects-") as folder, searching(folder):
        for name, content in objects.items():
            write_atomic(Path(folder) / name, content, private=True)
        yield
