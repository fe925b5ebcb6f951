"""Whether a step of fused trials still costs the GPU what it did: kernels launched, and time.

    python benchmarks/gpu_guard.py [--write] [--models resnet18] [--widths 8 32] [--device cuda]

For each model of `plait bench fusion` and 1, 8 and 32 trials: the kernels of one step, the time of a step
that is captured as a CUDA graph, and that of an eager one, compared with `benchmarks/gpu_figures.json`. The
exit status is 1 where a count rose by more than 2%, a captured time by more than 10%, or a step was not
measured. Eager times depend on the host and are only shown. `--write` keeps what was measured, with machine
and versions; all takes less than eight minutes on an H200. `--longest 20` lists, instead of all this, the
kernels on which the GPU spends the longest. `--device cpu` tries the script itself: it counts the operations
of the small models, keeps nothing and compares nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from plait.fusion import CapturedStep
from plait_bench.fusion.cases import cases_on, finish, fused_step, seconds_of

FIGURES = Path(__file__).with_name("gpu_figures.json")
WIDTHS = (1, 8, 32)
# How much more a figure may be than the one that was kept.
MORE_KERNELS, MORE_TIME = 1.02, 1.10
WARM_UP, ROUNDS = 3, 5
NO_KERNELS = ("Memcpy", "Memset", "ProfilerStep", "Optimizer.", "## ")
# No step is begun after this, so that a slow machine ends with words in time.
DEADLINE_S = 440.0

Step = Callable[..., Any]
Figures = dict[str, float]


def fused_parts(
    name: str, width: int, device: torch.device
) -> tuple[Step, list[torch.Tensor], Callable[[], Any]]:
    torch.manual_seed(0)
    return fused_step(cases_on(device)[name], device, width)


def measure(name: str, width: int, device: torch.device) -> Figures:
    """The figures of one step of `width` trials."""
    step, inputs, clear = fused_parts(name, width, device)
    for _ in range(WARM_UP):  # the fastest ways are chosen now
        step(*inputs)
    found: Figures = {
        "kernels": float(kernels_of(lambda: step(*inputs), device)),
        "eager_ms": milliseconds(lambda: step(*inputs), device),
    }
    if device.type == "cuda":
        captured = CapturedStep(step, inputs, warm_up=1, clear=clear)
        found["captured_ms"] = milliseconds(lambda: captured(*inputs), device)
    return found


def milliseconds(step: Step, device: torch.device) -> float:
    """The median of a few rounds, of about ten steps each; large steps need fewer."""
    once = seconds_of(step, device, inner=1)
    inner = max(3, min(20, int(0.2 / max(once, 1e-6))))
    return 1e3 * statistics.median(seconds_of(step, device, inner) for _ in range(ROUNDS))


def kernels_of(step: Step, device: torch.device) -> int:
    """How many kernels a step launches; on a CPU, how many operations it dispatches."""
    if device.type == "cpu":
        with _Operations() as operations:
            step()
        return operations.count
    return len(launched(step, device))


def launched(step: Step, device: torch.device) -> list[tuple[str, float]]:
    """The name of each kernel that a step launches on a GPU, with its milliseconds there."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step()
        finish(device)
    events: Sequence[Any] = profiler.events() or ()
    on_gpu = [event for event in events if event.device_type == DeviceType.CUDA]
    # Ranges that torch names itself, such as an optimizer's step, are no kernels.
    kernels = [
        (event.name, event.time_range.elapsed_us() / 1e3)
        for event in on_gpu
        if not event.name.startswith(NO_KERNELS) and not getattr(event, "is_user_annotation", False)
    ]
    if not kernels:
        raise RuntimeError(
            "the profiler saw no kernels: expected CUPTI, which comes with torch, to be usable"
        )
    return kernels


def longest(name: str, width: int, device: torch.device, most: int) -> str:
    """Lines with the kernels on which the GPU spends most of a step: milliseconds, launches, name."""
    step, inputs, _ = fused_parts(name, width, device)
    for _ in range(WARM_UP):
        step(*inputs)
    spent: defaultdict[str, list[float]] = defaultdict(list)
    for kernel, milliseconds_of_it in launched(lambda: step(*inputs), device):
        spent[kernel].append(milliseconds_of_it)
    ordered = sorted(spent.items(), key=lambda item: -sum(item[1]))
    whole = sum(sum(each) for each in spent.values())
    lines = [f"{sum(each):9.3f} {len(each):5}  {kernel[:100]}" for kernel, each in ordered[:most]]
    return "\n".join([f"{name} x{width}: {whole:.3f} ms in kernels", *lines])


