"""`plait.train`: a run from a job, or from the objects of a script."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.core.errors import InputError
from plait.core.shown import shown
from plait.jobs.train_on import train_on_hosts
from plait.launcher.display import Display, Silent
from plait.launcher.environment import check_alone
from plait.schema.job import Job, as_job
from plait.schema.results import RunResult

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer


def train(
    job: Job | str | Path | Mapping[str, Any] | None = None,
    *,
    model: type[Module] | Callable[..., Module] | Module | str | None = None,
    data: object = None,
    loss: Callable[..., Tensor] | str | None = None,
    optimizer: Mapping[str, Any] | Callable[..., Optimizer] | str | None = None,
    metric: Callable[..., Any] | str | None = None,
    metrics: Sequence[object] | None = None,
    callbacks: Sequence[object] | None = None,
    epochs: int | None = None,
    steps: int | None = None,
    batch_size: int | None = None,
    workers: int | None = None,
    name: str | None = None,
    progress: bool = False,
    resume: bool = False,
    run_folder: str | None = None,
    display: Display | None = None,
    **keys: Any,
) -> RunResult:
    """Run a job on its workers to its end; what it came to.

    With `job`, a job or the path of its file, it is the same as `plait train`: the folder is new,
    `run_folder`, or on resume that of the job's latest run. Modules that the job names are looked for where
    this process finds them, in the current folder and in that of the job file.

    Otherwise the job is made of the arguments. `model` is a class, a function, or a module, of which each
    worker trains a copy. `data` is a data set, or one to train with and one to test with; a tuple of tensors
    is a data set, too. `loss` takes the output and the target and returns the mean over the batch;
    `optimizer` is a dict, such as `{"kind": "adamw", "lr": 0.01}`, or `functools.partial(torch.optim.AdamW,
    lr=0.01)`; `metric` is a function of the output and the target, or a metric of torchmetrics, and `metrics`
    are several. `callbacks` are objects with some of the methods of `plait.callbacks.Callback`, or classes of
    such. Each of both lists may be a name `module:name`, or a dict with `call` and `options`, a metric's also
    with `mode` and `name`. `batch_size` is that of all workers, 32 unless given.
    `keys` are those of a job file. Code of a script or a notebook is kept by value in the run folder. One
    worker is this process itself.
    """
    check_alone()
    given = {
        "model": model,
        "data": data,
        "loss": loss,
        "optimizer": optimizer,
        "metric": metric,
        "metrics": metrics,
        "callbacks": callbacks,
        "epochs": epochs,
        "steps": steps,
        "batch_size": batch_size,
        "workers": workers,
        "name": name,
        **keys,
    }
    with contextlib.ExitStack() as stack:
        if progress and display is None:
            from plait.report.terminal import RunDisplay

            display = stack.enter_context(RunDisplay())
        display = display or Silent()
        if job is None:
            from plait.jobs.from_objects import train_objects

            return train_objects(given, resume, run_folder, display)
        _check_is_job(job)
        if extra := [key for key, value in given.items() if value is not None]:
            raise InputError(
                f"{extra[0]}: found it besides a job, which has its own; change the job instead: "
                f"plait.read_job(path, [({extra[0]!r}, value)])"
            )
        return train_on_hosts(as_job(job), resume, run_folder, display)


def _check_is_job(job: object) -> None:
    if not isinstance(job, (Job, str, Path, Mapping)):
        raise InputError(
            f"job: found {shown(job)}, expected a job, its file or its content; pass a model by its keyword: "
            f"plait.train(model=..., data=...)"
        )
