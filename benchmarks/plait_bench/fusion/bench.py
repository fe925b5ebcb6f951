"""Fused trials against the same ones one after another, in processes, by vmap and by HFTA's own code."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from plait.core.errors import InputError
from plait.core.names import did_you_mean
from plait.fusion import CapturedStep
from plait_bench.fusion.cases import (
    DCGAN,
    Case,
    Step,
    cases_on,
    compiled_step,
    finish,
    fused_step,
    one_thread,
    seconds_of,
    serial_step,
    vmap_step,
)
from plait_bench.fusion.hfta import hfta_step
from plait_bench.fusion.nvml import GpuWatch
from plait_bench.fusion.processes import PROCESS_MODES, times_of_processes
from plait_bench.harness import (
    Bench,
    BenchClaim,
    Found,
    Row,
    at_least,
    ends_of,
    ends_of_ratio,
    number,
    run_parts,
    say,
    spread,
)
from plait_bench.pictures import bars, curve, picture

HFTA_MODES = ("hfta", "hfta-graph")
_ONE_BY_ONE = ("serial", "serial-graph", "serial-compile")
MODES = (*_ONE_BY_ONE, *PROCESS_MODES, "vmap", *HFTA_MODES, "fused", "fused-graph")
PARTS = {
    "speed": "all models in the modes that one process has",
    "rivals": "all models fused, by vmap and by HFTA's own code, which is to be on PYTHONPATH",
    "modes": "all modes, also several processes at once and under MPS, fused widths from 1 to 32",
}
# Speed-ups over the plain loop that were set as goals before anything was measured.
_CPU_GOALS = {"mlp": 4.0, "transformer": 2.5, "cnn": 1.5}
_GPU_GOALS = {"pointnet-cls": 4.0, "resnet18": 16.0, DCGAN: 9.0}
# How long a GPU is watched at work.
_WATCH_S = 0.3


def run(
    parts: Sequence[str] = ("speed",),
    device: str = "auto",
    models: Sequence[str] = (),
    widths: Sequence[int] = (),
    modes: Sequence[str] = (),
    repeats: int = 5,
    command: str = "plait bench fusion",
    quick: bool = False,
) -> Bench:
    """Time a step of all trials in each mode; a speed-up is serial time for as many trials over that.

    On a GPU the modes `serial-graph`, `serial-compile`, `hfta-graph` and `fused-graph` replay a CUDA graph,
    `mps` needs a running nvidia-cuda-mps-control, and `hfta` its code on PYTHONPATH. A mode that fails for a
    model says so in its row. `quick` takes the models that a goal is set for, and fewer repeats.
    """
    found = "cuda" if torch.cuda.is_available() else "cpu"
    place = torch.device(found if device == "auto" else device)
    _check(modes, MODES, "modes")
    _check(models, list(cases_on(place)), "models")
    if quick:
        models, repeats = models or list(_goals(place)), min(repeats, 3)

    def measured(part: str) -> Found:
        usual_modes, usual_widths = _usual(place, part)
        with one_thread(place):
            rows = _measure_all(
                place, models, list(widths) or usual_widths, list(modes) or usual_modes, repeats
            )
        return rows, _claims(rows, place)

    known = {part: functools.partial(measured, part) for part in PARTS}
    # All modes are more than those of one process.
    asked = [part for part in known if part in parts and not (part == "speed" and "modes" in parts)]
    return run_parts("fusion", command, asked, known)


def _usual(device: torch.device, part: str) -> tuple[list[str], list[int]]:
    """The modes and widths that are measured where none are named."""
    on_gpu = device.type == "cuda"
    if part == "modes":
        modes = list(MODES) if on_gpu else ["serial", "serial-compile", "processes", "vmap", "fused"]
        return [mode for mode in modes if mode not in HFTA_MODES], [1, 2, 4, 8, 16, 32]
    if part == "rivals":
        captured = ["hfta-graph", "fused-graph"] if on_gpu else []
        return ["serial", "vmap", "hfta", "fused", *captured], [8]
    modes = [mode for mode in MODES if mode not in (*PROCESS_MODES, *HFTA_MODES)]
    return (modes, [8, 32]) if on_gpu else (["serial", "vmap", "fused"], [8])


def _measure_all(
    place: torch.device, models: Sequence[str], widths: list[int], modes: list[str], repeats: int
) -> list[Row]:
    cases = cases_on(place)
    names = list(models) or list(cases)
    serial = {name: _best_serial_step(cases[name], place) for name in names}
    rows: list[Row] = []
    for index, name in enumerate(names, 1):
        say(f"fusion, {name} ({index} of {len(names)})")
        for mode in modes:
            for width in _widths(mode, widths):
                rows.append(_row(name, cases[name], mode, width, place, repeats, serial[name]))
                if place.type == "cuda":
                    torch.cuda.empty_cache()
    for mode in PROCESS_MODES:
        for width in widths if mode in modes else ():
            rows += _process_rows(names, mode, width, place, repeats, serial)
    return rows


def _widths(mode: str, widths: list[int]) -> list[int]:
    """The widths at which a mode of this process is measured: a plain loop has one trial at a time."""
    if mode in PROCESS_MODES:
        return []
    return [1] if mode.startswith("serial") else widths


def _process_rows(
    names: list[str],
    mode: str,
    width: int,
    device: torch.device,
    repeats: int,
    serial: dict[str, Step],
) -> list[Row]:
    """A row for each model, trained by several processes at once; they start once for all models."""
    heads: list[Row] = [{"model": name, "mode": mode, "trials": width} for name in names]
    try:
        found = times_of_processes(names, mode, width, device, repeats)
    except Exception as failure:  # the rows say how
        return [{**head, "failed": _told(failure)} for head in heads]
    rows: list[Row] = []
    for head, name in zip(heads, names):
        times, watch = found[name]
        if isinstance(times, str):
            rows.append({**head, "failed": times})
            continue
        pairs = [(seconds_of(serial[name], device), step_s) for step_s in times]
        rows.append({**head, **_numbers(pairs, width, watch)})
    return rows


def _check(given: Sequence[str], valid: Sequence[str], what: str) -> None:
    for name in given:
        if name not in valid:
            raise InputError(f"bench fusion: no {what} {name!r}{did_you_mean(name, valid)}")


def _best_serial_step(case: Case, device: torch.device) -> Step:
    """A step of the best plain loop: on a GPU the faster of the two memory layouts."""
    step = serial_step(case, device)
    if case.is_gan or not _has_layouts(case, device):
        return step
    steps = [step, serial_step(case, device, channels_last=True)]
    return min(steps, key=lambda step: seconds_of(step, device))


def _has_layouts(case: Case, device: torch.device) -> bool:
    """Whether two memory layouts are worth trying: those of images on a GPU."""
    return device.type == "cuda" and case.data()[0].dim() == 4


def _row(
    name: str, case: Case, mode: str, width: int, device: torch.device, repeats: int, serial: Step
) -> Row:
    row: Row = {"model": name, "mode": mode, "trials": width}
    try:
        pairs, watch = _measured(case, mode, width, device, repeats, serial)
    except Exception as failure:  # any mode may fail on any model; the row says how
        return {**row, "failed": _told(failure)}
    return {**row, **_numbers(pairs, width, watch)}


def _told(failure: Exception) -> str:
    return f"{type(failure).__name__}: {(str(failure).splitlines() or [''])[0][:80]}"


def _numbers(pairs: list[tuple[float, float]], width: int, watch: GpuWatch) -> Row:
    speedups = [serial_s * width / step_s for serial_s, step_s in pairs]
    return {
        "serial_ms": 1e3 * statistics.median(serial_s for serial_s, _ in pairs),
        "step_ms": 1e3 * statistics.median(step_s for _, step_s in pairs),
        **spread(speedups, "speedup"),
        "memory_bytes": watch.memory_bytes,
        "sm_activity": watch.sm_activity,
        "repeats": len(pairs),
    }


def _measured(
    case: Case, mode: str, width: int, device: torch.device, repeats: int, serial: Step
) -> tuple[list[tuple[float, float]], GpuWatch]:
    """Seconds of a serial step and of a step of all trials, turn by turn, and what the GPU did meanwhile.

    The two take turns because a machine's speed drifts: a ratio of neighbours means more than one of means.
    """
    step = serial if mode == "serial" else _fastest_step(case, mode, width, device)
    for _ in range(3):
        step()
    pairs = [(seconds_of(serial, device), seconds_of(step, device)) for _ in range(repeats)]
    watch = GpuWatch(device)
    if device.type == "cuda":
        with watch:
            end = time.perf_counter() + _WATCH_S
            while time.perf_counter() < end:
                step()
                finish(device)
    return pairs, watch


def _fastest_step(case: Case, mode: str, width: int, device: torch.device) -> Step:
    """A step of the mode; of HFTA's on a GPU, in the faster of the two memory layouts."""
    if mode not in HFTA_MODES or not _has_layouts(case, device):
        return _step_of(case, mode, width, device)
    steps = [_step_of(case, mode, width, device, channels_last) for channels_last in (False, True)]
    return min(steps, key=lambda step: seconds_of(step, device))


