"""Adaptive plan: search for another plan when workers' times differ from the planned ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, median_low
from typing import ClassVar

from plait.adapt.changes import Replan
from plait.adapt.policies.policy import Decision, Proposal
from plait.core.errors import JobError
from plait.core.run_events import Signals

# After this many windows the search is repeated, even if workers are as slow as before.
RETRY_WINDOWS = 20


@dataclass(frozen=True)
class PlanState:
    """The step of the last search for a plan, and how slow each worker was then."""

    since: int = 0
    slowness: tuple[float, ...] = ()


@dataclass(frozen=True)
class AdaptivePlan:
    """Replan when a worker's time relative to its planned time deviates by `threshold` from the others'.

    Times are medians of `window` steps whose halves agree, so that a worker that is still becoming slower
    does not trigger it; a slowdown of all workers does not either. The plan is changed only if a step becomes
    shorter by the fraction `gain`, and if that pays for the move in the remaining steps.
    """

    threshold: float = 0.3
    window: int = 10
    gain: float = 0.1
    state_type: ClassVar[type | None] = PlanState

    def __post_init__(self) -> None:
        if self.threshold <= 0 or self.window < 1 or not 0 <= self.gain < 1:
            raise JobError(
                f"adapt: plan found threshold {self.threshold}, window {self.window} and gain {self.gain}; "
                f"expected a threshold above 0, a window of 1 or more, and a gain from 0 to 1"
            )

    def decide(self, signals: Sequence[Signals], state: PlanState | None) -> Decision:
        now, state = signals[-1], state or PlanState()
        slowness = self._slowness([each for each in signals if each.planned_s == now.planned_s])
        if slowness is None or now.step < state.since + self.window:
            return Decision(state=state)
        if not self._differ(slowness, (1.0,) * len(slowness)):
            return Decision(state=PlanState(now.step))
        known = len(state.slowness) == len(slowness) and not self._differ(slowness, state.slowness)
        if known and now.step < state.since + RETRY_WINDOWS * self.window:
            # The search has found no plan that is worth the change.
            return Decision(state=state)
        worst = max(range(len(slowness)), key=lambda worker: max(slowness[worker], 1 / slowness[worker]))
        why = f"worker {worst} takes {slowness[worst]:.2f} times what was planned for it, against the others"
        proposal = Proposal(Replan(tuple(round(each, 4) for each in slowness), self.gain), why)
        return Decision((proposal,), PlanState(now.step, slowness))

    def _slowness(self, signals: Sequence[Signals]) -> tuple[float, ...] | None:
        """Each worker's time divided by its planned time, relative to the median."""
        timed = [each for each in signals if each.work_s and len(each.work_s) == len(each.planned_s)]
        if len(timed) < self.window:
            return None
        seen, middle = timed[-self.window :], self.window // 2
        if middle and self._differ(_slowness(seen[:middle]), _slowness(seen[middle:])):
            return None
        return _slowness(seen)

    def _differ(self, one: Sequence[float], other: Sequence[float]) -> bool:
        most = 1 + self.threshold
        return any(not 1 / most <= a / b <= most for a, b in zip(one, other))


def _slowness(signals: Sequence[Signals]) -> tuple[float, ...]:
    ratios = [
        median(each.work_s[worker] / each.planned_s[worker] for each in signals)
        for worker in range(len(signals[-1].planned_s))
    ]
    usual = median_low(ratios)
    return tuple(ratio / usual for ratio in ratios)
