"""Draws the predicted schedule: a row per worker, a block per operation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from plait.core.files import write_picture
from plait.core.names import check_extra
from plait.core.units import show_seconds
from plait.planner.predict import predict
from plait.planner.schedules.operations import Backward, BackwardInput, BackwardWeight, Forward, Op, Update
from plait.planner.schedules.simulator import SimulatedOp, Simulation
from plait.schema.plans.plan import Plan

_COLOURS: dict[type[Op], tuple[str, str]] = {
    Forward: ("forward", "#4c8bf5"),
    Backward: ("backward", "#3aa76d"),
    BackwardInput: ("backward, input", "#3aa76d"),
    BackwardWeight: ("backward, weights", "#a8d5b5"),
    Update: ("update", "#e0a030"),
}


def draw_plan(plan: Plan, path: Path) -> None:
    """Draw the predicted timeline of `plan` to the PNG file `path`."""
    prediction = predict(plan)
    title = (
        f"schedule {plan.schedule.value}, {len(plan.stages)} stages on {plan.devices_used} devices: "
        f"{show_seconds(prediction.step_s)} a step, {prediction.idle_share:.0%} idle"
    )
    stage_of = {device: s for s, stage in enumerate(plan.stages) for device in stage.devices}
    names = {device: f"device {device} (stage {stage})" for device, stage in stage_of.items()}
    if len(plan.stages) > plan.devices_used:
        names = {device: f"device {device}" for device in stage_of}
    draw(prediction.simulation, path, title, names)


def draw(simulation: Simulation, path: Path, title: str, names: dict[int, str] | None = None) -> None:
    """Draw a simulated schedule to the PNG file `path`; wide blocks show their microbatch."""
    check_extra("matplotlib", f"drawing {path}")
    # Matplotlib takes a second to import.
    from matplotlib.figure import Figure

    workers = sorted({op.worker for op in simulation.ops})
    figure = Figure(figsize=(14, max(2.4, 0.42 * len(workers) + 1.4)), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    row = {worker: r for r, worker in enumerate(workers)}
    for kind, (label, colour) in _COLOURS.items():
        ops = [s for s in simulation.ops if type(s.op) is kind and s.end_s > s.start_s]
        if ops:
            axes.barh(
                [row[op.worker] for op in ops],
                [(op.end_s - op.start_s) * 1e3 for op in ops],
                left=[op.start_s * 1e3 for op in ops],
                height=0.86,
                color=colour,
                edgecolor="white",
                # Edges would hide narrow blocks.
                linewidth=[0.4 if _is_wide(op, simulation) else 0.0 for op in ops],
                label=label,
            )
    _number_blocks(axes, simulation, row)
    axes.set_yticks(range(len(workers)), [(names or {}).get(w, f"worker {w}") for w in workers])
    axes.invert_yaxis()
    axes.set_xlim(0, simulation.end_s * 1e3)
    axes.set_xlabel("milliseconds")
    axes.set_title(title, loc="left", fontsize=11)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=9)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    write_picture(path, figure)


def _number_blocks(axes: Any, simulation: Simulation, row: dict[int, int]) -> None:
    for timed in simulation.ops:
        if isinstance(timed.op, Update) or not _is_wide(timed, simulation):
            continue
        middle = (timed.start_s + timed.end_s) / 2 * 1e3
        axes.text(middle, row[timed.worker], str(timed.op.microbatch), ha="center", va="center", fontsize=7)


def _is_wide(timed: SimulatedOp, simulation: Simulation) -> bool:
    """Whether a block is wide enough for a number and an edge."""
    return timed.end_s - timed.start_s >= 0.009 * simulation.end_s
