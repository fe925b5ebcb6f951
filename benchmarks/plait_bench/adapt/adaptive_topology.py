"""Adaptive topology: runs over four hosts whose star's root gets a slow link in mid-run.

The same job with the policy and without it, in turn, several times.

Steps sleep instead of computing, so that eight workers need no processors; the sums are real, over real links
that tc shapes. When the link is free again, the adaptive run must find its way back to the star.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from torch import nn

from plait.core import events
from plait.core.run_events import Changed, Signals, Step
from plait.launcher.run_dir import RunDir
from plait.launcher.worker_process import Worker
from plait.schema.settings import (
    DataSettings,
    ModelSettings,
    OptimizerSettings,
    PolicySettings,
    TrainSettings,
)
from plait.schema.topology_spec import TopologySpec
from plait_bench.adapt.same_workers import train_on_same_workers
from plait_bench.harness import (
    Bench,
    BenchClaim,
    Row,
    at_least,
    at_most,
    in_world,
    number,
    of_repeats,
    of_runs,
    say,
)
from plait_bench.pictures import curve, picture
from plait_bench.sleeping import Sleeping
from plait_bench.sync.shaped_hosts import BridgedHosts, bridged_hosts, missing_for_shaping

HOSTS = ("w0", "w1", "w2", "w3")
RATE = "600mbit"
STEP_S = 0.22
FEATURES = 512
BATCH = 16
WORKERS_A_HOST = 2
# The star sends twelve times the gradients over its root's link; these, two, two and four times.
KINDS = ("adaptive", "fixed")
CANDIDATES = ["binary-tree-star:2", "tree:2", "star:2"]


def sleeping_linear() -> nn.Module:
    """A linear layer whose training steps sleep."""
    return Sleeping(nn.Linear(FEATURES, FEATURES), STEP_S)


@dataclass(frozen=True)
class Course:
    """When the link is slow: from step `slow` to step `free` of a run of `steps` steps.

    The policy knows a topology from `window` steps.
    """

    slow: int
    free: int
    steps: int
    window: int = 10


FULL = Course(40, 120, 260)
QUICK = Course(8, 24, 36, window=6)
REPEATS, QUICK_REPEATS = 3, 2


@dataclass(frozen=True)
class RecordedRun:
    """One run: its events, and the seconds since the epoch at which the link became slow and free."""

    adaptive: bool
    log: tuple[events.Recorded, ...]
    slow_t: float
    free_t: float


def run(quick: bool = False, command: str = "plait bench adaptive-topology") -> Bench:
    """Train with and without the policy; `quick` takes fewer steps and repeats."""
    course, repeats = (QUICK, QUICK_REPEATS) if quick else (FULL, REPEATS)
    reason = missing_for_shaping()
    if reason is not None:
        claim = BenchClaim("four hosts, one with a slow link", None, "four network namespaces", False, reason)
        return Bench("adaptive-topology", command, [], [claim])
    # The run that stays as it is need not see the link's end.
    stays = replace(course, free=course.slow + 10, steps=course.slow + 12)
    courses = dict(zip(KINDS, (course, stays)))
    runs = _record({f"{kind}-{n}": courses[kind] for n in range(repeats) for kind in KINDS})
    rows = [row for each in runs for row in _rows(each)]
    rows = of_repeats(rows, ("run", "step"), ("step_s", "samples_per_s"))
    return Bench("adaptive-topology", command, rows, claims_of(runs))


def _settings(adaptive: bool, course: Course) -> TrainSettings:
    # The way back is tried soon after the links are free, in a run that is short.
    retry = (course.free - course.slow) // 2 + 6
    policy = PolicySettings(
        "topology", {"candidates": CANDIDATES, "retry_steps": retry, "window": course.window}
    )
    shapes = {"shape": [FEATURES], "target_shape": [FEATURES], "samples": 64}
    return TrainSettings(
        name="adaptive-topology",
        model=ModelSettings(f"{__name__}:sleeping_linear"),
        data=DataSettings("synthetic", BATCH, shapes),
        loss="mse",
        optimizer=OptimizerSettings("sgd", {"lr": 0.01}),
        steps=course.steps,
        log_every_steps=1,
        monitor=("link-throughput",),
        adapt=(policy,) if adaptive else (),
        topology=TopologySpec("star"),
    )


def train_all(worker: Worker, courses: dict[str, dict[str, int]], folder: str) -> None:
    """Be one of the workers of all runs."""
    for name, course in courses.items():
        if worker.rank == 0:
            say(f"adaptive-topology, run {name}: {course['steps']} steps")
        settings = _settings(name.startswith("adaptive"), Course(**course))
        train_on_same_workers(worker, name, settings, Path(folder) / name)


def _record(courses: dict[str, Course]) -> list[RecordedRun]:
    """Run each, and shape the link of the star's root when it has come to the steps of its course."""
    with tempfile.TemporaryDirectory() as folder, bridged_hosts(HOSTS) as hosts:
        shaper = _Shaper(hosts, Path(folder), courses)
        asked = {"courses": {name: asdict(each) for name, each in courses.items()}, "folder": folder}
        shaper.start()
        try:
            in_world(hosts.placement(WORKERS_A_HOST), train_all, asked, joined=False)
        finally:
            shaper.end()
        runs = []
        for name, times in shaper.times.items():
            log = tuple(events.read(RunDir(Path(folder) / name).events()))
            runs.append(RecordedRun(name.startswith("adaptive"), log, *times))
        return runs


