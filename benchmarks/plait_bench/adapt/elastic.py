"""Workers that come and go: how long a change holds up those that stay, and whether it changes the loss."""

from __future__ import annotations

import itertools
import statistics
import tempfile
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from plait.core.events import Recorded
from plait.core.run_events import Step, WorkersChanged
from plait.launcher.control import ask_job
from plait.launcher.display import WorkerState
from plait.launcher.run_dir import RunDir
from plait_bench.adapt import pipelines
from plait_bench.adapt.driver import Act, KillWorker, apart, job, trained
from plait_bench.harness import Bench, BenchClaim, Found, Row, at_most, number, picture, run_parts, say
from plait_bench.sleeping import Sleeping

SIZES = (2, 3, 4, 2, 1, 3)
GOAL_S = 0.5
LOSS_GOAL = 1e-9
# Steps between a change and the next request, from which the time of a step is known.
NAME = "elastic"
QUIET_STEPS = 30
# So that a change meets a job in the middle of its steps, also on few cores.
STEP_S = 0.02

# A job whose scaling is known: a step takes so long for each sample of a worker, and for each worker.
SAMPLE_S = 0.004
WORKER_S = 0.008
BATCH = 48
MOST_WORKERS = 5
GAIN = 0.15

# Name -> what the job says of its model.
MODELS: Mapping[str, Mapping[str, Any]] = {
    "mlp": {"model": "plait.workloads.mlp:mlp_tiny", "precision": "float64"},
    "mlp-3-million": {
        "model": "plait.workloads.mlp:mlp",
        "model_args": {"inputs": 64, "hidden": [1500, 1500, 300]},
        "precision": "float32",
    },
    "known-scaling": {"model": f"{__name__}:KnownScaling"},
}


def run(
    parts: Sequence[str] = ("workers", "pipelines"), command: str = "plait bench elastic", quick: bool = False
) -> Bench:
    """Change jobs while they run, beside jobs that stay as they are; the quick course is that of workers."""
    if quick and "workers" in parts:
        parts = ["workers"]
    return run_parts("elastic", command, parts, {**PARTS, "workers": lambda: run_workers(quick)})


def run_workers(quick: bool = False) -> Found:
    """Resizes, a worker that is killed, and the policy that chooses the number of workers."""
    rows: list[Row] = []
    claims: list[BenchClaim] = []
    # Joiners take a while on a busy machine, and all changes must come before the end.
    steps = (2 if quick else 4) * QUIET_STEPS * (len(SIZES) + 1)
    for name in ("mlp",) if quick else ("mlp", "mlp-3-million"):
        parallel = {"workers": SIZES[0], "elastic": True, "max_workers": max(SIZES)}
        resized = _trained(name, parallel, steps, [_ask(size) for size in SIZES[1:]])
        changes = _change_rows("resize", name, resized)
        rows += changes
        claims.append(_stall_claim(name, changes))
        if name == "mlp":
            fixed = _trained(name, {"workers": 2, "jitter": [0.0, 0.0]}, steps)
            rows.append({"case": "fixed size", "model": name, "workers": 2, "then": 2})
            words = "the largest difference of a step's loss from the run of fixed size (float64)"
            claims.append(at_most(words, apart(resized, fixed), LOSS_GOAL, ", over all steps"))
    lost, tried = _lost("mlp"), _chosen_by_policy()
    return [*rows, *lost, *tried], [*claims, _loss_of_worker_claim(lost), _policy_claim(tried)]


PARTS: Mapping[str, Callable[[], Found]] = {"workers": run_workers, "pipelines": pipelines.run}


def _ask(workers: int) -> Act:
    def ask(folder: RunDir, _: tuple[WorkerState, ...]) -> None:
        ask_job(folder, {"workers": workers, "why": f"at {time.time():.6f}"})

    return ask


def _lost(name: str) -> list[Row]:
    """A row for the loss of the worker that keeps the record, and one for the worker in its place."""
    kill = KillWorker(0)
    recorded = _trained(name, {"workers": 3, "elastic": True, "max_workers": 3}, 8 * QUIET_STEPS, [kill])
    # What the worker that was killed recorded last may not have reached its file.
    return _change_rows("kill -9 of worker 0", name, recorded, kill.at)


