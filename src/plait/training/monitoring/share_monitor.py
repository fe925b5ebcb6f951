"""Monitors of workers at their own pace: each measures its updates, and all exchange them now and then.

No gradient of all workers exists here. A worker compares the first microbatch of its share with the share,
or, where partial reduce averages gradients, its own gradient with its group's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import perf_counter

from torch import Tensor

from plait.adapt.monitors.gradient_noise import GradientMoments, GradientNorms, estimate
from plait.adapt.monitors.squared_norms import gradients, squared_norm
from plait.sync.averaging.base import WeightAveraging
from plait.training.components import Components
from plait.training.monitoring.required_signals import wants_norms
from plait.training.monitoring.signals import step_signals
from plait.training.trial import Trial


@dataclass
class UpdateSums:
    """What one worker did in an interval: sums over its updates, in the order that they are exchanged in."""

    updates: float = 0.0
    work_s: float = 0.0
    loss: float = 0.0
    measured: float = 0.0
    variance: float = 0.0
    squared_norm: float = 0.0
    whole: float = 0.0

    def as_list(self) -> list[float]:
        return list(vars(self).values())


class ShareMonitor:
    """Measures one worker's updates on its shares of a trial's batches.

    Gradient noise and signals are added to the trial's; `warn` is called if something cannot be measured.
    """

    def __init__(
        self,
        trials: Sequence[Trial],
        components: Components,
        warn: Callable[[str], None],
    ) -> None:
        self._trials = trials
        self._scaler = components.scaler
        self._warn = warn
        self._norms = wants_norms(trials[0].settings)
        self._sums = UpdateSums()
        self._part: tuple[Tensor, float] | None = None

    def warn_without_parts(self, averages_gradients: bool) -> None:
        """Say where there is nothing to compare a share's gradient with."""
        settings = self._trials[0].settings
        if self._norms and settings.accumulate == 1 and not averages_gradients:
            self._warn(
                f"monitor: under sync {settings.sync.kind} a worker has no part of its share to "
                f"compare with, so there is no noise scale and no variance; use accumulate: 2 or more, or "
                f"average: gradients"
            )

    @contextmanager
    def updating(self, averaging: WeightAveraging) -> Iterator[None]:
        """Time an update, without its waits for others."""
        started, waited = perf_counter(), averaging.stats.waited_s
        yield
        self._sums.work_s += perf_counter() - started - (averaging.stats.waited_s - waited)
        self._sums.updates += 1

    def after_microbatch(self, parameters: Iterable[Tensor], weight: float) -> None:
        if self._norms and self._part is None:
            self._part = squared_norm(gradients(parameters)), weight

    def end_alone(self, loss: Tensor, parameters: Iterable[Tensor], samples: int) -> None:
        """Take a share's gradient, which is there."""
        self._sums.loss += float(loss)
        if self._part is not None:
            square, weight = self._part
            self._part = None
            whole = float(squared_norm(gradients(parameters)))
            self._add(GradientNorms(float(square) / weight, weight, 1.0, whole, samples))

    @contextmanager
    def averaging_gradients(
        self, parameters: Sequence[Tensor], samples: int, averaging: WeightAveraging
    ) -> Iterator[None]:
        """Compare this worker's gradient, of `samples` samples, with that of the group that averages it."""
        if not self._norms:
            yield
            return
        own, members = float(squared_norm(gradients(parameters))), averaging.stats.members
        yield
        size = averaging.stats.members - members
        if size > 1:
            whole = float(squared_norm(gradients(parameters)))
            self._add(GradientNorms(own / size, 1 / size, 1.0, whole, samples * size))

    def _add(self, norms: GradientNorms) -> None:
        scale, found = self._scaler.get_scale() ** 2, estimate(norms)
        if found is not None:
            self._sums.measured += 1
            self._sums.variance += found.variance / scale
            self._sums.squared_norm += found.squared_norm / scale
            self._sums.whole += norms.whole / scale

    def take(self) -> list[float]:
        """This worker's sums since the last call."""
        found, self._sums = self._sums.as_list(), UpdateSums()
        return found

    def arrive(self, step: int, samples: int, sums_by_place: Mapping[int, Sequence[float]]) -> None:
        """Take the sums of all living members, of an interval that ended with `step` steps."""
        by_place = {place: UpdateSums(*sums) for place, sums in sorted(sums_by_place.items())}
        total = UpdateSums(*(sum(each) for each in zip(*(own.as_list() for own in by_place.values()))))
        if total.measured:
            found = GradientMoments(total.variance / total.measured, total.squared_norm / total.measured)
            self._trials[0].noise.add(found, total.whole / total.measured)
        # Work is shared out as workers are ready for it, so the busiest one's time is the interval's.
        seconds = max((own.work_s for own in by_place.values()), default=0.0)
        known = all(own.updates for own in by_place.values()) and seconds > 0
        loss = total.loss / total.updates if total.updates else math.nan
        work_s = tuple(own.work_s / own.updates for own in by_place.values()) if known else ()
        end_s = seconds if known else None
        trial, workers = self._trials[0], len(by_place)
        signals = step_signals(trial, trial.noise, workers, step, loss, samples, end_s)
        # No step has an end of its own here.
        trial.signals.add(replace(signals, step_s=None, topology="none", work_s=work_s))
