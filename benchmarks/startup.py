"""How soon a run takes its first step, and what importing Plait costs.

    python benchmarks/startup.py [--rounds 7]

The yardstick is measured in the same run, in turn: two bare processes that import torch and make a gloo
group. Plait's time runs from the command to the end of the first step of two workers (its first progress).
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BARE = """
import sys, torch.distributed as dist
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=int(sys.argv[2]), world_size=2)
"""

JOB = """
name: startup
model: plait.workloads.mlp:mlp_tiny
data: {kind: digits, batch_size: 64}
optimizer: {kind: sgd, lr: 0.1}
steps: 1
log_every_steps: 1
parallel: {workers: 2}
"""


def bare(folder: Path) -> float:
    """Seconds until both of two bare processes have made a group."""
    store = str(folder / f"store{time.monotonic_ns()}")
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    started = time.perf_counter()
    ranks = [
        subprocess.Popen([sys.executable, "-c", BARE, store, str(rank)], env=environment) for rank in (0, 1)
    ]
    for rank in ranks:
        if rank.wait(120) != 0:
            raise SystemExit("the bare processes failed")
    return time.perf_counter() - started


def first_step(folder: Path) -> float:
    """Seconds from `plait train` to the moment its event file tells of the first step."""
    run = folder / f"run{time.monotonic_ns()}"
    begun = time.time()
    subprocess.run(
        [sys.executable, "-m", "plait", "train", str(folder / "job.yaml"), "--run", str(run), "--quiet"],
        check=True,
        timeout=120,
        stdout=subprocess.DEVNULL,
    )
    events = (run / "events" / "rank0.jsonl").read_text()
    found = re.search(r'"t":([0-9.]+),"rank":0,"kind":"step"', events)
    if found is None:
        raise SystemExit("the run recorded no step")
    return float(found[1]) - begun


def import_seconds(module: str) -> float:
    script = f"import time; t = time.perf_counter(); import {module}; print(time.perf_counter() - t)"
    before = "import torch; " if module == "plait" else ""
    return float(subprocess.check_output([sys.executable, "-c", before + script], text=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {rounds} rounds"
    )
    print("claims: import plait adds at most 0.3 s; the first step comes within 2.5x of two bare processes")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "job.yaml").write_text(JOB)
        pairs = [(bare(folder), first_step(folder)) for _ in range(rounds + 1)][1:]
        extra = [import_seconds("plait") for _ in range(3)]
    ratios = [ours / theirs for theirs, ours in pairs]
    ratio, added = statistics.median(ratios), statistics.median(extra)
    print(f"two bare processes   {statistics.median(p[0] for p in pairs):6.2f} s (median)")
    print(f"plait, first step    {statistics.median(p[1] for p in pairs):6.2f} s (median)")
    show("ratio", ratio, ratios, 2.5)
    show("import plait adds, s", added, extra, 0.3)
    sys.exit(ratio > 2.5 or added > 0.3)


def show(name: str, value: float, values: list[float], goal: float) -> None:
    verdict = "holds" if value <= goal else "DOES NOT HOLD"
    print(f"{name:20} {value:6.3f}  ({min(values):.3f}-{max(values):.3f})  goal {goal}  {verdict}")


if __name__ == "__main__":
    main()