class KnownScaling(Sleeping):
    """A model that takes the time of a job whose best number of workers is known, whatever the machine."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))

    def forward_s(self, x: torch.Tensor) -> float:
        workers = dist.get_world_size() if dist.is_initialized() else 1
        return SAMPLE_S * len(x) + WORKER_S * workers


def best_workers() -> int:
    """The number of workers after which one more adds less than the policy asks for."""
    rates = [1 / (SAMPLE_S * BATCH / n + WORKER_S * n) for n in range(1, MOST_WORKERS + 1)]
    return next((n for n in range(1, MOST_WORKERS) if rates[n] < (1 + GAIN) * rates[n - 1]), MOST_WORKERS)


def _chosen_by_policy() -> list[Row]:
    """A row for each number of workers that the policy tries."""
    parallel = {"workers": 1, "elastic": True, "max_workers": MOST_WORKERS, "jitter": [0.0, 0.0]}
    policy = {"kind": "workers", "most": MOST_WORKERS, "gain": GAIN, "window": 8}
    found = _trained("known-scaling", parallel, 160, adapt=[policy])
    return _change_rows("policy", "known-scaling", found)


def _policy_claim(rows: Sequence[Row]) -> BenchClaim:
    tried = [int(number(row, "then")) for row in rows]
    best = best_workers()
    words = "the number of workers that the policy comes to, for a job whose scaling is known"
    last = tried[-1] if tried else None
    holds = last == best and max(tried) == best + 1
    return BenchClaim(words, last, f"{best}, after {best + 1} were tried", holds)


def _trained(
    name: str, parallel: Mapping[str, Any], steps: int, acts: Sequence[Act] = (), **more: Any
) -> list[Recorded]:
    model = {**MODELS[name], "data": {"kind": "digits", "batch_size": BATCH}, "steps": steps}
    with tempfile.TemporaryDirectory() as folder:
        jittered = {"jitter": [1.0, STEP_S], **parallel}
        say(f"elastic, {name}: {steps} steps from {parallel['workers']} workers on, {len(acts)} changes")
        asked = job(NAME, folder, jittered, checkpoint={"every_steps": 1_000_000}, **model, **more)
        return trained(asked, acts, QUIET_STEPS)[1]


def _change_rows(case: str, name: str, recorded: Sequence[Recorded], since: float | None = None) -> list[Row]:
    """How long each change held up the steps, beyond the time of a step; the first one from `since` on."""
    rows: list[Row] = []
    for index, line in enumerate(recorded):
        event = line.event
        if isinstance(event, WorkersChanged):
            before = [each.t for each in recorded[:index] if isinstance(each.event, Step)]
            after = [each.t for each in recorded[index:] if isinstance(each.event, Step)]
            # Two steps in a row that a worker records end one step apart.
            step_s = statistics.median(b - a for a, b in itertools.pairwise(after[1 : QUIET_STEPS // 2]))
            gap_s = after[0] - (since if since is not None and not rows else before[-1])
            rows.append(
                {
                    "case": case,
                    "model": name,
                    "workers": len(event.members) - len(event.joined) + len(event.left) + len(event.lost),
                    "then": len(event.members),
                    "step": event.step,
                    "step_s": round(step_s, 4),
                    "stall_s": round(max(0.0, gap_s - step_s), 4),
                    "switch_s": round(event.seconds, 4),
                    "asked_before_s": _asked_before_s(event, line.t),
                    "why": event.why.partition(" at ")[0] if event.lost else "",
                }
            )
    return rows


def _asked_before_s(event: WorkersChanged, at: float) -> float | None:
    """Seconds from the request to the change, while steps went on."""
    word, _, moment = event.why.partition("at ")
    return round(at - float(moment), 3) if not word and moment else None


def _stall_claim(name: str, changes: Sequence[Row]) -> BenchClaim:
    words = f"{name}: the longest stall of workers that stay, over {' -> '.join(map(str, SIZES))}, s"
    worst = max((number(row, "stall_s") for row in changes), default=None)
    return at_most(words, worst, GOAL_S, ", each change made", only_if=len(changes) == len(SIZES) - 1)


def _loss_of_worker_claim(changes: Sequence[Row]) -> BenchClaim:
    words = "from kill -9 of the worker that keeps the record to the next step of the others, s"
    first = number(changes[0], "stall_s") if changes else None
    more = " beyond a step, and another takes its place"
    return at_most(words, first, GOAL_S, more, only_if=len(changes) == 2)


def write_plot(bench: Bench, path: Path) -> None:
    """The stall of each change of workers, and the pace of a pipeline with a slow worker under each plan."""
    stalls = [row for row in bench.rows if "stall_s" in row]
    paces = [row for row in bench.rows if "stall_s" not in row and "step_s" in row]
    counts = [count for count in (len(stalls), len(paces)) if count]
    size = (1.5 + 0.9 * sum(counts) + len(counts), 4.0)
    with picture(path, size, across=len(counts), width_ratios=counts) as axes:
        if stalls:
            lost = ["kill" in str(row["case"]) or "loses" in str(row["case"]) for row in stalls]
            colours = ["tab:red" if is_lost else "tab:blue" for is_lost in lost]
            axes[0].bar(range(len(stalls)), [number(row, "stall_s") for row in stalls], color=colours)
            axes[0].axhline(GOAL_S, color="black", linestyle="--", linewidth=1)
            models = [str(row["model"]).replace("-", "\n") for row in stalls]
            labels = [f"{model}\n{row['workers']} -> {row['then']}" for model, row in zip(models, stalls)]
            axes[0].set_xticks(range(len(stalls)), labels, fontsize=8)
            axes[0].set(ylabel="seconds without a step, beyond one step")
            title = "blue: resized; red: a worker killed\n(goal: dashed; of a pipeline 10 s)"
            axes[0].set_title(title, fontsize=8)
        if paces:
            axes[-1].bar(range(len(paces)), [number(row, "step_s") for row in paces], color="tab:green")
            labels = [textwrap.fill(str(row["case"]).partition(": ")[2], 12) for row in paces]
            axes[-1].set_xticks(range(len(paces)), labels, fontsize=8)
            axes[-1].set(ylabel="seconds a step")
            axes[-1].set_title("a pipeline with\na slow worker", fontsize=8)
