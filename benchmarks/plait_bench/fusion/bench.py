"""Fused trials against the same trials one after another, in processes and by vmap (HFTA's experiment)."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from plait.core.errors import InputError
from plait.core.files import write_picture
from plait.core.names import did_you_mean
from plait.fusion.speed.cuda_graph import CapturedStep
from plait_bench.fusion.cases import (
    CPU_CASES,
    GPU_CASES,
    Case,
    Step,
    compiled_step,
    finish,
    fused_step,
    seconds_of,
    serial_step,
    vmap_step,
)
from plait_bench.fusion.convergence import convergence, write_curves
from plait_bench.fusion.gan import (
    gan_compiled_step,
    gan_fused_step,
    gan_serial_step,
    gan_vmap_step,
)
from plait_bench.fusion.nvml import GpuWatch
from plait_bench.fusion.processes import PROCESS_MODES, times_of_processes
from plait_bench.harness import Bench, BenchClaim, Row

MODES = ("serial", "serial-graph", "serial-compile", "processes", "mps", "vmap", "fused", "fused-graph")
PARTS = {
    "speed": "all models in the modes that one process has",
    "modes": "all modes, also several processes at once and under MPS, fused widths from 1 to 32",
    "convergence": "learning curves of fused trials on the serial ones",
}
DCGAN = "dcgan"
# Speed-ups over the plain loop that were set as goals before anything was measured.
_CPU_GOALS = {"mlp": 4.0, "transformer": 2.5, "cnn": 1.5}
_GPU_GOALS = {"pointnet-cls": 4.0, "resnet18": 16.0, DCGAN: 9.0}
# How long a GPU is watched at work.
_WATCH_S = 0.3


def run(
    parts: Sequence[str] = ("speed", "convergence"),
    device: str = "auto",
    models: Sequence[str] = (),
    widths: Sequence[int] = (),
    modes: Sequence[str] = (),
    repeats: int = 5,
    command: str = "plait bench fusion",
) -> Bench:
    """Time a step of all trials in each mode; a speed-up is serial time for as many trials over that.

    On a GPU the modes `serial-graph`, `serial-compile` and `fused-graph` replay a CUDA graph, and `mps` needs
    a running nvidia-cuda-mps-control. A mode that fails for a model says so in its row.
    """
    found = "cuda" if torch.cuda.is_available() else "cpu"
    place = torch.device(found if device == "auto" else device)
    _check(modes, MODES, "modes")
    rows: list[Row] = []
    claims: list[BenchClaim] = []
    if "speed" in parts or "modes" in parts:
        usual_modes, usual_widths = _usual(place, "modes" in parts)
        asked_widths, asked_modes = list(widths) or usual_widths, list(modes) or usual_modes
        with _one_thread(place):
            rows += _measure_all(place, models, asked_widths, asked_modes, repeats)
        claims += _claims(rows, place)
    if "convergence" in parts:
        curves, claim = convergence(device=place)
        rows += curves
        claims.append(claim)
    return Bench("fusion", command, tuple(rows), tuple(claims))


@contextmanager
def _one_thread(device: torch.device) -> Iterator[None]:
    """On a CPU all modes get one thread: a fused step could use more where single trials cannot."""
    before = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _usual(device: torch.device, everything: bool) -> tuple[list[str], list[int]]:
    """The modes and widths that are measured where none are named."""
    on_gpu = device.type == "cuda"
    if not everything:
        modes = (
            [mode for mode in MODES if mode not in PROCESS_MODES] if on_gpu else ["serial", "vmap", "fused"]
        )
        return modes, [8, 32] if on_gpu else [8]
    modes = list(MODES) if on_gpu else ["serial", "serial-compile", "processes", "vmap", "fused"]
    return modes, [1, 2, 4, 8, 16, 32]


def _measure_all(
    place: torch.device, models: Sequence[str], widths: list[int], modes: list[str], repeats: int
) -> list[Row]:
    cases = GPU_CASES if place.type == "cuda" else CPU_CASES
    names = list(models) or [*cases, DCGAN]
    _check(names, [*cases, DCGAN], "models")
    serial = {name: _best_serial_step(name, cases, place) for name in names}
    rows: list[Row] = []
    for name in names:
        for mode in modes:
            for width in _widths(mode, widths):
                rows.append(_row(name, cases.get(name), mode, width, place, repeats, serial[name]))
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


def _best_serial_step(name: str, cases: dict[str, Case], device: torch.device) -> Step:
    """A step of the best plain loop: on a GPU the faster of the two memory layouts."""
    if name == DCGAN:
        return gan_serial_step(device, device.type == "cpu")
    steps = [serial_step(cases[name], device)]
    if device.type == "cuda" and cases[name].data()[0].dim() == 4:
        steps.append(serial_step(cases[name], device, channels_last=True))
    return min(steps, key=lambda step: seconds_of(step, device)) if len(steps) > 1 else steps[0]


def _row(
    name: str, case: Case | None, mode: str, width: int, device: torch.device, repeats: int, serial: Step
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
    speedups = sorted(serial_s * width / step_s for serial_s, step_s in pairs)
    return {
        "serial_ms": 1e3 * statistics.median(serial_s for serial_s, _ in pairs),
        "step_ms": 1e3 * statistics.median(step_s for _, step_s in pairs),
        "speedup": statistics.median(speedups),
        "lowest": speedups[0],
        "highest": speedups[-1],
        "memory_bytes": watch.memory_bytes,
        "sm_activity": watch.sm_activity,
    }


def _measured(
    case: Case | None, mode: str, width: int, device: torch.device, repeats: int, serial: Step
) -> tuple[list[tuple[float, float]], GpuWatch]:
    """Seconds of a serial step and of a step of all trials, turn by turn, and what the GPU did meanwhile.

    The two take turns because a machine's speed drifts: a ratio of neighbours means more than one of means.
    """
    step = serial if mode == "serial" else _step_of(case, mode, width, device)
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


def _step_of(case: Case | None, mode: str, width: int, device: torch.device) -> Step:
    tiny = device.type == "cpu"
    if mode == "vmap":
        return vmap_step(case, device, width) if case else gan_vmap_step(device, width, tiny)
    if mode == "serial-compile":
        parts = compiled_step(case, device) if case else gan_compiled_step(device, tiny)
        return _replayed(parts, device)
    # One trial of the fused array is the model itself.
    count = 1 if mode == "serial-graph" else width
    parts = fused_step(case, device, count) if case else gan_fused_step(device, count, tiny)
    if mode in ("serial-graph", "fused-graph"):
        return _captured(*parts)
    step, inputs, _ = parts
    return lambda: step(*inputs)


def _replayed(parts: tuple[Callable[..., Any], list[torch.Tensor], Step], device: torch.device) -> Step:
    """The step as a CUDA graph on a GPU, as it is on a CPU."""
    if device.type == "cuda":
        return _captured(*parts)
    step, inputs, _ = parts
    return lambda: step(*inputs)


def _captured(step: Callable[..., Any], inputs: list[torch.Tensor], clear: Step) -> Step:
    captured = CapturedStep(step, inputs, clear=clear)
    return lambda: captured(*inputs)


def _claims(rows: Sequence[Row], device: torch.device) -> list[BenchClaim]:
    best: dict[str, float] = {}
    for row in rows:
        if str(row["mode"]).startswith("fused") and "speedup" in row:
            name = str(row["model"])
            best[name] = max(best.get(name, -math.inf), float(row["speedup"] or 0.0))
    goals = _GPU_GOALS if device.type == "cuda" else _CPU_GOALS
    claims = []
    for name in dict.fromkeys(str(row["model"]) for row in rows):
        goal = goals.get(name, 1.0)
        found = best.get(name)
        words = f"{name}: fused trials over the same trials one after another"
        claims.append(BenchClaim(words, found, f">= {goal:g}x", found is not None and found >= goal))
    return claims


def write_plot(bench: Bench, path: Path) -> None:
    """Speed-up over trials for each mode, a panel for each model, as HFTA shows it; curves next to it.

    The learning curves, where there are any, go to `NAME-curves.png`.
    """
    import matplotlib  # loaded only where a picture is asked for

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    if any(row["mode"] == "curve" for row in bench.rows):
        write_curves(bench.rows, path.with_name(f"{path.stem}-curves.png"))
    timed = [row for row in bench.rows if "speedup" in row]
    models = list(dict.fromkeys(row["model"] for row in timed))
    if not models:
        return
    across = min(4, len(models))
    down = -(-len(models) // across)
    figure, axes = plt.subplots(down, across, figsize=(3.2 * across, 3.0 * down), squeeze=False)
    for axis in axes.flat[len(models) :]:
        axis.axis("off")
    for axis, model in zip(axes.flat, models):
        own = [row for row in timed if row["model"] == model]
        for mode in dict.fromkeys(str(row["mode"]) for row in own):
            points = [(row["trials"], row["speedup"]) for row in own if row["mode"] == mode]
            colour = f"C{MODES.index(mode)}"
            if mode.startswith("serial"):  # one trial after another is as fast for any number of them
                axis.axhline(points[0][1], color=colour, linestyle="--", linewidth=1, label=mode)
            else:
                axis.plot(*zip(*points), marker="o", color=colour, label=mode)
        axis.set(title=str(model), xlabel="trials", ylabel="speed-up over serial")
        axis.set_xscale("log", base=2)
    known = {label: line for axis in axes.flat for line, label in zip(*axis.get_legend_handles_labels())}
    # In a panel that no model needs, where there is one: elsewhere it hides curves.
    axes.flat[-1].legend(known.values(), known.keys(), fontsize=7, loc="best")
    figure.tight_layout()
    write_picture(path, figure, dpi=90)
    plt.close(figure)
