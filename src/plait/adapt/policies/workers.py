"""Adaptive workers: add workers while that improves the throughput, then remove the last one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import ClassVar

from plait.adapt.changes import WorkersChange
from plait.adapt.policies.policy import Decision, Proposal
from plait.core.errors import JobError
from plait.core.run_events import Signals


@dataclass(frozen=True)
class WorkersState:
    """The throughput with one worker less, and the step of the last change; `done` at the end.

    `asked` is the requested number of workers while they are still starting.
    """

    workers: int
    since: int
    before: float | None = None
    asked: int | None = None
    done: bool = False


@dataclass(frozen=True)
class AdaptiveWorkers:
    """Add workers, up to `most`, until one adds less than `gain` to the throughput; then remove it again.

    Each number of workers is evaluated by the median of `window` steps, after skipping `settle` steps.
    """

    most: int
    gain: float = 0.1
    window: int = 10
    settle: int = 2
    state_type: ClassVar[type | None] = WorkersState

    def __post_init__(self) -> None:
        if self.most < 1 or self.window < 1 or self.settle < 0 or self.gain < 0:
            raise JobError(f"adapt: workers found {self}; expected most and window of 1 or more")

    def decide(self, signals: Sequence[Signals], state: WorkersState | None) -> Decision:
        now = signals[-1]
        if state is None:
            state = WorkersState(now.workers, now.step - 1)
        if now.workers == state.asked:
            state = replace(state, workers=now.workers, since=now.step, asked=None)
        if now.workers != state.workers:
            # Not the requested number: a worker was lost, or another source changed it.
            return Decision(state=WorkersState(now.workers, now.step))
        if state.asked is not None or state.done:
            return Decision(state=state)
        first = state.since + self.settle
        seen = [s.samples_per_s for s in signals if s.step > first and s.workers == now.workers]
        rates = [rate for rate in seen if rate is not None]
        if len(rates) < self.window:
            return Decision(state=state)
        return self._judge(now, median(rates[-self.window :]), state)

    def _judge(self, now: Signals, rate: float, state: WorkersState) -> Decision:
        if state.before is not None and rate < (1 + self.gain) * state.before:
            why = f"{now.workers} workers give {rate / state.before:.2f}x the throughput of one less"
            return self._change(replace(state, done=True), now.workers - 1, why)
        if now.workers >= self.most:
            return Decision(state=replace(state, done=True))
        gained = "" if state.before is None else f", {rate / state.before:.2f}x that of one less"
        why = f"{now.workers} workers give {rate:.4g} samples/s{gained}"
        return self._change(replace(state, before=rate), now.workers + 1, why)

    def _change(self, state: WorkersState, workers: int, why: str) -> Decision:
        return Decision((Proposal(WorkersChange(workers), why),), replace(state, asked=workers))
