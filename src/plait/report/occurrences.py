"""What happened to a run besides training: adaptations with their reasons, and faults."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from plait.adapt.progress_values import describe_change
from plait.core import run_events
from plait.core.events import Recorded
from plait.core.shown import listed
from plait.core.units import show_seconds
from plait.report.record import RunRecorded


@dataclass(frozen=True)
class Occurrence:
    """Something that happened to a run: a change, a fault, a check; `t` is seconds since the epoch."""

    t: float
    step: int | None
    what: str
    why: str


def changes_of(recorded: RunRecorded) -> Iterable[Occurrence]:
    """Every adaptation, with its reason."""
    for line in recorded.others:
        if line.kind == "topology-chosen":
            reason = str(line.fields.get("reason", ""))
            yield Occurrence(line.t, None, f"topology {line.fields.get('topology')} chosen", reason)
    for each in recorded.events:
        if (change := describe_change(each.event)) is not None:
            yield Occurrence(each.t, *change)


def faults_of(events: Sequence[Recorded], state: str, cause: str | None) -> Iterable[Occurrence]:
    """Lost workers, restarts, refused checkpoints, failed trials, differences, and how the run failed."""
    starts = 0
    alike: dict[tuple[str, str], list[tuple[float, run_events.TrialEnded]]] = {}
    for each in events:
        event, t = each.event, each.t
        if isinstance(event, (run_events.RunStarted, run_events.SweepStarted)) and each.rank == 0:
            starts += 1
            if starts > 1:
                step = event.step if isinstance(event, run_events.RunStarted) else None
                yield Occurrence(t, step, "resumed", f"part {starts} of the run")
        elif isinstance(event, run_events.WorkersChanged) and event.lost:
            lost = f"lost worker{'s' * (len(event.lost) > 1)} {listed(event.lost, 100)}"
            yield Occurrence(t, event.step, lost, f"{event.why}; no steps for {show_seconds(event.seconds)}")
        elif isinstance(event, run_events.CheckpointRefused):
            yield Occurrence(t, None, f"checkpoint {event.path} refused", event.reason)
        elif isinstance(event, run_events.TrialEnded) and event.state in ("failed", "diverged"):
            alike.setdefault((event.state, event.why), []).append((t, event))
        elif isinstance(event, run_events.Audited) and event.differences:
            yield Occurrence(t, event.step, "differs from plain PyTorch", "; ".join(event.differences))
        elif isinstance(event, run_events.RunEnded) and event.reason == "diverged":
            yield Occurrence(t, event.step, "diverged", "the loss is no finite number")
    for (ended, why), trials in alike.items():
        numbers = f"trial{'s' * (len(trials) > 1)} {listed([trial.trial for _, trial in trials], 100)}"
        t, first = trials[0]
        yield Occurrence(t, first.step if len(trials) == 1 else None, f"{numbers} {ended}", why)
    if events and (cause is not None or state in ("died", "failed")):
        yield Occurrence(events[-1].t, None, f"the run {state}", cause or "no cause was recorded")
