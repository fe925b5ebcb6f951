"""What audits cost a run: the seconds of all audits over those of the whole training.

    python benchmarks/audit_cost.py [--steps 1000] [--rounds 3]

Two workers train a small ResNet on digits, data parallel and in two stages, with audits at their usual steps.
Audits time themselves (events of kind `audited`); the rest of the run is not touched by them. The exit
status is 1 where the median of the rounds is above 1%.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import plait
from plait.core import events, run_events
from plait.launcher.run_dir import RunDir
from plait_bench.harness import at_most, of_runs, spread
from plait_bench.loops import parser_of, show

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


def main() -> None:
    asked = parser_of(__doc__, steps=1000, rounds=3).parse_args()
    rows, claims = [], []
    for name, parallel in WAYS.items():
        with tempfile.TemporaryDirectory() as folder:
            found = [share(parallel, asked.steps, Path(folder)) for _ in range(asked.rounds)]
        shares = [part for _, part in found]
        rows.append({"way": name, "audited": found[0][0], **spread(shares, "share"), "rounds": asked.rounds})
        claims.append(at_most(*of_runs(f"{name}: share of the time", shares), MOST))
    show("audit_cost", asked, rows, claims)


if __name__ == "__main__":
    main()
