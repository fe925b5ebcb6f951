"""`open_run`: the model, the history and the result of a run, in Python."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from plait.core import events, run_events
from plait.core.errors import InputError
from plait.core.names import did_you_mean, searching
from plait.core.shown import shown
from plait.data.call_model import set_mode
from plait.jobs import evaluate
from plait.jobs.from_objects import as_set
from plait.launcher.run_dir import RunDir, RunKind, find_run
from plait.schema.results import RunResult, numbers
from plait.schema.settings import MetricSettings, TrainSettings
from plait.training.components import build_without_data
from plait.verification import unchanged_random_numbers
from plait.workloads.metrics import (
    NAMED,
    NamedMetric,
    check_names,
    find_metric,
    find_metrics,
    name_of,
    named_metric,
)

# What the steps of a run have in their record, by name.
_OF_STEPS = ("loss", "lr", "epoch")
_TEST = "test_"


def open_run(run: str | Path, run_dir: str | Path = "runs", *, trust: bool = False) -> OpenedRun:
    """The run that `run` names: a folder, a name below `run_dir`, or a job's name, which is its latest run.

    What another user's run names, such as its model, is code of theirs; it is refused unless `trust` is set.

    Examples:
        ```python
        run = plait.open_run("linear")  # the latest run of that name below runs/
        run.result.train_loss
        ```
    """
    folder = find_run(str(run), Path(run_dir))
    if not trust:
        folder.check_owner("pass trust=True")
    if folder.record.exists() and (kind := folder.read_record().kind) is not RunKind.TRAIN:
        raise InputError(f"{folder.path}: holds {kind.label}, expected a training run")
    return OpenedRun(folder)


class OpenedRun:
    """A run of a job, finished or not, as its folder has it; made by `open_run`.

    Examples:
        ```python
        run = plait.open_run("linear")
        run.history("loss")  # [(7, 0.52), ...]
        run.model()
        ```
    """

    def __init__(self, folder: RunDir) -> None:
        self._folder = folder

    def __repr__(self) -> str:
        return f"plait.open_run({str(self.folder)!r})"

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        return self._folder.path

    @property
    def result(self) -> RunResult:
        """What the run came to; InputError while it has not ended."""
        if not self._folder.result.exists():
            raise InputError(f"{self.folder}: it has no result yet; see: plait status {self.folder}")
        content = json.loads(self._folder.result.read_text())
        return replace(RunResult.of_plain(content, str(self._folder.result)), run=str(self.folder))

    def history(self, name: str = "loss") -> list[tuple[int, float]]:
        """The values of `name` with their steps, in order.

        `loss`, `lr` and `epoch` are those of training: there is an entry every tenth of a second, or every
        `log_every_steps` of the job, and its `loss` is the mean over the steps since the entry before
        (`result.train_loss` is that of the last step alone). The metrics of the evaluations are `test_loss`,
        `test_accuracy` and so on. What is infinite or no number is NaN.
        """
        curves = self._curves()
        if name not in curves:
            raise InputError(f"history: {self.folder} has no {name!r}{did_you_mean(name, curves)}")
        return sorted(curves[name].items())

    def _curves(self) -> dict[str, dict[int, float]]:
        path = self._folder.events()
        if not path.exists():
            raise InputError(f"{self.folder}: it has no events yet; see: plait status {self.folder}")
        curves: dict[str, dict[int, float]] = {}
        for recorded in events.read(path):
            event, values = recorded.event, dict[str, float | None]()
            if isinstance(event, run_events.RunStarted):  # steps after the checkpoint are taken again
                curves = {
                    name: {step: value for step, value in curve.items() if step <= event.step}
                    for name, curve in curves.items()
                }
            elif isinstance(event, run_events.Step):
                values = {name: getattr(event, name) for name in _OF_STEPS}
                step = event.step
            elif isinstance(event, run_events.Evaluated):
                values = {_TEST + name: value for name, value in event.metrics.items()}
                step = event.step
            for name, value in numbers(values).items():
                curves.setdefault(name, {})[step] = value
        return curves

    def model(self, best: bool = False, ema: bool | None = None) -> nn.Module:
        """The trained model of the newest, or the best, checkpoint: on the CPU, in evaluation mode.

        Where the run keeps a moving average of the weights, `ema` says whether the model has it; by default
        it has the weights that the run evaluates.
        """
        with self._importing():
            settings = self._with_ema(evaluate.read_settings(self._folder), ema)
            state = evaluate.read_state(self._folder, best)
            components = build_without_data(settings, torch.device("cpu"))
            evaluate.load_state(components, state)
            set_mode(components.optimizer, training=False)
        return components.model.eval()

    def _with_ema(self, settings: TrainSettings, ema: bool | None) -> TrainSettings:
        optimizer = settings.optimizer
        if optimizer.ema is None or ema is None:
            if ema:
                raise InputError(f"ema: {self.folder} has none; set optimizer.ema in the job")
            return settings
        return replace(settings, optimizer=replace(optimizer, ema=replace(optimizer.ema, evaluate=ema)))

    def evaluate(
        self, dataset: Any = None, metrics: Sequence[object] | None = None, best: bool = False
    ) -> dict[str, float]:
        """Loss and metrics on `dataset`, or the run's test split, of the newest, or the best, checkpoint.

        Each of `metrics` is as in `plait.train`: a name, such as `accuracy`, a function of (output, target),
        a metric of torchmetrics, or a dict with one of them as `call`; without them they are the job's. The
        job's own metrics may be named, too.
        """
        with self._importing():
            settings = evaluate.read_settings(self._folder)
            of_job = {each.name: each for each in find_metrics(settings.evaluate, settings.loss)}
            chosen = None if metrics is None else _metrics_of(metrics, of_job)
            return evaluate.measure_on(self._folder, best, as_set(dataset, "test"), chosen)

    @contextlib.contextmanager
    def _importing(self) -> Iterator[None]:
        """Find the modules and objects that the run names, and leave random numbers as they were."""
        record = self._folder.record
        modules = self._folder.read_record().modules if record.exists() else ()
        with searching(os.getcwd(), *modules, str(self.folder.absolute())), unchanged_random_numbers():
            yield


def _metrics_of(given: Sequence[object], of_job: Mapping[str, NamedMetric]) -> tuple[NamedMetric, ...]:
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise InputError(f"metrics: found {shown(given)}, expected a list: metrics=[...]")
    metrics = []
    for each in given:
        section: dict[str, Any] = dict(each) if isinstance(each, Mapping) else {"call": each}
        call = section.pop("call", None)
        unknown = next((key for key in section if key not in ("mode", "name", "options")), None)
        if unknown is not None or call is None:
            raise InputError(f"metrics: found {shown(each)}, expected a dict with call, name and options")
        settings = MetricSettings(call if isinstance(call, str) else name_of(call), **section)
        if isinstance(call, str) and call in of_job:
            metrics.append(replace(of_job[call], name=settings.name or call))
        elif isinstance(call, str) and call not in ("auto", "none", *NAMED) and ":" not in call:
            hint = did_you_mean(call, [*of_job, *NAMED])
            raise InputError(f"metrics: found {call!r}, which neither the job nor Plait has{hint}")
        elif not isinstance(call, str):
            metrics.append(named_metric(settings.name or settings.call, call, settings, "metrics"))
        elif (metric := find_metric(settings, "cross-entropy", "metrics")) is not None:
            metrics.append(metric)
        else:
            raise InputError("metrics: found 'none'; pass an empty list for the loss alone")
    return check_names(metrics)
