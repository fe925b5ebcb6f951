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

from plait.core import events
from plait.core.files import write_picture
from plait.core.run_events import Step, WorkersChanged
from plait.launch.control import ask_job
from plait.launch.display import WorkerState
from plait.launch.run_dir import RunDir
from plait_bench.adapt import pipelines
from plait_bench.adapt.driver import Act, Driver, KillWorker
from plait_bench.harness import Bench, BenchClaim, Row

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


PARTS = {
    "workers": "resizes, a worker that is killed, and the policy that chooses the number of workers",
    "pipelines": "a pipeline that loses a worker, and one in which a worker becomes slower",
}


def run(
    parts: Sequence[str] = tuple(PARTS), command: str = "plait bench elastic", quick: bool = False
) -> Bench:
    """Change jobs while they run, beside jobs that stay as they are; the quick course is that of workers."""
    rows: list[Row] = []
    claims: list[BenchClaim] = []
    if "workers" in parts:
        more_rows, more_claims = _workers(quick)
        rows, claims = rows + more_rows, claims + more_claims
    if "pipelines" in parts and not (quick and "workers" in parts):
        changed = pipelines.lost_rows() + pipelines.slow_rows()
        rows, claims = rows + changed, claims + pipelines.claims(changed)
    return Bench("elastic", command, tuple(_without_curves(rows)), tuple(claims))


def _workers(quick: bool) -> tuple[list[Row], list[BenchClaim]]:
    """Resize jobs while they run and lose a worker of one; beside them, a run of fixed size."""
    rows: list[Row] = []
    claims: list[BenchClaim] = []
    # Joiners take a while on a busy machine, and all changes must come before the end.
    steps = (2 if quick else 4) * QUIET_STEPS * (len(SIZES) + 1)
    for name in ("mlp",) if quick else ("mlp", "mlp-3-million"):
        rows += _resized(name, steps)
        claims += _stall_claims(name, rows)
        if name == "mlp":
            rows.append(_fixed_row(name, steps))
            claims.append(_loss_claim(rows))
    rows += _lost("mlp")
    claims.append(_loss_of_worker_claim(rows))
    rows += _chosen_by_policy()
    claims.append(_policy_claim(rows))
    return rows, claims


def _without_curves(rows: Sequence[Row]) -> list[Row]:
    return [{key: value for key, value in row.items() if key != "curve"} for row in rows]


def _job(name: str, folder: str, parallel: Mapping[str, Any], steps: int) -> dict[str, Any]:
    return {
        "name": NAME,
        **MODELS[name],
        "data": {"kind": "digits", "batch_size": BATCH},
        "optimizer": {"kind": "sgd", "lr": 0.02, "momentum": 0.9},
        "steps": steps,
        "device": "cpu",
        "log_every_steps": 1,
        "checkpoint": {"every_steps": 1_000_000},
        "parallel": {"threads": 1, "jitter": [1.0, STEP_S], **parallel},
        "run_dir": folder,
    }


def _ask(workers: int) -> Act:
    def ask(folder: RunDir, _: tuple[WorkerState, ...]) -> None:
        ask_job(folder, {"workers": workers, "why": f"at {time.time():.6f}"})

    return ask


def _resized(name: str, steps: int) -> list[Row]:
    """A row for each change of a job that is resized while it runs."""
    parallel = {"workers": SIZES[0], "elastic": True, "max_workers": max(SIZES)}
    recorded = _trained(name, parallel, steps, [_ask(size) for size in SIZES[1:]])
    return _change_rows("resize", name, recorded)


def _lost(name: str) -> list[Row]:
    """A row for the loss of the worker that keeps the record, and one for the worker in its place."""
    parallel = {"workers": 3, "elastic": True, "max_workers": 3}
    kill = KillWorker(0)
    recorded = _trained(name, parallel, 8 * QUIET_STEPS, [kill])
    # What the worker that was killed recorded last may not have reached its file.
    return _change_rows("kill -9 of worker 0", name, recorded, kill.at)


