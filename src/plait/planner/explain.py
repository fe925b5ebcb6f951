"""Explains a plan as text and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plait.core.shown import show_numbers
from plait.core.units import count_of, show_bytes, show_seconds
from plait.planner.predict import data_parallel_s
from plait.planner.schedules.in_flight import Schedule
from plait.schema.plans.graph import Graph
from plait.schema.plans.plan import Plan, Stage


def reasons(plan: Plan, graph: Graph, limits: Sequence[str] = ()) -> str:
    """Why this plan was chosen: its bottleneck, and the cost of data and model parallelism.

    `limits` describe the user's restrictions that may exclude faster plans.
    """
    parts = [_pace(plan), _against_data_parallel(plan, graph), _against_model_parallel(plan)]
    if limits and min(plan.speedup_over.single, plan.speedup_over.data_parallel) < 1 - 1e-9:
        parts.append(f"What would be faster does not fit {' or '.join(limits)} that was asked for.")
    if not plan.exact and plan.lower_bound_s > 0:
        parts.append(_how_near(plan))
    unused = plan.machines.count - plan.devices_used
    if unused > 0:
        parts.append(
            f"{unused} of {plan.machines.count} devices stay unused: more replicas or stages would cost more "
            f"in messages than they save; {plan.devices_used} devices do as well."
        )
    return " ".join(part for part in parts if part)


def why_not_best_cut(best: Plan, chosen: Plan) -> str:
    """Why `chosen` was chosen, although `best` has the lower bottleneck."""
    cut = _replicas(best)
    seconds, chosen_s = (show_seconds(plan.step_s / plan.microbatches) for plan in (best, chosen))
    return (
        f"The best cut ({cut}) has a bottleneck of {show_seconds(best.bottleneck_s)}, but with what workers "
        f"wait for each other it takes {seconds} a microbatch, this plan {chosen_s}."
    )


# The ratio from which a difference is mentioned.
_NOTABLE = 1.02


@dataclass(frozen=True)
class Replays:
    """Seconds per step with enough microbatches in flight to hide messages, and also without updates."""

    hidden_s: float
    without_updates_s: float


def why_longer(best: Plan, replays: Replays, is_chosen: bool) -> str:
    """Why a step of the best cut takes longer than its bottleneck, and what would help."""
    each = best.step_s / best.microbatches
    if each <= _NOTABLE * best.bottleneck_s:
        return ""
    who = "A step" if is_chosen else f"A step of the best cut ({_replicas(best)})"
    causes, remedies = [], []
    left = each
    if replays.hidden_s * _NOTABLE < best.step_s:
        causes.append("stages wait for messages from each other")
        left = replays.hidden_s / best.microbatches
        remedies.append(
            f"plait plan --hide-messages keeps more microbatches in flight, which would take "
            f"{show_seconds(left)} a microbatch where memory allows it"
        )
    if left > _NOTABLE * best.bottleneck_s:
        causes.append(_other_cause(best, replays))
        if best.schedule.synchronous and len(best.stages) > 1:
            remedies.append(
                "more microbatches a step (plait plan --microbatches, parallel.microbatches in a job) make "
                "filling and draining count less"
            )
    help_ = f" {'; '.join(remedies)}." if remedies else ""
    return (
        f"{who} is predicted to take {show_seconds(each)} a microbatch, longer than its bottleneck of "
        f"{show_seconds(best.bottleneck_s)}: {', and '.join(causes)}.{help_}"
    )


def _other_cause(best: Plan, replays: Replays) -> str:
    """What makes a step longer than the bottleneck, besides messages that can be hidden."""
    if best.schedule.synchronous and len(best.stages) > 1:
        return "the pipeline fills and drains in every step"
    if replays.without_updates_s * _NOTABLE < replays.hidden_s:
        return "stages wait while others agree on gradients and update"
    return "stages with other numbers of replicas wait for each other"


def why_not_run(best: Plan) -> str:
    """Why the best cut was not chosen, although nothing is faster."""
    return (
        f"The best cut ({_replicas(best)}) has weights in stages with other numbers of replicas, which stash "
        f"updates at other times; schedules 2bw and flush could run it."
    )


def why_faster(chosen: Plan, other: Plan, is_close: bool = False, measured_s: float | None = None) -> str:
    """Why `chosen` was chosen, and not `other`, which splits the same batch differently.

    `is_close`: the other is faster, but not by enough. `measured_s` is the measured step of the simpler one.
    """
    count = count_of(other.microbatches, "microbatch", "microbatches")
    text = (
        f"The same batch as {count} under schedule {other.schedule.value} (replicas {_replicas(other)}) "
        f"would take {show_seconds(other.step_s)} a step, this plan takes {show_seconds(chosen.step_s)}."
    )
    if measured_s is not None:
        text += f" Measured, a step of data parallelism took {show_seconds(measured_s)}."
    return f"{text} A gain of less than a tenth is no reason to cut the model." if is_close else text


def _replicas(plan: Plan) -> str:
    return "-".join(str(stage.replicas) for stage in plan.stages)


def _pace(plan: Plan) -> str:
    device = max(range(plan.machines.count), key=lambda d: _device_s(plan, d))
    busiest = _device_s(plan, device)
    if busiest < plan.bottleneck_s * 0.999:
        return f"Messages between stages set the pace at {show_seconds(plan.bottleneck_s)} a microbatch."
    held = [(number, stage) for number, stage in enumerate(plan.stages) if device in stage.devices]
    names = " and ".join(str(number) for number, _ in held)
    sets = "Stage {} sets" if len(held) == 1 else "Stages {} on one device set"
    besides_compute_s = busiest - sum(_compute_s(plan, stage) for _, stage in held)
    doing = _besides_compute(plan, [stage for _, stage in held])
    sync = (
        f", {show_seconds(besides_compute_s)} of it to {doing}" if besides_compute_s > 0.01 * busiest else ""
    )
    text = f"{sets.format(names)} the pace at {show_seconds(busiest)} a microbatch{sync}."
    if busiest > plan.bottleneck_s * 1.001:
        # PipeDream's cost model distributes the synchronisation of a replicated host evenly over its devices.
        shared = show_seconds(plan.bottleneck_s)
        text += f" (Shared evenly by the devices of each host, it would be {shared}.)"
    return text


def _compute_s(plan: Plan, stage: Stage) -> float:
    """The compute seconds per microbatch of a stage, divided by its replicas."""
    slowest = min(plan.machines.device(device).speed for device in stage.devices)
    return stage.compute_s / slowest / stage.replicas


def _besides_compute(plan: Plan, stages: Sequence[Stage]) -> str:
    """The cost per microbatch of these stages besides compute."""
    if plan.schedule is not Schedule.STASH:
        return "agree on gradients"
    agrees = any(stage.replicas > 1 for stage in stages)
    return "agree on gradients and update" if agrees else "update the weights"


def _device_s(plan: Plan, device: int) -> float:
    """The cost per microbatch of the stages of a device, in seconds."""
    return sum(stage.cost_s for stage in plan.stages if device in stage.devices)


def _against_data_parallel(plan: Plan, graph: Graph) -> str:
    if len(plan.stages) == 1:
        return "Every device holds the whole model, and only gradients travel."
    whole = data_parallel_s(graph, plan.machines)
    held = graph.parameter_bytes()
    return (
        f"Data parallelism would take {show_seconds(whole)} a microbatch: each device would agree on "
        f"{show_bytes(held)} of gradients every microbatch."
    )


def _against_model_parallel(plan: Plan) -> str:
    if plan.machines.count == 1:
        return ""
    seconds = plan.speedup_over.model_parallel * plan.bottleneck_s
    alone = "with one device at work at a time"
    return f"Model parallelism would take {show_seconds(seconds)} a microbatch, {alone}."


def _how_near(plan: Plan) -> str:
    gap = plan.bottleneck_s / plan.lower_bound_s - 1
    return (
        f"Not every way to cut the model was tried, but none takes less than "
        f"{show_seconds(plan.lower_bound_s)}: this plan is within {gap:.1%} of the best."
    )


def render_plan(plan: Plan) -> str:
    """The output of `plait plan`: a summary, the stages as a table, the speedups and the reasons."""
    gains = plan.speedup_over
    predicted = (
        f"{show_seconds(plan.bottleneck_s)} a microbatch at best, {show_seconds(plan.step_s)} a step "
        f"predicted, {plan.idle_share:.0%} idle"
    )
    compared = (
        f"{gains.single:.2f}x one device, {gains.data_parallel:.2f}x data parallelism, "
        f"{gains.model_parallel:.2f}x model parallelism, at best"
    )
    return "\n".join([_head(plan), predicted, compared, "", stage_table(plan), "", plan.why])


def describe_plan(plan: Plan) -> str:
    """The description of `plan` at the start of a run: its shape, the step time, and why it was chosen."""
    return f"{_head(plan)}: {show_seconds(plan.step_s)} predicted\n{plan.why}"


def _head(plan: Plan) -> str:
    return (
        f"{count_of(len(plan.stages), 'stage')} on {count_of(plan.devices_used, 'device')}"
        f"{f' in {plan.pipelines} pipelines' if plan.pipelines > 1 else ''}, schedule {plan.schedule.value}, "
        f"{count_of(plan.microbatches, 'microbatch', 'microbatches')} a step"
    )


def stage_table(plan: Plan) -> str:
    """One line per stage: layers, replicas, seconds, memory, traffic."""
    header = ("stage", "layers", "replicas", "seconds", "memory", "traffic", "devices")
    rows = [header, *(_row(number, stage) for number, stage in enumerate(plan.stages))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    return "\n".join(lines)


def _row(number: int, stage: Stage) -> tuple[str, ...]:
    first, last = stage.layers[0], stage.layers[-1]
    layers = first if first == last else f"{first} .. {last} ({len(stage.layers)})"
    return (
        str(number),
        layers,
        f"x{stage.replicas}",
        show_seconds(stage.compute_s),
        show_bytes(stage.memory_bytes),
        show_bytes(stage.traffic_bytes),
        show_numbers(stage.devices),
    )
