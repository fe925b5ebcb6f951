"""How much faster a captured step of fused trials is than one trial by torch.compile as a CUDA graph.

    python benchmarks/over_compiled.py [--models resnet18] [--widths 8 32] [--mode default]

Each model of `plait bench fusion` has a process of its own, in which no profiler has run: in that of
`gpu_guard.py` compiled steps of many small kernels took up to 1.5 times as long. One trial is compiled with
its images as torch lays them, then with channels innermost; the faster step is the one to beat. It and the
fused one are timed in turn. The speed-up is the time of as many compiled steps as there are trials over that
of the fused one. `--mode` is torch.compile's. Two to six minutes for a model.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from plait.fusion import CapturedStep
from plait_bench.fusion.cases import GPU_CASES, Case, StepParts, compiled_step, fused_step, seconds_of

WIDTHS = (32,)
ROUNDS = 7
# So many steps at once, that the host's part of the first does not count.
ALONE, FUSED = 20, 5
LIMIT_S = 900.0


def captured(parts: StepParts, warm_up: int = 3) -> Callable[[], Any]:
    step, inputs, clear = parts
    return partial(CapturedStep(step, inputs, warm_up, clear), *inputs)


def fastest_alone(case: Case, device: torch.device, mode: str) -> tuple[str, Callable[[], Any]]:
    """The compiled step to beat, and how its images lie."""
    layouts = [False, True] if any(part.dim() == 4 for part in case.data()) else [False]
    found: list[tuple[float, str, Callable[[], Any]]] = []
    for channels_last in layouts:
        name = "channels last" if channels_last else "contiguous"
        torch.manual_seed(0)
        try:
            step = captured(compiled_step(case, device, channels_last, mode))
        except Exception as failure:  # then the other one is to be beaten
            print(f"  {name}: {type(failure).__name__}: {str(failure).splitlines()[0][:150]}", flush=True)
            continue
        seconds = statistics.median(seconds_of(step, device, ALONE) for _ in range(3))
        print(f"  {name}: {1e3 * seconds:.3f} ms", flush=True)
        found.append((seconds, name, step))
    _, name, step = min(found, key=lambda each: each[0])
    return name, step


def measure(name: str, widths: list[int], mode: str) -> None:
    device, case = torch.device("cuda"), GPU_CASES[name]
    layout, alone = fastest_alone(case, device, mode)
    for width in widths:
        torch.manual_seed(0)
        step, inputs, clear = fused_step(case, device, width)
        for _ in range(3):  # the fastest ways are chosen now
            step(*inputs)
        fused = captured((step, inputs, clear), 1)
        pairs = [(seconds_of(alone, device, ALONE), seconds_of(fused, device, FUSED)) for _ in range(ROUNDS)]
        ratios = sorted(width * one / together for one, together in pairs)
        one, together = (1e3 * statistics.median(each) for each in zip(*pairs))
        print(
            f"{name} x{width}: compiled ({layout}) {one:.3f} ms, fused {together:.3f} ms: "
            f"{statistics.median(ratios):.2f}x ({ratios[0]:.2f} to {ratios[-1]:.2f})",
            flush=True,
        )
        del step, inputs, clear, fused
        gc.collect()
        torch.cuda.empty_cache()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(GPU_CASES), choices=list(GPU_CASES))
    parser.add_argument("--widths", nargs="+", type=int, default=list(WIDTHS))
    parser.add_argument(
        "--mode", default="default", help="torch.compile's, such as max-autotune-no-cudagraphs"
    )
    parser.add_argument("--one", choices=list(GPU_CASES), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        print("over_compiled: torch sees no GPU here", file=sys.stderr)
        return 2
    if asked.one:
        measure(asked.one, asked.widths, asked.mode)
        return 0
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; {' '.join(sys.argv)}", flush=True)
    failed = []
    for name in asked.models:
        command = [sys.executable, __file__, "--one", name, "--mode", asked.mode, "--widths"]
        try:
            done = subprocess.run([*command, *map(str, asked.widths)], timeout=LIMIT_S).returncode
        except subprocess.TimeoutExpired:
            print(f"{name}: took more than {LIMIT_S:.0f} s")
            done = 1
        failed += [name] if done else []
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
