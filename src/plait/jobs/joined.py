"""Runs on workers that torchrun, srun or mpirun has started: the same run as `plait train`."""

from __future__ import annotations

import os
from pathlib import Path

import torch.distributed as dist

from plait.api.joined_workers import JoinedWorkers, follow, refuse
from plait.api.world import World, init
from plait.jobs.train_on import train_on
from plait.launcher.display import Display, Silent
from plait.launcher.messages import Launch
from plait.schema.job import Job, Overrides, read_job
from plait.schema.job_checks import ON_THIS_HOST, check_joined
from plait.schema.results import RunResult

# Where the processes of one torchrun keep the folder of their run, for those that it restarts.
_RUN_KEY = "plait/run"


def train_joined(
    job: str | Path,
    overrides: Overrides = (),
    *,
    resume: bool = False,
    run_folder: str | None = None,
    display: Display | None = None,
) -> RunResult:
    """Run a job file with this process as one worker; returns the result, with all its figures on rank 0.

    All processes call it. Their number replaces `parallel.workers`. Processes that torchrun has restarted
    continue their run from its newest checkpoint.
    """
    world = init()
    if not world.is_first:
        return RunResult.of_plain(follow(world), "result")
    has_started = False

    def start(launch: Launch, shown: Display) -> JoinedWorkers:
        nonlocal has_started
        has_started = True
        keep_run(world, str(launch.settings["folder"]))
        return JoinedWorkers(world, launch, shown)

    try:
        asked = _job_for(world, job, overrides)
        if (earlier := kept_run(world)) is not None:
            resume, run_folder = True, earlier
        return train_on(asked, resume, run_folder, display or Silent(), start)
    except BaseException as failure:
        if not has_started:
            refuse(world, failure)
        raise


def _job_for(world: World, path: str | Path, overrides: Overrides) -> Job:
    """The job, with the processes of `world` as its workers; InputError if they cannot run it."""
    job = read_job(path, [*overrides, ("parallel.workers", world.world_size), *ON_THIS_HOST])
    check_joined(job, world.launcher)
    return job


def keep_run(world: World, folder: str) -> None:
    """Let processes that torchrun starts in place of these find the run."""
    if (store := _agent_store(world)) is not None:
        store.set(_RUN_KEY, folder)


def kept_run(world: World) -> str | None:
    """The folder of the run that earlier processes of the same torchrun had begun, if there is one."""
    store = _agent_store(world)
    if store is None or not store.check([_RUN_KEY]):
        return None
    return store.get(_RUN_KEY).decode()


def _agent_store(world: World) -> dist.Store | None:
    """The store of torchrun, which outlives its workers; None if there is none."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    store = world.rendezvous.store
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store
