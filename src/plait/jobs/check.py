"""A job tried out: a few of its steps on its workers, in a run folder that is removed again.

A run looks at its code, data, loss and metric itself before the first step; this takes what it records.
"""

from __future__ import annotations

import itertools
import math
import os
import shutil
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from plait.callbacks.callback import callbacks_of, check_callbacks
from plait.core.codec import encode
from plait.core.errors import PlaitError
from plait.core.events import Event, read
from plait.core.names import searching
from plait.core.run_events import CheckpointSaved, Evaluated, RunEnded, RunStarted, Step
from plait.jobs.train import train
from plait.launcher.display import Display, Silent
from plait.launcher.run_dir import RunDir, new_run
from plait.schema.job import Job, as_job

EventKind = TypeVar("EventKind", bound=Event)


@dataclass(frozen=True)
class CheckReport:
    """What a trial of a job showed.

    `samples` are those of an epoch and `run_steps` the steps of the whole run, None where the end of the data
    decides. `losses` are those of the first and the last step that was tried. `step_s`, `evaluation_s` and
    `checkpoint_s` are the seconds of each, and `run_s` what they amount to for the whole run. `memory_bytes`
    is the most that the worker of rank 0 held: of its GPU if it has one, else of its process.
    """

    name: str
    model: str
    parameters: int
    workers: int
    device: str
    samples: int | None
    batch_size: int
    steps: int
    run_steps: int | None
    losses: tuple[float | None, float | None]
    test: Mapping[str, float | None]
    step_s: float
    evaluation_s: float | None
    checkpoint_s: float
    run_s: float | None
    memory_bytes: int
    audited_steps: int | None
    warnings: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as `plait check --json` prints them."""
        values: dict[str, Any] = encode(self)
        return values


def check(
    job: Job | str | Path | Mapping[str, Any], *, steps: int = 8, display: Display | None = None
) -> CheckReport:
    """Take `steps` steps of `job` on its workers and evaluate once; what was measured, and what is expected.

    Nothing is left of it, but for the logs of one that fails. What a run would refuse, and what fails in it,
    is raised as by `train`.
    """
    job, display = as_job(job), display or Silent()
    with searching(os.getcwd(), job.folder):
        check_callbacks(callbacks_of(job))  # they are not called
    folder = new_run(Path(job.run_dir), f"{job.name}-check")
    is_kept = False
    try:
        result = train(_shortened(job, steps), run_folder=str(folder.path), display=display)
        if result.reason == "stopped":
            raise KeyboardInterrupt  # as before the first step
        return _report(job, _events(folder), result.audited_steps, result.warnings)
    except PlaitError as failure:
        is_kept = failure.exit_status == PlaitError.exit_status  # its message names the log
        if passed := _passed(_events(folder)):
            display.printed(f"in order so far: {', '.join(passed)}")
        raise
    finally:
        if not is_kept:
            shutil.rmtree(folder.path, ignore_errors=True)
            folder.remove_made()


def _shortened(job: Job, steps: int) -> Job:
    """The job with a few steps, each of them recorded, and one evaluation, at the end."""
    return replace(
        job,
        epochs=None,
        steps=steps,
        log_every_steps=1,
        early_stop=None,
        tensorboard=False,
        callbacks=(),
        evaluate=replace(job.evaluate, every_steps=None),
        checkpoint=replace(job.checkpoint, every_steps=steps, keep_best=None),
    )


def _events(folder: RunDir) -> list[Event]:
    path = folder.events()
    return [recorded.event for recorded in read(path)] if path.exists() else []


def _of(events: Sequence[Event], kind: type[EventKind]) -> list[EventKind]:
    return [event for event in events if isinstance(event, kind)]


def _passed(events: Sequence[Event]) -> list[str]:
    """What is known to work, after a trial that failed."""
    passed = list[str]()
    if _of(events, RunStarted):
        passed += ["the model", "the data", "the loss", "the first test batches"]
    if taken := _of(events, Step):
        passed.append(f"{taken[-1].step} steps")
    return passed


def _occasions(steps: int, every: int, other: int) -> int:
    """How often something is done that is due every `every` steps, every `other` steps, and at the end."""
    ends_between = steps % every != 0 and steps % other != 0
    return steps // every + steps // other - steps // math.lcm(every, other) + ends_between


def _report(
    job: Job, events: Sequence[Event], audited_steps: int | None, warnings: tuple[str, ...]
) -> CheckReport:
    from plait.data.sampler import steps_per_epoch  # imports torch

    (started,), taken = _of(events, RunStarted), _of(events, Step)
    evaluations, ended = _of(events, Evaluated), _of(events, RunEnded)[-1]
    # Where workers go on without each other, rank 0 records some of the steps, each with those before it.
    counts = [after - before for before, after in itertools.pairwise([0, *(step.step for step in taken)])]
    seconds = [step.seconds / max(count, 1) for step, count in zip(taken, counts)]
    # The first steps make buffers and the optimizer's state.
    step_s = statistics.median(seconds[len(seconds) // 4 :])
    evaluation_s = evaluations[-1].seconds if evaluations else None
    checkpoint_s = max(saved.seconds for saved in _of(events, CheckpointSaved))
    run_steps = job.steps
    if job.epochs is not None and started.samples is not None:
        keeps = job.data.last_batch == "keep"
        run_steps = job.epochs * steps_per_epoch(started.samples, job.data.batch_size, keeps)
    run_s = None
    if run_steps is not None:
        # A checkpoint is written before every evaluation, too.
        every = job.evaluate.every_steps or run_steps
        run_s = run_steps * step_s + _occasions(run_steps, every, every) * (evaluation_s or 0.0)
        run_s += _occasions(run_steps, every, job.checkpoint.every_steps or run_steps) * checkpoint_s
    return CheckReport(
        name=job.name,
        model=started.model,
        parameters=started.parameters,
        workers=started.workers,
        device=started.device,
        samples=started.samples,
        batch_size=started.batch_size,
        steps=taken[-1].step,
        run_steps=run_steps,
        losses=(taken[0].loss, taken[-1].loss),
        test=evaluations[-1].metrics if evaluations else {},
        step_s=step_s,
        evaluation_s=evaluation_s,
        checkpoint_s=checkpoint_s,
        run_s=run_s,
        memory_bytes=ended.memory_bytes,
        audited_steps=audited_steps,
        warnings=warnings,
    )