def _step_of(case: Case, mode: str, width: int, device: torch.device, channels_last: bool = False) -> Step:
    if mode == "vmap":
        return vmap_step(case, device, width)
    if mode in HFTA_MODES:
        step, inputs, clear = hfta_step(case, device, width, channels_last)
    elif mode == "serial-compile":
        step, inputs, clear = compiled_step(case, device)
    else:
        # One trial of the fused array is the model itself.
        step, inputs, clear = fused_step(case, device, 1 if mode == "serial-graph" else width)
    if mode.endswith("-graph") or (mode == "serial-compile" and device.type == "cuda"):
        step = CapturedStep(step, inputs, clear=clear)
    return lambda: step(*inputs)


def _goals(device: torch.device) -> dict[str, float]:
    return _GPU_GOALS if device.type == "cuda" else _CPU_GOALS


def _claims(rows: Sequence[Row], device: torch.device) -> list[BenchClaim]:
    fused, hfta = _best_of(rows, ("fused", "fused-graph")), _best_of(rows, HFTA_MODES)
    goals = _goals(device)
    claims = []
    for name in dict.fromkeys(str(row["model"]) for row in rows):
        goal, best = goals.get(name, 1.0), fused.get(name)
        words = f"{name}: fused trials over the same trials one after another"
        if best is None:
            claims.append(at_least(words, None, goal))
            continue
        found = number(best, "speedup")
        claims.append(at_least(words, found, goal, ends=ends_of(best, "speedup")))
        if name in hfta:
            over = found / number(hfta[name], "speedup")
            claims.append(
                at_least(
                    f"{name}: fused trials over HFTA's own code",
                    over,
                    1,
                    ends=ends_of_ratio(best, hfta[name], "speedup"),
                )
            )
    return claims


