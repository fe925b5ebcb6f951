"""Adaptive topology: all-reduce over another graph when links become slow, and back.

The policy uses the median of a window as each worker's reference. If most workers see their links below a
fraction of it, and steps take longer, it tries the candidates one after another and keeps the first that
restores the throughput, or else the best. Then it monitors the new topology in the same way, and periodically
retries the job's topology, with increasing intervals while that is still slow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import ClassVar, Literal

from plait.adapt.changes import TopologyChange
from plait.adapt.policies.policy import Decision, Proposal
from plait.core.errors import JobError
from plait.core.run_events import Signals

# The longest interval between retries of the job's topology, as a multiple of `retry_steps`.
_LONGEST_WAIT = 16


@dataclass(frozen=True)
class TopologyReference:
    """Measurements of a topology: link speed by worker, seconds per step, samples per second."""

    links: tuple[float, ...]
    step_s: float
    samples_per_s: float


@dataclass(frozen=True)
class TopologyState:
    """The phase is one of `measure` (a reference), `watch`, `try` (a candidate), `retry` (the job's own)."""

    home: str
    current: str
    batch_size: int
    phase: Literal["measure", "watch", "try", "retry"] = "measure"
    # The step after which the current topology is in use.
    since: int = 0
    reference: TopologyReference | None = None
    home_reference: TopologyReference | None = None
    # Samples per second of the topologies tried since links became slow.
    tried: Mapping[str, float] = field(default_factory=dict)
    # The topology to return to after a retry, and the steps until the next retry.
    before: str = ""
    wait: int = 0


@dataclass(frozen=True)
class AdaptiveTopology:
    """Switch between the job's topology and `candidates`.

    References are medians of `window` steps. Links are slow if for `confirm` steps more than half of the
    workers have less than `threshold` of their reference, and steps take `slower` times as long. A candidate
    is measured over `trial_steps` and kept at once if it has `enough` of the original throughput. The job's
    topology is retried after `retry_steps`, and after twice as many each time it is still slow.
    """

    candidates: tuple[str, ...] = ("binary-tree", "ring", "clique")
    window: int = 10
    threshold: float = 0.6
    slower: float = 1.2
    confirm: int = 3
    trial_steps: int = 3
    enough: float = 0.9
    retry_steps: int = 50
    state_type: ClassVar[type | None] = TopologyState

    def __post_init__(self) -> None:
        counts = (self.window, self.confirm, self.trial_steps, self.retry_steps)
        if not self.candidates or min(counts) < 1 or not 0 < self.threshold < 1 or self.slower < 1:
            raise JobError(
                f"adapt: topology found {self}; expected candidates, whole numbers of steps above 0, a "
                f"threshold between 0 and 1, and slower of 1 or more"
            )

    def decide(self, signals: Sequence[Signals], state: TopologyState | None) -> Decision:
        now = signals[-1]
        if state is None:
            state = TopologyState(now.topology, now.topology, now.batch_size, since=now.step)
        if now.batch_size != state.batch_size:  # which has a different throughput
            state = TopologyState(state.home, state.current, now.batch_size, since=now.step)
        seen = [s for s in signals if s.step > state.since and s.link_bytes_per_s and s.step_s is not None]
        phases = {"measure": self._measure, "try": self._try, "retry": self._retry, "watch": self._watch}
        return phases[state.phase](seen, state)

    def _measure(self, seen: Sequence[Signals], state: TopologyState) -> Decision:
        if len(seen) < self.window:
            return Decision(state=state)
        measured = reference_of(seen[-self.window :])
        home = measured if state.current == state.home else state.home_reference
        return Decision(state=replace(state, phase="watch", reference=measured, home_reference=home))

    def _watch(self, seen: Sequence[Signals], state: TopologyState) -> Decision:
        assert state.reference is not None
        if self._is_slow(seen, state.reference):
            slow = reference_of(seen[-self.confirm :])
            tried = {state.current: slow.samples_per_s}
            votes = self._votes(slow, state.reference)
            why = (
                f"{votes} of {len(slow.links)} workers see links below {self.threshold:g} of their "
                f"reference; {slow.step_s / state.reference.step_s:.2f}x the seconds a step"
            )
            return self._go_on(seen, replace(state, tried=tried), why)
        away = state.current != state.home
        if away and seen and seen[-1].step >= state.since + (state.wait or self.retry_steps):
            why = f"{seen[-1].step - state.since} steps since {state.home} was left or last tried"
            wait = min(2 * (state.wait or self.retry_steps), _LONGEST_WAIT * self.retry_steps)
            changed = replace(state, phase="retry", before=state.current, wait=wait)
            return _switch(changed, state.home, seen[-1].step, f"try it again: {why}")
        return Decision(state=state)

    def _try(self, seen: Sequence[Signals], state: TopologyState) -> Decision:
        """Evaluate a candidate after measuring it, without the first step after the switch."""
        if len(seen) < 1 + self.trial_steps:
            return Decision(state=state)
        assert state.reference is not None
        rate = reference_of(seen[-self.trial_steps :]).samples_per_s
        share = rate / state.reference.samples_per_s
        state = replace(state, tried={**state.tried, state.current: rate})
        if share >= self.enough:
            return Decision(state=replace(state, phase="measure", wait=0))
        return self._go_on(seen, state, f"{state.current} gives {share:.2f} of the throughput before")

    def _go_on(self, seen: Sequence[Signals], state: TopologyState, why: str) -> Decision:
        """Try the next candidate, or keep the best of those tried."""
        for candidate in dict.fromkeys((*self.candidates, state.home)):
            if candidate not in state.tried:
                return _switch(replace(state, phase="try"), candidate, seen[-1].step, why)
        best = max(state.tried, key=state.tried.__getitem__)
        done = replace(state, phase="measure", wait=0)
        if best == state.current:
            return Decision(state=replace(done, since=seen[-1].step))
        rates = ", ".join(f"{name} {rate:.4g}" for name, rate in state.tried.items())
        return _switch(done, best, seen[-1].step, f"the best of what was tried (samples/s): {rates}")

    def _retry(self, seen: Sequence[Signals], state: TopologyState) -> Decision:
        if len(seen) < 1 + self.trial_steps:
            return Decision(state=state)
        measured = reference_of(seen[-self.trial_steps :])
        known = state.home_reference
        share = measured.samples_per_s / known.samples_per_s if known is not None else 1.0
        if share >= self.enough:
            return Decision(state=replace(state, phase="watch", reference=known or measured, wait=0))
        why = f"{state.home} gives {share:.2f} of what it gave; next try after {state.wait} steps"
        return _switch(replace(state, phase="watch"), state.before, seen[-1].step, why)

    def _is_slow(self, seen: Sequence[Signals], reference: TopologyReference) -> bool:
        if len(seen) < self.confirm:
            return False
        measured = reference_of(seen[-self.confirm :])
        slow = measured.step_s > self.slower * reference.step_s
        return slow and 2 * self._votes(measured, reference) > len(measured.links)

    def _votes(self, measured: TopologyReference, reference: TopologyReference) -> int:
        return sum(link < self.threshold * usual for link, usual in zip(measured.links, reference.links))


def reference_of(seen: Sequence[Signals]) -> TopologyReference:
    """The medians over some steps."""
    links = tuple(median(each) for each in zip(*(s.link_bytes_per_s for s in seen)))
    seconds = median(s.step_s for s in seen if s.step_s is not None)
    return TopologyReference(links, seconds, median(s.samples_per_s for s in seen if s.samples_per_s))


def _switch(state: TopologyState, topology: str, step: int, why: str) -> Decision:
    proposal = Proposal(TopologyChange(topology), why)
    # Signals are a step late: the step in progress still uses the previous topology.
    return Decision((proposal,), replace(state, current=topology, since=step + 1))
