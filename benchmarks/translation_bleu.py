"""The tiny GNMT on number words: BLEU and the CPU time to get there, plain and as a two-stage stash pipeline.

    python benchmarks/translation_bleu.py

Claims: BLEU of at least 95 within two minutes of CPU time a worker, both ways.
"""

from __future__ import annotations

import platform
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import torch

import plait
from plait.core.names import searching
from plait.jobs.evaluate import measure_run
from plait.launcher.run_dir import RunDir

EXAMPLE = Path(__file__).parents[1] / "examples" / "gnmt.yaml"
LEAST_BLEU, MOST_CPU_S = 95.0, 120.0
STASH = ["parallel.workers=2", "parallel.plan=model-parallel", "parallel.schedule=stash"]


class CpuSeconds(threading.Thread):
    """Adds up what the processes below this one have computed, as long as they live."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.by_process: dict[int, float] = {}
        self._end = threading.Event()

    def run(self) -> None:
        while not self._end.wait(0.2):
            for child in psutil.Process().children(recursive=True):
                try:
                    times = child.cpu_times()
                except psutil.NoSuchProcess:
                    continue
                self.by_process[child.pid] = times.user + times.system

    def stop(self) -> float:
        """The CPU seconds of the busiest process, a worker."""
        self._end.set()
        self.join()
        return max(self.by_process.values())


def train(overrides: list[str], folder: str) -> tuple[float, float, float]:
    """CPU seconds of the busiest worker, wall-clock seconds, and BLEU of the last checkpoint."""
    clock, begin = CpuSeconds(), time.perf_counter()
    clock.start()
    result: Any = plait.train(plait.read_job(EXAMPLE, [*overrides, f"run_dir={folder}"]))
    cpu_s, wall_s = clock.stop(), time.perf_counter() - begin
    with searching(str(EXAMPLE.parent)):
        found = measure_run(RunDir(Path(result.run)))
    return cpu_s, wall_s, found["metrics"]["bleu"]


def main() -> None:
    cores, load = psutil.cpu_count(), psutil.getloadavg()[0]
    print(f"{platform.machine()}, torch {torch.__version__}, {cores} cores, load {load:.1f}")
    print("python benchmarks/translation_bleu.py")
    print(f"{'':24} BLEU   CPU s a worker   wall s   claim")
    for name, overrides in {"one process": [], "2-stage stash pipeline": STASH}.items():
        with TemporaryDirectory() as folder:
            cpu_s, wall_s, bleu = train(overrides, folder)
        holds = "holds" if bleu >= LEAST_BLEU and cpu_s <= MOST_CPU_S else "does not hold"
        print(f"{name:24} {bleu:5.2f}  {cpu_s:14.0f}   {wall_s:6.0f}   {holds}", flush=True)


if __name__ == "__main__":
    main()
