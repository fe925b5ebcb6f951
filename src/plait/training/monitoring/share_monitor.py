"""Monitors of members of decentralized training: each measures its updates, and all exchange the sums.

No gradient of all members exists here. A member compares the first microbatch of its share with the share,
or, where partial reduce averages gradients, its gradient with its group's. Each worker of a pipeline does so
in its stages, and their moments add up to those of the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

from torch import Tensor

from plait.adapt.monitors.gradient_noise import GradientMoments, GradientNorms, estimate
from plait.core.run_events import Signals
from plait.sync.averaging.base import WeightAveraging
from plait.training.monitoring.required_signals import wants_norms
from plait.training.monitoring.signals import step_signals
from plait.training.trial import Trial


@dataclass
class MomentSums:
    """Sums over those updates of a trial whose gradients could be measured, in the order of exchange."""

    measured: float = 0.0
    variance: float = 0.0
    squared_norm: float = 0.0
    whole: float = 0.0

    def update(self, norms: GradientNorms) -> None:
        moments = estimate(norms)
        if moments is not None:
            self.add(moments, norms.whole)

    def add(self, moments: GradientMoments, whole: float) -> None:
        """Add the moments of one update, whose gradient has the squared norm `whole`."""
        self.measured += 1
        self.variance += moments.variance
        self.squared_norm += moments.squared_norm
        self.whole += whole

    def take(self) -> list[float]:
        """The sums since the last call."""
        sums = list(vars(self).values())
        self.measured = self.variance = self.squared_norm = self.whole = 0.0
        return sums


@dataclass(frozen=True)
class UpdateReport:
    """What one worker measured in an interval; `position` is its number in its member.

    `moments` are the sums of each trial, as `MomentSums` takes them; empty if the job needs none.
    """

    position: int
    updates: int
    work_s: float
    moments: list[list[float]]


class ShareMonitor:
    """Measures one worker's updates on its member's shares of the batches of one trial, or of fused trials.

    The gradient noise of each trial is added to its own. `warn` is called if something cannot be measured,
    `on_signals` with the signals of each interval of the first trial.
    """

    def __init__(
        self,
        trials: Sequence[Trial],
        warn: Callable[[str], None],
        on_signals: Callable[[Signals], None] = lambda signals: None,
    ) -> None:
        self._trials = trials
        self._warn = warn
        self._on_signals = on_signals
        # Of each trial; empty if the job needs none.
        self.moments = [MomentSums() for _ in trials] if wants_norms(trials[0].settings) else []
        self._updates, self._work_s = 0, 0.0

    def warn_without_parts(self, microbatches: int, advice: str, averages_gradients: bool) -> None:
        """Say where there is nothing to compare the gradient of a share of `microbatches` with."""
        if self.moments and microbatches == 1 and not averages_gradients:
            self._warn(
                f"monitor: under sync {self._trials[0].settings.sync.kind} a worker has no part of its share "
                f"to compare with, so there is no noise scale and no variance; use {advice} or more, or "
                f"partial-reduce with average: gradients"
            )

    @contextmanager
    def updating(self, averaging: WeightAveraging) -> Iterator[None]:
        """Time an update, without its waits for others."""
        started, waited = perf_counter(), averaging.stats.waited_s
        yield
        self._work_s += perf_counter() - started - (averaging.stats.waited_s - waited)
        self._updates += 1

    @contextmanager
    def averaging_gradients(
        self, squares: Callable[[], Tensor], samples: Sequence[int], averaging: WeightAveraging
    ) -> Iterator[None]:
        """Compare this worker's gradients with those of the group that averages them.

        `squares` gives their squared norms, of each trial; they are those of `samples` samples.
        """
        if not self.moments:
            yield
            return
        before, members = squares().tolist(), averaging.stats.members
        yield
        size = averaging.stats.members - members
        if size > 1:
            for moments, alone, whole, count in zip(self.moments, before, squares().tolist(), samples):
                if count:
                    moments.update(GradientNorms(alone / size, 1 / size, 1.0, whole, count * size))

    def take(self, position: int) -> list[Any]:
        """What this worker, number `position` of its member, measured since the last call: a report."""
        report = UpdateReport(position, self._updates, self._work_s, [each.take() for each in self.moments])
        self._updates, self._work_s = 0, 0.0
        return list(vars(report).values())

    def arrive(self, step: int, loss: float, samples: int, values: Iterable[Sequence[Any]]) -> None:
        """Process the reports of all workers on an interval that ended with `step` steps.

        `loss` is the mean of the first trial's, `samples` the number of its samples.
        """
        reports = [UpdateReport(*each) for each in values]
        for trial, *sums in zip(self._trials, *(report.moments for report in reports)):
            by_position: dict[int, list[list[float]]] = {}
            for report, each in zip(reports, sums):
                by_position.setdefault(report.position, []).append(each)
            stages = [MomentSums(*map(sum, zip(*each))) for each in by_position.values()]
            if all(stage.measured for stage in stages):
                trial.noise.add(*_mean_of(stages))
        # Of a pipeline, its first worker has the times.
        members = [report for report in reports if report.position == 0]
        # Work is shared out as members are ready for it, so the busiest one's time is the interval's.
        seconds = max((member.work_s for member in members), default=0.0)
        known = all(member.updates for member in members) and seconds > 0
        work_s = tuple(member.work_s / member.updates for member in members) if known else ()
        trial, end_s = self._trials[0], seconds if known else None
        signals = step_signals(trial, trial.noise, len(members), step, loss, samples, end_s)
        # Members do not end a step together.
        self._on_signals(replace(signals, step_s=None, topology="none", work_s=work_s))


def _mean_of(stages: Iterable[MomentSums]) -> tuple[GradientMoments, float]:
    """The mean moments of a model in these stages, and the mean of its gradient's squared norm."""
    means = [(s.variance / s.measured, s.squared_norm / s.measured, s.whole / s.measured) for s in stages]
    variance, squared_norm, whole = map(sum, zip(*means))
    return GradientMoments(variance, squared_norm), whole
