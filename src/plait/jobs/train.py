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

    Otherwise the job is made of the arguments. Code of a script or a notebook is kept by value in the run
    folder. One worker is this process itself.

    Args:
        job: a job, its content, or the path of its file.
        model: a class, a function, or a module, of which each worker trains a copy.
        data: a data set, or one to train with and one to test with; a tuple of tensors is a data set, too.
        loss: takes the output and the target and returns the mean over the batch; or a name.
        optimizer: a dict, such as `{"kind": "adamw", "lr": 0.01}`, or `partial(torch.optim.AdamW, lr=0.01)`.
        metric: a function of the output and the target, a metric of torchmetrics, or a name.
        metrics: several of these, or dicts with `call` and `options`, and `mode` and `name`.
        callbacks: objects with some of the methods of `plait.callbacks.Callback`, classes of such, names
            `module:name`, or dicts with `call` and `options`.
        epochs: how long to train; or `steps`.
        steps: how many updates to take.
        batch_size: samples of a batch over all workers, 32 unless given.
        workers: how many processes train, 1 unless given.
        name: that of the run.
        progress: show progress on standard error.
        resume: go on from the newest checkpoint of the job's latest run, or of `run_folder`.
        run_folder: the folder of the run, in place of a new one.
        keys: further keys of a job file.

    Examples:
        ```python
        x = torch.randn(64, 8)
        result = plait.train(
            model=lambda: nn.Linear(8, 1),
            data=((x, x.sum(1, keepdim=True)), None),
            loss="mse",
            epochs=2,
            name="linear",
        )
        result.train_loss
        ```
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
