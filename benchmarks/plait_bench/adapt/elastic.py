"""Workers that come and go: how long a change holds up those that stay, and whether it changes the loss."""

from __future__ import annotations

import itertools
import statistics
import tempfile
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from plait.core.events import Recorded
from plait.core.run_events import Step, WorkersChanged
from plait.core.units import count_of
from plait.launcher.control import ask_job
from plait.launcher.display import WorkerState
from plait.launcher.run_dir import RunDir
from plait_bench.adapt import pipelines
from plait_bench.adapt.driver import Act, KillWorker, apart, job, losses, stop, trained
from plait_bench.harness import (
    Bench,
    BenchClaim,
    Found,
    Row,
    at_most,
    ends_of,
    number,
    of_repeats,
    run_parts,
    say,
)
from plait_bench.pictures import draw_spread, picture
from plait_bench.sleeping import Sleeping

SIZES = (2, 3, 4, 2, 1, 3)
GOAL_S = 0.5
LOSS_GOAL = 1e-9
NAME = "elastic"
# More than any run takes: it is stopped after its last change, however long joiners took to start.
MOST_STEPS = 4000
# So that a change meets a job in the middle of its steps, also on few cores.
STEP_S = 0.02

# A job whose scaling is known: a step takes so long for each sample of a worker, and for each worker.
SAMPLE_S = 0.004
WORKER_S = 0.008
BATCH = 48
MOST_WORKERS = 5
GAIN = 0.15
# Where its steps take this many times what they sleep, the machine does too much else.
BUSY = 1.25


@dataclass(frozen=True)
class Course:
    """How often everything is done, and how many steps pass between a change and the next request.

    From these steps the time of a step is known. A policy starts from a number of workers, and must stay with
    the one that it comes to for several steps.
    """

    models: tuple[str, ...]
    repeats: int
    quiet_steps: int
    policy_from: int
    policy_stays: int


FULL = Course(("mlp", "mlp-3-million"), 3, 20, 1, 30)
QUICK = Course(("mlp",), 2, 10, 2, 10)

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
    known = {**PARTS, "workers": lambda: run_workers(QUICK if quick else FULL)}
    return run_parts("elastic", command, parts, known)


def run_workers(course: Course = FULL) -> Found:
    """Resizes, workers that are killed, and the policy that chooses the number of workers.

    A job goes through all sizes several times and loses several workers; each policy has a job of its own.
    """
    rows: list[Row] = []
    claims: list[BenchClaim] = []
    for name in course.models:
        resized = _resized(name, course)
        changes = _change_rows("resize", name, resized)
        rows += changes
        claims.append(_stall_claim(name, changes, course.repeats))
        if name == "mlp":
            still = {"workers": SIZES[0], "jitter": [0.0, 0.0]}
            fixed = _trained(name, still, course.quiet_steps, steps=max(losses(resized)))
            rows.append({"case": "fixed size", "model": name, "workers": 2, "then": 2})
            words = "the largest difference of a step's loss from the run of fixed size (float64)"
            claims.append(at_most(words, apart(resized, fixed), LOSS_GOAL, ", over all steps"))
    lost = _lost("mlp", course)
    tried = [_chosen_by_policy(course) for _ in range(course.repeats)]
    case = ("case", "model", "workers", "then")
    measured = ("step_s", "stall_s", "switch_s", "asked_before_s")
    return (
        of_repeats([*rows, *lost, *itertools.chain(*tried)], case, measured),
        [*claims, _loss_of_worker_claim(lost, course.repeats), _policy_claim(tried)],
    )


def _resized(name: str, course: Course) -> list[Recorded]:
    parallel = {"workers": SIZES[0], "elastic": True, "max_workers": max(SIZES)}
    sizes = (SIZES * course.repeats)[1:]
    acts = [*((n, _ask(size)) for n, size in enumerate(sizes)), (len(sizes), stop)]
    return _trained(name, parallel, course.quiet_steps, acts)


PARTS: Mapping[str, Callable[[], Found]] = {"workers": run_workers, "pipelines": pipelines.run}


