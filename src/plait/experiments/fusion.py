"""Fused trials against the same trials one after another, in processes and by vmap (HFTA's experiment)."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as multiprocessing

from plait.core.errors import InputError
from plait.core.names import did_you_mean
from plait.experiments.bench import Bench, Claim, Row
from plait.experiments.fusion_cases import (
    CPU_CASES,
    GPU_CASES,
    Case,
    Step,
    compiled_step,
    fused_step,
    serial_step,
    vmap_step,
)
from plait.experiments.fusion_convergence import convergence, write_curves
from plait.experiments.fusion_gan import gan_fused_step, gan_serial_step, gan_vmap_step
from plait.experiments.nvml import GpuWatch
from plait.fusion.capture import CapturedStep

MODES = ("serial", "serial-graph", "serial-compile", "processes", "mps", "vmap", "fused", "fused-graph")
PARTS = {
    "speed": "all models in the modes that one process has",
    "modes": "all modes, also several processes at once and under MPS, over widths from 1 to 32",
    "convergence": "learning curves of fused trials on the serial ones",
}
DCGAN = "dcgan"
# Speed-ups over the plain loop that were set as goals before anything was measured.
_CPU_GOALS = {"mlp": 4.0, "transformer": 2.5, "cnn": 1.5}
_GPU_GOALS = {"pointnet-cls": 4.0, "resnet18": 16.0, DCGAN: 9.0}
_JOIN_S = 300.0
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
    claims: list[Claim] = []
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
    if device.type == "cuda":
        modes = [mode for mode in MODES if everything or mode not in ("processes", "mps")]
        return modes, [1, 2, 4, 8, 16, 32] if everything else [8, 32]
    if everything:
        return ["serial", "serial-compile", "processes", "vmap", "fused"], [1, 2, 4, 8, 16, 32]
    return ["serial", "vmap", "fused"], [8]


def _measure_all(
    place: torch.device, models: Sequence[str], widths: list[int], modes: list[str], repeats: int
) -> list[Row]:
    cases = GPU_CASES if place.type == "cuda" else CPU_CASES
    names = list(models) or [*cases, DCGAN]
    _check(names, [*cases, DCGAN], "models")
    rows: list[Row] = []
    for name in names:
        serial = _best_serial_step(name, cases, place)
        for mode in modes:
            for width in (1,) if mode.startswith("serial") else widths:
                rows.append(_row(name, cases.get(name), mode, width, place, repeats, serial))
                if place.type == "cuda":
                    torch.cuda.empty_cache()
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
    return min(steps, key=lambda step: _seconds(step, device)) if len(steps) > 1 else steps[0]


def _row(
    name: str, case: Case | None, mode: str, width: int, device: torch.device, repeats: int, serial: Step
) -> Row:
    row: Row = {"model": name, "mode": mode, "trials": width}
    try:
        pairs, watch = _measured(name, case, mode, width, device, repeats, serial)
    except Exception as failure:  # any mode may fail on any model; the row says how
        return {**row, "failed": f"{type(failure).__name__}: {str(failure).splitlines()[0][:80]}"}
    speedups = sorted(serial_s * width / step_s for serial_s, step_s in pairs)
    return {
        **row,
        "serial_ms": 1e3 * statistics.median(serial_s for serial_s, _ in pairs),
        "step_ms": 1e3 * statistics.median(step_s for _, step_s in pairs),
        "speedup": statistics.median(speedups),
        "lowest": speedups[0],
        "highest": speedups[-1],
        "memory_bytes": watch.memory_bytes,
        "sm_activity": watch.sm_activity,
    }


def _measured(
    name: str,
    case: Case | None,
    mode: str,
    width: int,
    device: torch.device,
    repeats: int,
    serial: Step,
) -> tuple[list[tuple[float, float]], GpuWatch]:
    """Seconds of a serial step and of a step of all trials, turn by turn, and what the GPU did meanwhile.

    The two take turns because a machine's speed drifts: a ratio of neighbours means more than one of means.
    """
    watch = GpuWatch(device)
    if mode in ("processes", "mps"):
        with watch:
            together = _times_of_processes(name, mode, width, device, repeats)
        return [(_seconds(serial, device), step_s) for step_s in together], watch
    step = serial if mode == "serial" else _step_of(case, mode, width, device)
    for _ in range(3):
        step()
    pairs = [(_seconds(serial, device), _seconds(step, device)) for _ in range(repeats)]
    if device.type == "cuda":
        with watch:
            end = time.perf_counter() + _WATCH_S
            while time.perf_counter() < end:
                step()
                _finish(device)
    return pairs, watch


def _step_of(case: Case | None, mode: str, width: int, device: torch.device) -> Step:
    tiny = device.type == "cpu"
    if mode == "vmap":
        return vmap_step(case, device, width) if case else gan_vmap_step(device, width, tiny)
    if mode == "serial-compile":
        if case is None:
            raise InputError("not written for a pair of models")
        return _replayed(compiled_step(case, device), device)
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


def _seconds(step: Step, device: torch.device, inner: int = 5) -> float:
    """Seconds a step takes, the mean of a few after one that warms up."""
    step()
    _finish(device)
    start = time.perf_counter()
    for _ in range(inner):
        step()
    _finish(device)
    return (time.perf_counter() - start) / inner


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _times_of_processes(name: str, mode: str, width: int, device: torch.device, repeats: int) -> list[float]:
    """Seconds in which each of `width` processes makes a step, all at once."""
    if mode == "mps" and "CUDA_MPS_PIPE_DIRECTORY" not in os.environ:
        raise InputError("CUDA_MPS_PIPE_DIRECTORY is not set; start nvidia-cuda-mps-control first")
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(width), context.Queue()
    workers = [
        context.Process(target=_one_process, args=(name, str(device), repeats, barrier, results), daemon=True)
        for _ in range(width)
    ]
    for worker in workers:
        worker.start()
    try:
        found = [results.get(timeout=_JOIN_S) for _ in workers]
    finally:
        for worker in workers:
            worker.join(5.0)
            worker.terminate()
    # All began together at each round, so the slowest says how long the round took.
    return [max(times) for times in zip(*found)]


def _one_process(name: str, device: str, repeats: int, barrier: Barrier, results: Any) -> None:
    torch.set_num_threads(1)
    place = torch.device(device)
    cases = GPU_CASES if place.type == "cuda" else CPU_CASES
    step = gan_serial_step(place, place.type == "cpu") if name == DCGAN else serial_step(cases[name], place)
    _seconds(step, place)
    times = []
    for _ in range(repeats):
        barrier.wait(_JOIN_S)
        times.append(_seconds(step, place, inner=10))
    results.put(times)


def _claims(rows: Sequence[Row], device: torch.device) -> list[Claim]:
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
        claims.append(Claim(words, found, f">= {goal:g}x", found is not None and found >= goal))
    return claims


def write_plot(bench: Bench, path: Path) -> None:
    """Speed-up over trials for each mode, a panel for each model, as HFTA shows it; curves beside it.

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
    figure, axes = plt.subplots(1, len(models), figsize=(3.2 * len(models), 3.0), squeeze=False)
    for axis, model in zip(axes[0], models):
        own = [row for row in timed if row["model"] == model]
        for mode in dict.fromkeys(row["mode"] for row in own):
            points = [(row["trials"], row["speedup"]) for row in own if row["mode"] == mode]
            axis.plot(*zip(*points), marker="o", label=str(mode))
        axis.set(title=str(model), xlabel="trials", ylabel="speed-up over serial")
        axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
