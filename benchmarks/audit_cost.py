"""What audits cost a run: the seconds of all audits over those of the whole training.

    python benchmarks/audit_cost.py [--steps 1000] [--rounds 3]

Two workers train a small ResNet on digits, data parallel and in two stages, with audits at their usual steps.
Audits time themselves (events of kind `audited`); the rest of the run is not touched by them. The share of
each round and their median are printed; the exit status is 1 where a median is above 1%.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import plait
from plait.core import events, run_events
from plait.launcher.run_dir import RunDir

WAYS: dict[str, dict[str, Any]] = {
    "data parallel": {"workers": 2, "threads": 1},
    "two stages, flush": {"workers": 2, "threads": 1, "plan": "model-parallel", "schedule": "flush"},
}
MOST = 0.01


def share(parallel: dict[str, Any], steps: int, folder: Path) -> tuple[int, float]:
    """How many steps of a run were audited, and which share of its time that took."""
    job = {
        "name": "audit-cost",
        "model": "plait.workloads.resnet:resnet18_tiny",
        "data": {"kind": "digits", "batch_size": 32},
        "optimizer": {"kind": "sgd", "lr": 0.05, "momentum": 0.9},
        "steps": steps,
        "run_dir": str(folder),
        "parallel": parallel,
    }
    result = plait.train(job)
    found = [each.event for each in events.read(RunDir(Path(result.run)).events())]
    audits = [event.seconds for event in found if isinstance(event, run_events.Audited)]
    return len(audits), sum(audits) / result.seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    fine = True
    for name, parallel in WAYS.items():
        with tempfile.TemporaryDirectory() as folder:
            found = [share(parallel, asked.steps, Path(folder)) for _ in range(asked.rounds)]
        middle = statistics.median(part for _, part in found)
        fine = fine and middle <= MOST
        rounds = ", ".join(f"{part:.2%}" for _, part in found)
        print(f"{name}: {found[0][0]} of {asked.steps} steps audited, {middle:.2%} of the time ({rounds})")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
