"""Results of runs and sweeps: frozen values with a printed form and the JSON of `--json`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from plait.core.codec import decode, encode, finite
from plait.core.units import count_of, show_rate, show_seconds

# The number of trials in the printed form of a sweep.
_MAX_TRIALS = 10


@dataclass(frozen=True)
class RunResult:
    """The result of a training run.

    `reason` is why it ended: `finished`, `stopped` or `early-stop`; one that diverged raises an error.
    `steps` is its planned number of steps, None if the end of the data decides. `train_loss` is the loss of
    the last step's batch, None if no step was taken. What is infinite or no number is NaN. `test` has the
    metrics of the last evaluation and `best` those of the best checkpoint, with its `step`; `mode` says by
    name whether less (`min`) or more (`max`) is better, where that is known. `verified_s` is the time spent
    comparing stages with the plain model, None if that was not done. `audited_steps` is the number of steps
    that were taken a second time as plain PyTorch takes them, and `largest_difference` how far apart the two
    were at most, relative to the largest value. `run` is the run's folder. `warnings` are those of all
    workers, each once.

    Examples:
        ```python
        result = plait.open_run("linear").result
        result.reason, result.step, result.train_loss
        ```
    """

    reason: str
    step: int
    steps: int | None
    train_loss: float | None
    test: Mapping[str, float]
    best: Mapping[str, int | float] | None
    samples_per_s: float
    seconds: float
    workers: int
    device: str
    verified_s: float | None = None
    audited_steps: int | None = None
    largest_difference: float | None = None
    run: str = ""
    mode: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @classmethod
    def of_plain(cls, content: Mapping[str, Any], where: str = "") -> RunResult:
        """The result of which `to_dict` has made `content`."""
        return decode(cls, _with_nans(content), where)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as `plait train --json` prints them: JSON, in which NaN is null."""
        return _without(plain(self), verified_s=None, audited_steps=None, largest_difference=None, run="")

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        total = "" if self.steps is None else f" of {self.steps}"
        yield f"{self.reason} at step {self.step}{total} after {show_seconds(self.seconds)}"
        yield f"{show_rate(self.samples_per_s)} samples/s on {self.workers} x {self.device}"
        if self.train_loss is not None:
            yield f"training loss {show_metric('loss', self.train_loss)}"
        if self.test:
            yield f"test {show_metrics(self.test)}"
        if self.best:
            metrics = {name: value for name, value in self.best.items() if name != "step"}
            yield f"best at step {self.best['step']}: {show_metrics(metrics)}"
        yield from _last_lines(self)


@dataclass(frozen=True)
class TrialResult:
    """One trial of a sweep: its number, its hyperparameters, its last step and its metrics.

    `why` says why a trial failed.

    Examples:
        ```py
        best = plait.sweep("digits.yaml", {"optimizer.lr": [0.1, 0.01]}).best
        best.values, best.metrics
        ```
    """

    trial: int
    state: str
    step: int
    values: Mapping[str, Any]
    metrics: Mapping[str, float]
    train_loss: float | None
    why: str = ""

    @classmethod
    def of_plain(cls, content: Mapping[str, Any], where: str = "") -> TrialResult:
        """The row of which `plain` has made `content`."""
        return decode(cls, _with_nans(content), where)

    def __str__(self) -> str:
        values = ", ".join(f"{key} {show_value(value)}" for key, value in self.values.items())
        test = f"test {show_metrics(self.metrics)}" if self.metrics else "not evaluated"
        why = f": {self.why}" if self.why else ""
        return f"trial {self.trial} ({values}): {test}, {self.state} at step {self.step}{why}"


@dataclass(frozen=True)
class ArrayResult:
    """Trials that one worker or group of workers trained, `most` at once; `why` they were not fused."""

    number: int
    worker: int
    trials: tuple[int, ...]
    most: int
    fused: bool
    why: str