def _ask(workers: int) -> Act:
    def ask(folder: RunDir, _: tuple[WorkerState, ...]) -> None:
        ask_job(folder, {"workers": workers, "why": f"at {time.time():.6f}"})

    return ask


def _lost(name: str, course: Course) -> list[Row]:
    """A row for each loss of the worker that keeps the record, and one for each worker in its place."""
    kills = [KillWorker(0) for _ in range(course.repeats)]
    acts: list[tuple[int, Act]] = [(2 * n, kill) for n, kill in enumerate(kills)]
    parallel = {"workers": 3, "elastic": True, "max_workers": 3}
    recorded = _trained(name, parallel, course.quiet_steps, [*acts, (2 * course.repeats, stop)])
    return _change_rows("kill -9 of worker 0", name, recorded, [kill.at for kill in kills])


class KnownScaling(Sleeping):
    """A model that takes the time of a job whose best number of workers is known, whatever the machine."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))

    def forward_s(self, x: torch.Tensor) -> float:
        workers = dist.get_world_size() if dist.is_initialized() else 1
        return SAMPLE_S * len(x) + WORKER_S * workers


def known_s(workers: int) -> float:
    """What a step of the job whose scaling is known sleeps."""
    return SAMPLE_S * BATCH / workers + WORKER_S * workers


def best_workers() -> int:
    """The number of workers after which one more adds less than the policy asks for."""
    rates = [1 / known_s(n) for n in range(1, MOST_WORKERS + 1)]
    return next((n for n in range(1, MOST_WORKERS) if rates[n] < (1 + GAIN) * rates[n - 1]), MOST_WORKERS)


def _chosen_by_policy(course: Course) -> list[Row]:
    """A row for each number of workers that the policy tries."""
    first = course.policy_from
    parallel = {"workers": first, "elastic": True, "max_workers": MOST_WORKERS, "jitter": [0.0, 0.0]}
    policy = {"kind": "workers", "most": MOST_WORKERS, "gain": GAIN, "window": 8}
    acts = [(best_workers() + 2 - first, stop)]
    found = _trained("known-scaling", parallel, course.policy_stays, acts, steps=200, adapt=[policy])
    return _change_rows("policy", "known-scaling", found)


def _policy_claim(runs: Sequence[Sequence[Row]]) -> BenchClaim:
    tried = [[int(number(row, "then")) for row in rows] or [0] for rows in runs]
    best = best_workers()
    words = "the number of workers that the policy comes to, for a job whose scaling is known"
    # The furthest off of all runs.
    last = max((sizes[-1] for sizes in tried), key=lambda workers: abs(workers - best))
    good = sum(sizes[-1] == best and max(sizes) == best + 1 for sizes in tried)
    goal = f"{best}, after {best + 1} were tried, in each of {len(runs)} runs"
    slower = max(
        (number(row, "step_s") / known_s(int(number(row, "then"))) for row in itertools.chain(*runs)),
        default=0,
    )
    busy = f"steps took up to {slower:.2f} times what they sleep, so their scaling is not the known one"
    unresolved = busy if good < len(runs) and slower > BUSY else ""
    return BenchClaim(words, last, goal, good == len(runs), unresolved)


def _trained(
    name: str,
    parallel: Mapping[str, Any],
    quiet_steps: int,
    acts: Sequence[tuple[int, Act]] = (),
    steps: int = MOST_STEPS,
    **more: Any,
) -> list[Recorded]:
    model = {**MODELS[name], "data": {"kind": "digits", "batch_size": BATCH}, "steps": steps}
    with tempfile.TemporaryDirectory() as folder:
        jittered = {"jitter": [1.0, STEP_S], **parallel}
        changes = count_of(acts[-1][0] if acts else 0, "change")
        say(f"elastic, {name} from {count_of(parallel['workers'], 'worker')} on, {changes}")
        asked = job(NAME, folder, jittered, checkpoint={"every_steps": 1_000_000}, **model, **more)
        return trained(asked, acts, quiet_steps)[1]


def _change_rows(
    case: str, name: str, recorded: Sequence[Recorded], kills: Sequence[float | None] = ()
) -> list[Row]:
    """How long each change held up the steps, beyond the time of a step; losses from these `kills` on."""
    rows: list[Row] = []
    # What a worker that was killed recorded last may not have reached its file.
    killed = iter(kills)
    for index, line in enumerate(recorded):
        event = line.event
        if isinstance(event, WorkersChanged):
            before = [each.t for each in recorded[:index] if isinstance(each.event, Step)]
            after = [each.t for each in recorded[index:] if isinstance(each.event, Step)]
            # Two steps in a row that a worker records end one step apart.
            step_s = statistics.median(b - a for a, b in itertools.pairwise(after[1 : FULL.quiet_steps // 2]))
            since = next(killed, None) if event.lost else None
            gap_s = after[0] - (before[-1] if since is None else since)
            rows.append(
                {
                    "case": case,
                    "model": name,
                    "workers": len(event.members) - len(event.joined) + len(event.left) + len(event.lost),
                    "then": len(event.members),
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


def _stall_claim(name: str, changes: Sequence[Row], repeats: int) -> BenchClaim:
    sizes = f"{' -> '.join(map(str, SIZES))}, {repeats} times"
    is_whole = len(changes) == len(SIZES) * repeats - 1
    words = f"{name}: the longest stall of workers that stay, over {sizes}, s"
    return _longest_claim(words, changes, ", each change made", is_whole)


def _longest_claim(words: str, changes: Sequence[Row], more: str, is_whole: bool) -> BenchClaim:
    """No stall is longer than the goal; it is not resolved where a repeat of the longest is not."""
    merged = of_repeats(changes, ("workers", "then"), ("stall_s",))
    ends = max((ends_of(row, "stall_s") for row in merged), key=lambda ends: ends[1], default=None)
    return at_most(words, ends and ends[1], GOAL_S, more, is_whole, ends if is_whole else None)


def _loss_of_worker_claim(changes: Sequence[Row], repeats: int) -> BenchClaim:
    words = f"the longest of {repeats} from kill -9 of the worker that keeps the record to the next step, s"
    losses = [row for row in changes if row["why"]]
    is_whole = len(losses) == repeats and len(changes) == 2 * repeats
    return _longest_claim(words, losses, " beyond a step, and another takes its place", is_whole)


def write_plot(bench: Bench, path: Path) -> None:
    """The stall of each change of workers, and the pace of a pipeline with a slow worker under each plan."""
    stalls = [row for row in bench.rows if "stall_s" in row]
    paces = [row for row in bench.rows if ": " in str(row["case"])]
    counts = [count for count in (len(stalls), len(paces)) if count]
    size = (1.5 + 0.9 * sum(counts) + len(counts), 4.0)
    with picture(bench, path, size, across=len(counts), width_ratios=counts) as axes:
        if stalls:
            for case in dict.fromkeys(str(row["case"]) for row in stalls):
                own = {at: row for at, row in enumerate(stalls) if row["case"] == case}
                axes[0].bar(list(own), [number(row, "stall_s") for row in own.values()], label=case)
            draw_spread(axes[0], range(len(stalls)), stalls, "stall_s", "0.2")
            axes[0].axhline(
                GOAL_S, color="black", linestyle="--", linewidth=1, label="goal (of a pipeline 10 s)"
            )
            models = [str(row["model"]).replace("-", "\n") for row in stalls]
            labels = [f"{model}\n{row['workers']} -> {row['then']}" for model, row in zip(models, stalls)]
            axes[0].set_xticks(range(len(stalls)), labels, fontsize=8)
            axes[0].set(xlabel="change of workers", ylabel="seconds without a step,\nbeyond one step")
            axes[0].legend(fontsize=8)
        if paces:
            axes[-1].bar(range(len(paces)), [number(row, "step_s") for row in paces], color="tab:green")
            draw_spread(axes[-1], range(len(paces)), paces, "step_s", "0.2")
            labels = [textwrap.fill(str(row["case"]).partition(": ")[2], 12) for row in paces]
            axes[-1].set_xticks(range(len(paces)), labels, fontsize=8)
            axes[-1].set(ylabel="seconds a step")
            axes[-1].set_title("a pipeline with\na slow worker", fontsize=8)
