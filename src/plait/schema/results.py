"""What runs and sweeps come to: frozen values that print for people and dump as the JSON of `--json`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from plait.core.codec import encode
from plait.core.units import count_of, show_rate, show_seconds

# Trials that a printed sweep shows.
_SHOWN = 10


@dataclass(frozen=True)
class RunResult:
    """What a training run came to.

    `reason` is why it ended: `finished`, `stopped` or `early-stop`. `steps` is how many it was to take, None
    where the data's end decides. A loss or metric is None where there is none, or where it is not a number.
    `test` has the metrics of the last evaluation and `best` those of the best checkpoint, with its `step`.
    `verified_s` is how long stages were compared with the plain model, where they were. `run` is the run's
    folder.
    """

    reason: str
    step: int
    steps: int | None
    train_loss: float | None
    test: Mapping[str, float | None]
    best: Mapping[str, int | float | None] | None
    samples_per_s: float
    seconds: float
    workers: int
    device: str
    verified_s: float | None = None
    run: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as `plait train --json` prints them."""
        return _without(encode(self), verified_s=None, run="")

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        total = "" if self.steps is None else f" of {self.steps}"
        yield f"{self.reason} at step {self.step}{total} after {show_seconds(self.seconds)}"
        yield f"{show_rate(self.samples_per_s)} samples/s on {self.workers} x {self.device}"
        if self.train_loss is not None or self.step > 0:
            yield f"training loss {show_metric('loss', self.train_loss)}"
        if self.test:
            yield f"test {show_metrics(self.test)}"
        if self.best:
            metrics = {name: value for name, value in self.best.items() if name != "step"}
            yield f"best at step {self.best['step']}: {show_metrics(metrics)}"
        if self.run:
            yield self.run


@dataclass(frozen=True)
class TrialResult:
    """One trial of a sweep: its number, the values put over the job's, how far it came and how well."""

    trial: int
    state: str
    step: int
    values: Mapping[str, Any]
    metrics: Mapping[str, float | None]
    train_loss: float | None

    def __str__(self) -> str:
        values = ", ".join(f"{key} {show_value(value)}" for key, value in self.values.items())
        found = f"test {show_metrics(self.metrics)}" if self.metrics else "not evaluated"
        return f"trial {self.trial} ({values}): {found}, {self.state} at step {self.step}"


@dataclass(frozen=True)
class ArrayResult:
    """Trials that one worker, or one team, trained together: `most` at once, fused or, for `why`, not."""

    number: int
    worker: int
    trials: tuple[int, ...]
    most: int
    fused: bool
    why: str


@dataclass(frozen=True)
class SweepResult:
    """What a sweep came to; `trials` are in order, best first, and `run` is the folder with the best one.

    `step` counts the trials that have ended, of `steps`. `best` is None where no trial came to its end.
    `replicas` workers trained each array together.
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

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as `plait sweep --json` prints them."""
        return _without(encode(self), run="")

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        rate = f"{show_rate(self.trial_steps_per_s)} trial steps/s on {count_of(self.workers, 'worker')}"
        yield f"{self.reason}: {self.step} of {self.steps} trials in {show_seconds(self.seconds)}, {rate}"
        yield f"best first, by {self.metric}:"
        yield from (f"  {trial}" for trial in self.trials[:_SHOWN])
        if len(self.trials) > _SHOWN:
            yield f"  and {len(self.trials) - _SHOWN} more"
        if self.run:
            yield self.run


def show_metric(name: str, value: float | None) -> str:
    """`93.4%` for an accuracy, `0.1234` for anything else."""
    if value is None:
        return "not a number"
    return f"{value:.1%}" if name == "accuracy" else f"{value:.4g}"


def show_metrics(metrics: Mapping[str, float | None]) -> str:
    """`loss 0.21, accuracy 93.4%`"""
    return ", ".join(f"{name} {show_metric(name, value)}" for name, value in metrics.items())


def show_value(value: Any) -> str:
    """A trial's value of some key, numbers in few digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _without(plain: dict[str, Any], **absent: Any) -> dict[str, Any]:
    """`plain` less those of `absent` that have this value."""
    return {key: value for key, value in plain.items() if key not in absent or value != absent[key]}
