"""How soon a run takes its first step, and what importing Plait costs.

    python benchmarks/startup.py [--rounds 7]

The yardstick is measured in the same run, in turn: two bare processes that import torch and make a gloo
group. Plait's time runs from the command to the end of the first step of two workers (its first progress).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from plait_bench.harness import at_most, in_turns, of_runs, spread
from plait_bench.loops import parser_of, show

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


def import_seconds() -> float:
    """Seconds that `import plait` takes after `import torch`."""
    script = "import torch, time; t = time.perf_counter(); import plait; print(time.perf_counter() - t)"
    return float(subprocess.check_output([sys.executable, "-c", script], text=True))


def main() -> None:
    asked = parser_of(__doc__, rounds=7).parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "job.yaml").write_text(JOB)
        sides = {
            "two bare processes": lambda _: bare(folder),
            "plait, first step": lambda _: first_step(folder),
        }
        taken = in_turns(sides, asked.rounds)
    ratios = [ours / theirs for theirs, ours in zip(*taken.values())]
    added = [import_seconds() for _ in range(3)]
    rows = [{"side": side, **spread(seconds, "seconds")} for side, seconds in taken.items()]
    claims = [
        at_most(*of_runs("the first step over two bare processes", ratios), 2.5),
        at_most(*of_runs("seconds that import plait adds to import torch", added), 0.3),
    ]
    show("startup", asked, rows, claims)


if __name__ == "__main__":
    main()