class _Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def measure_all(
    names: Sequence[str],
    widths: Sequence[int],
    device: torch.device,
    kept: Mapping[str, Figures],
) -> Iterator[tuple[str, Figures | str]]:
    """The figures of each step, or why there are none."""
    began = time.perf_counter()
    for name in names:
        for width in widths:
            key = f"{name} x{width}"
            if time.perf_counter() - began > DEADLINE_S:
                yield key, f"not measured: {DEADLINE_S:.0f} s are over; name fewer with --models"
                continue
            try:
                found: Figures | str = measure(name, width, device)
            except Exception as failure:  # other steps are measured all the same
                found = f"not measured: {type(failure).__name__}: {str(failure)[:200]}"
            if isinstance(found, dict):
                print(row(key, found, kept.get(key, {})), flush=True)
            yield key, found
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()


def row(key: str, found: Figures, kept: Figures) -> str:
    cells = []
    for name, width, digits in (("kernels", 8, 0), ("captured_ms", 9, 3), ("eager_ms", 9, 3)):
        now, before = found.get(name), kept.get(name)
        change = f" {now / before - 1:+7.1%}" if now is not None and before else " " * 8
        cells.append((f"{now:{width}.{digits}f}" if now is not None else " " * width) + change)
    return f"{key:24} " + "  ".join(cells)


def worse(key: str, found: Figures | str, kept: Figures) -> list[str]:
    """What is wrong with a step, in words."""
    if isinstance(found, str):
        return [f"{key}: {found}"]
    limits = {"kernels": ("kernels", MORE_KERNELS), "captured_ms": ("ms captured", MORE_TIME)}
    return [
        f"{key}: found {found[name]:g} {words}, expected at most {limit * kept[name]:g} "
        f"({kept[name]:g} were kept, {limit - 1:.0%} more are allowed)"
        for name, (words, limit) in limits.items()
        if name in found and name in kept and found[name] > limit * kept[name]
    ]


def machine_of(device: torch.device) -> dict[str, str]:
    on_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if on_gpu else platform.machine()
    return {"machine": name, "torch": torch.__version__, "cuda": str(torch.version.cuda)}


def read_kept(machine: Mapping[str, str]) -> dict[str, Figures]:
    """The figures in the repository; none where they are of another machine."""
    if not FIGURES.is_file():
        print(f"no {FIGURES.name} is there to compare with; --write makes one")
        return {}
    saved = json.loads(FIGURES.read_text())
    if saved["machine"] != machine["machine"]:
        print(f"the figures kept are of a {saved['machine']}: nothing to compare with")
        return {}
    if any(saved[part] != machine[part] for part in ("torch", "cuda")):
        print(f"the figures kept are of torch {saved['torch']}, CUDA {saved['cuda']}")
    steps: dict[str, Figures] = saved["steps"]
    return steps


def write(machine: Mapping[str, str], steps: Mapping[str, Figures]) -> None:
    FIGURES.write_text(json.dumps({**machine, "steps": steps}, indent=1, sort_keys=True) + "\n")
    print(f"wrote {FIGURES.name}: {len(steps)} steps")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--write", action="store_true", help="keep what is measured")
    parser.add_argument("--models", nargs="+", help="default: all")
    parser.add_argument("--widths", nargs="+", type=int, default=list(WIDTHS))
    parser.add_argument("--longest", type=int, help="list so many kernels of each step instead")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    asked = parser.parse_args()
    device = torch.device(asked.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("gpu_guard: torch sees no GPU here; --device cpu tries the script itself", file=sys.stderr)
        return 2
    known = list(cases_on(device))
    names = asked.models or known
    unknown = [name for name in names if name not in known]
    if unknown:
        print(f"gpu_guard: --models: found {unknown}, expected some of {known}", file=sys.stderr)
        return 2
    if asked.longest and device.type == "cpu":
        print("gpu_guard: --longest: found a CPU, expected a GPU", file=sys.stderr)
        return 2
    if asked.longest:
        for name, width in product(names, asked.widths):
            print(longest(name, width, device, asked.longest), flush=True)
        return 0
    began, machine = time.perf_counter(), machine_of(device)
    print(f"{machine['machine']}, torch {machine['torch']}, CUDA {machine['cuda']}; {' '.join(sys.argv)}")
    kept = read_kept(machine) if device.type == "cuda" else {}
    print(f"{'step':24} {'kernels':>8}{'':10}{'captured ms':>9}{'':10}{'eager ms':>9}")
    found = dict(measure_all(names, asked.widths, device, kept))
    measured = {key: figures for key, figures in found.items() if isinstance(figures, dict)}
    if asked.write and device.type == "cuda":
        write(machine, {**kept, **measured})
        kept = {}
    wrong = [line for key, figures in found.items() for line in worse(key, figures, kept.get(key, {}))]
    print(f"{time.perf_counter() - began:.0f} s; {'all as cheap as before' if not wrong else 'worse:'}")
    print("\n".join(wrong), end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