def _best_of(rows: Sequence[Row], modes: Sequence[str]) -> dict[str, Row]:
    """The row of the best speed-up of each model in these modes."""
    best: dict[str, Row] = {}
    for row in sorted((row for row in rows if "speedup" in row), key=lambda row: number(row, "speedup")):
        if row["mode"] in modes:
            best[str(row["model"])] = row
    return best


def write_plot(bench: Bench, path: Path) -> None:
    """Speed-up over trials for each mode, a panel for each model, as HFTA shows it.

    With one number of trials, a bar for each model and mode.
    """
    timed = [row for row in bench.rows if "speedup" in row]
    models = list(dict.fromkeys(row["model"] for row in timed))
    if not models:
        return
    widths = {row["trials"] for row in timed if not str(row["mode"]).startswith("serial")}
    if len(widths) == 1:
        with picture(bench, path, (2 + 1.6 * len(models), 4)) as (axis,):
            bars(axis, timed, lambda row: str(row["model"]), "mode", "speedup")
            axis.set(ylabel=f"speed-up over serial, {widths.pop()} trials")
        return
    across = min(4, len(models))
    down = -(-len(models) // across)
    with picture(bench, path, (3.2 * across, 3.0 * down), down, across, dpi=90) as axes:
        for axis in axes[len(models) :]:
            axis.axis("off")
        for axis, model in zip(axes, models):
            own = [row for row in timed if row["model"] == model]
            for mode in dict.fromkeys(str(row["mode"]) for row in own):
                points = [row for row in own if row["mode"] == mode]
                colour = f"C{MODES.index(mode)}"
                if mode.startswith("serial"):  # one trial after another is as fast for any number of them
                    speedup = number(points[0], "speedup")
                    axis.axhline(speedup, color=colour, linestyle="--", linewidth=1, label=mode)
                else:
                    curve(axis, points, "trials", "speedup", mode, colour)
            axis.set(title=str(model), xlabel="trials", ylabel="speed-up over serial")
            axis.set_xscale("log", base=2)
        known = {label: line for axis in axes for line, label in zip(*axis.get_legend_handles_labels())}
        # In a panel that no model needs, where there is one: elsewhere it hides curves.
        axes[-1].legend(known.values(), known.keys(), fontsize=7, loc="best")
