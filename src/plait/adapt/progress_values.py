"""The words for changes of a running job, and the values of progress reports that come from its events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plait.core import run_events
from plait.core.codec import decode
from plait.core.events import Event
from plait.core.shown import listed, printable, shortened, shown
from plait.core.units import count_of, show_seconds
from plait.schema.plans.plan import Plan

MOST_LETTERS = 300


def describe_change(event: Event) -> tuple[int | None, str, str] | None:
    """The step of an adaptation, what was changed, and why; None for other events."""
    match event:
        case run_events.Changed():
            change = dict(event.change)
            if event.kind_of_change == "PlanChange":
                change = {"stages": [len(stage["layers"]) for stage in change["plan"]["stages"]]}
            trial = "" if event.trial is None else f"trial {event.trial}: "
            return event.step, f"{trial}{_values(change)}", _asked(event)
        case run_events.WorkersChanged():
            what = f"{count_of(len(event.members), 'worker')} (version {event.version})"
            return event.step, what, f"{_asked(event)}; paused {show_seconds(event.seconds)}"
        case run_events.LayersMoved():
            what = f"{count_of(len(event.names), 'tensor')} moved to other workers"
            return event.step, what, listed(event.names, 200)
        case run_events.SyncChosen():
            return None, f"sync {event.sync} chosen", event.reason
        case run_events.TrialCopied():
            what = f"trial {event.trial} took the weights of trial {event.source}"
            return event.step, what, _values(event.values)
    return None


def _asked(event: run_events.Changed | run_events.WorkersChanged) -> str:
    return f"{event.by}: {event.why}" if event.why else f"asked for by the {event.by}"


def _values(values: Mapping[str, Any]) -> str:
    known = {key.replace("_", " "): value for key, value in values.items() if value != {}}
    return ", ".join(f"{key} {_value(value)}" for key, value in known.items())


def _value(value: Any) -> str:
    if isinstance(value, str):
        return printable(value)
    return f"{value:.4g}" if isinstance(value, float) else shown(value)


def progress_of(event: Event) -> dict[str, Any]:
    """What later progress reports say because of an event: the last change, the idle share, the stages."""
    match event:
        case run_events.Pace():
            return {"idle_share": event.wait_share}
        case run_events.Operations() if event.starts:
            busy = sum(event.ends) - sum(event.starts)
            span = max(event.ends) - min(event.starts)
            return {"idle_share": round(max(0.0, 1 - busy / span), 4)} if span > 0 else {}
        case run_events.Signals() if event.work_s and event.step_s:
            work_s = sum(event.work_s) / len(event.work_s)
            return {"idle_share": round(max(0.0, 1 - work_s / event.step_s), 4)}
    change = describe_change(event)
    if change is None:
        return {}
    step, what, why = change
    text = f"{what} ({why})" if step is None else f"step {step}: {what} ({why})"
    values: dict[str, Any] = {"change": shortened(text, MOST_LETTERS)}
    if isinstance(event, run_events.Changed) and event.kind_of_change == "PlanChange":
        values |= stages_of(decode(Plan, event.change["plan"], "changed: plan"))
    return values


def stages_of(plan: Plan) -> dict[str, Any]:
    """The workers of each stage in a progress report, of all pipelines."""
    layouts = [plan.layout(number) for number in range(plan.pipelines)]
    stages = [sorted(sum(workers, ())) for workers in zip(*(layout.stages for layout in layouts))]
    return {"stages": stages, "pipelines": plan.pipelines}