class _Shaper(threading.Thread):
    """Slows and frees the link of the first host at the steps of each course, by the runs' records."""

    def __init__(self, hosts: BridgedHosts, folder: Path, courses: dict[str, Course]) -> None:
        super().__init__(daemon=True)
        self._hosts, self._folder, self._courses = hosts, folder, courses
        self._over = threading.Event()
        # When the link became slow and free in each run.
        self.times: dict[str, tuple[float, float]] = {}

    def run(self) -> None:
        for name, course in self._courses.items():
            path = RunDir(self._folder / name).events()
            if not self._wait_for(path, course.slow):
                return
            self._hosts.shape(HOSTS[0], RATE)
            slow_t = time.time()
            self._wait_for(path, course.free)
            self._hosts.free(HOSTS[0])
            self.times[name] = slow_t, time.time()

    def _wait_for(self, path: Path, step: int) -> bool:
        while not self._over.wait(0.1):
            if path.exists() and path.read_bytes().count(b'"kind":"step"') >= step:
                return True
        return False

    def end(self) -> None:
        self._over.set()
        self.join()


def _rows(recorded: RecordedRun) -> list[Row]:
    """A row for each step that was timed."""
    topologies = _topologies(recorded)
    return [
        {
            "run": KINDS[0] if recorded.adaptive else KINDS[1],
            "step": step,
            "step_s": seconds,
            "samples_per_s": BATCH / seconds,
            "link": "slow" if recorded.slow_t <= t < recorded.free_t else "free",
            "topology": topologies.get(step, "star"),
        }
        for step, t, seconds in _steps(recorded)
    ]


def _steps(recorded: RecordedRun) -> list[tuple[int, float, float]]:
    """Each step with when it ended and how long it took, without the first."""
    found = [(r.event.step, r.t, r.event.seconds) for r in recorded.log if isinstance(r.event, Step)]
    return found[1:]


def _topologies(recorded: RecordedRun) -> dict[int, str]:
    return {r.event.step: r.event.topology for r in recorded.log if isinstance(r.event, Signals)}


def _rate(steps: Sequence[tuple[int, float, float]]) -> float:
    return BATCH / statistics.median(seconds for _, _, seconds in steps)


def claims_of(runs: Sequence[RecordedRun]) -> list[BenchClaim]:
    adaptive = [run for run in runs if run.adaptive]
    again = [_slow_rate(run, 10, 18) for run in adaptive]
    down = [_slow_rate(run, 2, None) for run in runs if not run.adaptive]
    free = [_free_topologies(run) for run in adaptive]
    back = ", ".join(str(names.index("star")) if "star" in names else "no" for names in free)
    at_end = sum(names[-1:] == ["star"] for names in free)
    after = f"runs back on the star at the end (after {back} steps of a free link)"
    return [
        of_runs(at_most, "steps from the slow link to the first change", map(_waited, adaptive), 5),
        of_runs(at_least, "throughput from the tenth slow step on, over that before", again, 0.9),
        of_runs(at_most, "the same without adaptation: it stays down", down, 0.8),
        BenchClaim(
            after,
            at_end,
            f"all {len(adaptive)}",
            at_end == len(adaptive),
            "the runs differ" if 0 < at_end < len(adaptive) else "",
        ),
    ]


def _slow_steps(run: RecordedRun) -> list[tuple[int, float, float]]:
    return [step for step in _steps(run) if run.slow_t <= step[1] < run.free_t]


def _slow_rate(run: RecordedRun, first: int, end: int | None) -> float:
    """Throughput of these steps of a slow link, over that before it, without the first five steps."""
    before = [step for step in _steps(run) if step[1] < run.slow_t][5:]
    return _rate(_slow_steps(run)[first:end]) / _rate(before)


def _waited(run: RecordedRun) -> float | None:
    """The number of slow steps up to the first change."""
    changes = (line.event.step for line in run.log if isinstance(line.event, Changed) and line.t > run.slow_t)
    first = next(changes, None)
    return None if first is None else float(first - _slow_steps(run)[0][0] + 1)


def _free_topologies(run: RecordedRun) -> list[str]:
    """The topology of each step after the link was freed."""
    topologies = _topologies(run)
    return [topologies[step] for step, t, _ in _steps(run) if t > run.free_t and step in topologies]


def write_plot(bench: Bench, path: Path) -> None:
    """Throughput by step, with and without adaptation, and when the link was slow."""
    with picture(bench, path, (10, 4)) as (axis,):
        for name, colour in zip(KINDS, ("C0", "C1")):
            own = [row for row in bench.rows if row["run"] == name]
            curve(axis, own, "step", "samples_per_s", name, colour, marker="")
            slow = [number(row, "step") for row in own if row["link"] == "slow"]
            if slow:
                axis.axvspan(min(slow), max(slow), alpha=0.12, color=colour, label=f"slow link ({name})")
        own = [row for row in bench.rows if row["run"] == "adaptive"]
        for before, row in itertools.pairwise(own):
            if before["topology"] != row["topology"]:
                step = number(row, "step")
                axis.axvline(step, color="grey", linewidth=0.8)
                axis.text(step, axis.get_ylim()[1], str(row["topology"]), rotation=60, fontsize=7)
        axis.set(xlabel="step", ylabel="samples/s")
        axis.set_ylim(bottom=0)
        axis.legend(fontsize=8, loc="lower right")