@dataclass(frozen=True)
class SweepResult:
    """The result of a sweep; `trials` are sorted, best first, and `run` is the folder with the best one.

    `reason` is `finished`, `stopped`, or `failed` if every trial failed. `step` counts the trials that have
    ended, of `steps`. Trials are compared by `metric`, of which less (`mode` is `min`) or more (`max`) is
    better. `best` is None if no trial finished. Each array was trained by `replicas` workers. `warnings` are
    those of all workers, each once. `audited_steps` is the number of steps that a fused trial took alone,
    too, and `largest_difference` how far apart the two were at most, relative to the largest value.

    Examples:
        ```py
        result = plait.sweep("digits.yaml", {"optimizer.lr": [0.1, 0.01]})
        result.best.values, [trial.metrics["loss"] for trial in result.trials]
        ```
    """

    reason: str
    step: int
    steps: int
    search: str
    metric: str
    best: TrialResult | None
    trials: tuple[TrialResult, ...]
    arrays: tuple[ArrayResult, ...]
    seconds: float
    trial_steps_per_s: float
    workers: int
    replicas: int
    run: str = ""
    mode: str = ""
    warnings: tuple[str, ...] = ()
    audited_steps: int | None = None
    largest_difference: float | None = None

    @classmethod
    def of_plain(cls, content: Mapping[str, Any], where: str = "") -> SweepResult:
        """The result of which `to_dict` has made `content`."""
        return decode(cls, _with_nans(content), where)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as `plait sweep --json` prints them: JSON, in which NaN is null."""
        return _without(plain(self), run="", audited_steps=None, largest_difference=None)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        rate = f"{show_rate(self.trial_steps_per_s)} trial steps/s on {count_of(self.workers, 'worker')}"
        yield f"{self.reason}: {self.step} of {self.steps} trials in {show_seconds(self.seconds)}, {rate}"
        yield f"best first, by {self.metric}:"
        yield from (f"  {trial}" for trial in self.trials[:_MAX_TRIALS])
        if len(self.trials) > _MAX_TRIALS:
            yield f"  and {len(self.trials) - _MAX_TRIALS} more"
        yield from _last_lines(self)


def plain(result: Any) -> Any:
    """A result, or rows of one, as JSON has it: what is no finite number is null."""
    return _with_nulls(encode(result))


def _with_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_nulls(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_with_nulls(each) for each in value]
    return finite(value) if isinstance(value, float) else value


def numbers(metrics: Mapping[str, float | None]) -> dict[str, float]:
    """Metrics of JSON, in which what is no finite number is null."""
    return {name: math.nan if value is None else value for name, value in metrics.items()}


def _with_nans(content: Any) -> Any:
    """The content of a result, or of rows of one, with NaN where its JSON has null for a number."""
    if isinstance(content, list):
        return [_with_nans(each) for each in content]
    if not isinstance(content, Mapping):
        return content
    known = dict(content)
    for name, value in content.items():
        if name in ("test", "best", "metrics") and isinstance(value, Mapping) and "trial" not in value:
            known[name] = numbers(value)
        elif name in ("best", "trials"):
            known[name] = _with_nans(value)
    # None stays where no step was taken.
    if known.get("train_loss", 0.0) is None and known.get("step"):
        known["train_loss"] = math.nan
    return known


def show_metric(name: str, value: float | None) -> str:
    """`93.4%` for an accuracy, `0.1234` for anything else."""
    if value is None or not math.isfinite(value):
        return "not a number"
    return f"{value:.1%}" if name == "accuracy" else f"{value:.4g}"


def show_metrics(metrics: Mapping[str, float | None]) -> str:
    """`loss 0.21, accuracy 93.4%`"""
    return ", ".join(f"{name} {show_metric(name, value)}" for name, value in metrics.items())


def show_value(value: Any) -> str:
    """A hyperparameter, floats to four digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _without(plain: dict[str, Any], **absent: Any) -> dict[str, Any]:
    """`plain` without the keys of `absent` whose values are equal in both."""
    return {key: value for key, value in plain.items() if key not in absent or value != absent[key]}


def _last_lines(result: RunResult | SweepResult) -> Iterator[str]:
    if result.audited_steps is not None:
        steps, largest = count_of(result.audited_steps, "step"), result.largest_difference
        yield f"audited {steps}, largest difference {largest:.1g}"
    yield from (f"warning: {text}" for text in result.warnings)
    if result.run:
        yield result.run