class KnownScaling(nn.Module):
    """A model that takes the time of a job whose best number of workers is known, whatever the machine."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            workers = dist.get_world_size() if dist.is_initialized() else 1
            time.sleep(SAMPLE_S * len(x) + WORKER_S * workers)
        found: torch.Tensor = self.layer(x.flatten(1))
        return found


def best_workers() -> int:
    """The number of workers after which one more adds less than the policy asks for."""
    rates = [1 / (SAMPLE_S * BATCH / n + WORKER_S * n) for n in range(1, MOST_WORKERS + 1)]
    return next((n for n in range(1, MOST_WORKERS) if rates[n] < (1 + GAIN) * rates[n - 1]), MOST_WORKERS)


def _chosen_by_policy() -> list[Row]:
    """A row for each number of workers that the policy tries."""
    parallel = {"workers": 1, "elastic": True, "max_workers": MOST_WORKERS, "jitter": [0.0, 0.0]}
    policy = {"kind": "workers", "most": MOST_WORKERS, "gain": GAIN, "window": 8}
    return _change_rows(
        "policy", "known-scaling", _trained("known-scaling", parallel, 160, [], adapt=[policy])
    )


def _policy_claim(rows: Sequence[Row]) -> BenchClaim:
    tried = [int(row["then"] or 0) for row in rows if row["case"] == "policy"]
    best = best_workers()
    words = "the number of workers that the policy comes to, for a job whose scaling is known"
    last = tried[-1] if tried else None
    holds = last == best and max(tried) == best + 1
    return BenchClaim(words, last, f"{best}, after {best + 1} were tried", holds)


def _trained(
    name: str, parallel: Mapping[str, Any], steps: int, acts: Sequence[Callable[..., None]], **more: Any
) -> list[events.Recorded]:
    """What was recorded of a run, by whichever worker, in the order of time."""
    from plait.jobs.train import train  # reads job files

    with tempfile.TemporaryDirectory() as folder:
        made = train(
            _job(name, folder, parallel, steps) | more, display=Driver(NAME, acts, Path(folder), QUIET_STEPS)
        )
        files = sorted(Path(made.run).glob("events/*.jsonl"))
        found = [line for path in files for line in events.read(path)]
    return sorted(found, key=lambda line: line.t)


def _change_rows(
    case: str, name: str, recorded: Sequence[events.Recorded], since: float | None = None
) -> list[Row]:
    """How long each change held up the steps, beyond the time of a step; the first one from `since` on."""
    rows: list[Row] = []
    for index, line in enumerate(recorded):
        event = line.event
        if isinstance(event, WorkersChanged):
            last = [each for each in recorded[:index] if isinstance(each.event, Step)]
            first = next(each for each in recorded[index:] if isinstance(each.event, Step))
            ahead = [each for each in recorded[index:] if isinstance(each.event, Step)][1 : QUIET_STEPS // 2]
            # Two steps in a row that a worker records end one step apart.
            step_s = statistics.median(b.t - a.t for a, b in itertools.pairwise(ahead))
            began = since if since is not None and not rows else last[-1].t
            gap_s = first.t - began
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
    losses = {line.event.step: line.event.loss for line in recorded if isinstance(line.event, Step)}
    if rows:
        rows[0]["curve"] = " ".join(f"{losses[step]!r}" for step in sorted(losses))
    return rows


def _asked_before_s(event: WorkersChanged, at: float) -> float | None:
    """Seconds from the request to the change, while steps went on."""
    word, _, moment = event.why.partition("at ")
    return round(at - float(moment), 3) if not word and moment else None


def _fixed_row(name: str, steps: int) -> Row:
    """The same job on two workers throughout."""
    recorded = _trained(name, {"workers": 2, "jitter": [0.0, 0.0]}, steps, [])
    losses = {line.event.step: line.event.loss for line in recorded if isinstance(line.event, Step)}
    curve = " ".join(f"{losses[step]!r}" for step in sorted(losses))
    return {"case": "fixed size", "model": name, "workers": 2, "then": 2, "curve": curve}


def _stall_claims(name: str, rows: Sequence[Row]) -> list[BenchClaim]:
    stalls = [
        float(row["stall_s"] or 0.0) for row in rows if row["case"] == "resize" and row["model"] == name
    ]
    done = len(stalls) == len(SIZES) - 1
    words = f"{name}: the longest stall of workers that stay, over {' -> '.join(map(str, SIZES))}, s"
    worst = max(stalls, default=None)
    return [
        BenchClaim(
            words,
            worst,
            f"at most {GOAL_S:g}, each change made",
            done and worst is not None and worst <= GOAL_S,
        )
    ]


def _loss_claim(rows: Sequence[Row]) -> BenchClaim:
    resized, fixed = (_curve(rows, case) for case in ("resize", "fixed size"))
    same_steps = bool(fixed) and len(resized) == len(fixed)
    apart = max((abs(a - b) for a, b in zip(resized, fixed)), default=None)
    words = "the largest difference of a step's loss from the run of fixed size (float64)"
    holds = same_steps and apart is not None and apart <= LOSS_GOAL
    return BenchClaim(words, apart, f"at most {LOSS_GOAL:g}, over all steps", holds)


def _curve(rows: Sequence[Row], case: str) -> list[float]:
    found = next(str(row["curve"]) for row in rows if row["case"] == case and "curve" in row)
    return [float(value) for value in found.split()]


def _loss_of_worker_claim(rows: Sequence[Row]) -> BenchClaim:
    stalls = [float(row["stall_s"] or 0.0) for row in rows if str(row["case"]).startswith("kill")]
    words = "from kill -9 of the worker that keeps the record to the next step of the others, s"
    value = stalls[0] if stalls else None
    goal = f"at most {GOAL_S:g} beyond a step, and another takes its place"
    return BenchClaim(words, value, goal, len(stalls) == 2 and stalls[0] <= GOAL_S)


def write_plot(bench: Bench, path: Path) -> None:
    """The stall of each change of workers, and the pace of a pipeline with a slow worker under each plan."""
    import matplotlib  # loaded only where a picture is asked for

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    stalls = [row for row in bench.rows if "stall_s" in row]
    paces = [row for row in bench.rows if "stall_s" not in row and "step_s" in row]
    counts = [count for count in (len(stalls), len(paces)) if count]
    size = (1.5 + 0.9 * sum(counts) + len(counts), 4.0)
    figure, drawn = plt.subplots(1, len(counts), figsize=size, width_ratios=counts, squeeze=False)
    axes = iter(drawn[0])
    if stalls:
        axis = next(axes)
        lost = ["kill" in str(row["case"]) or "loses" in str(row["case"]) for row in stalls]
        colours = ["tab:red" if is_lost else "tab:blue" for is_lost in lost]
        axis.bar(range(len(stalls)), [float(row["stall_s"] or 0.0) for row in stalls], color=colours)
        axis.axhline(GOAL_S, color="black", linestyle="--", linewidth=1)
        labels = [f"{row['model']}\n{row['workers']} -> {row['then']}" for row in stalls]
        axis.set_xticks(range(len(stalls)), labels, fontsize=6)
        axis.set(ylabel="seconds without a step, beyond one step")
        axis.set_title("blue: resized; red: a worker killed\n(goal: dashed; of a pipeline 10 s)", fontsize=8)
    if paces:
        axis = next(axes)
        axis.bar(range(len(paces)), [float(row["step_s"] or 0.0) for row in paces], color="tab:green")
        labels = [textwrap.fill(str(row["case"]).partition(": ")[2], 12) for row in paces]
        axis.set_xticks(range(len(paces)), labels, fontsize=6)
        axis.set(ylabel="seconds a step")
        axis.set_title("a pipeline with\na slow worker", fontsize=8)
    figure.tight_layout()
    write_picture(path, figure, dpi=120)
    plt.close(figure)
