"""Adaptive topology: runs over four hosts whose star's root gets a slow link in mid-run.

The same job with the policy and without it.

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
from dataclasses import asdict, dataclass
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
from plait_bench.harness import Bench, BenchClaim, Row, at_least, at_most, in_world, number, picture
from plait_bench.sleeping import Sleeping
from plait_bench.sync.shaped_hosts import BridgedHosts, bridged_hosts, missing_for_shaping

HOSTS = ("w0", "w1", "w2", "w3")
RATE = "600mbit"
STEP_S = 0.22
FEATURES = 512
BATCH = 16
WORKERS_A_HOST = 2
# The star sends twelve times the gradients over its root's link; these, two, two and four times.
CANDIDATES = ["binary-tree-star:2", "tree:2", "star:2"]


def sleeping_linear() -> nn.Module:
    """A linear layer whose training steps sleep."""
    return Sleeping(nn.Linear(FEATURES, FEATURES), STEP_S)


@dataclass(frozen=True)
class Course:
    """When the link is slow: from step `slow` to step `free` of a run of `steps` steps."""

    slow: int
    free: int
    steps: int


FULL = Course(40, 120, 260)
QUICK = Course(16, 36, 58)


@dataclass(frozen=True)
class RecordedRun:
    """One run: its events, and the seconds since the epoch at which the link became slow and free."""

    adaptive: bool
    log: tuple[events.Recorded, ...]
    slow_t: float
    free_t: float


def run(quick: bool = False, command: str = "plait bench adaptive-topology") -> Bench:
    """Train with and without the policy; `quick` takes fewer steps."""
    course = QUICK if quick else FULL
    reason = missing_for_shaping()
    if reason is not None:
        claim = BenchClaim(f"four hosts: {reason}", None, "four network namespaces", False)
        return Bench("adaptive-topology", command, [], [claim])
    # The run that stays as it is need not see the link's end.
    courses = {"adaptive": course, "fixed": Course(course.slow, course.slow + 13, course.slow + 15)}
    recorded = _record(courses)
    rows = [row for each in recorded for row in _rows(each)]
    return Bench("adaptive-topology", command, rows, claims_of(*recorded))


def _settings(adaptive: bool, course: Course) -> TrainSettings:
    # The way back is tried soon after the links are free, in a run that is short.
    retry = (course.free - course.slow) // 2 + 4
    policy = PolicySettings("topology", {"candidates": CANDIDATES, "retry_steps": retry})
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


def train_both(worker: Worker, courses: dict[str, dict[str, int]], folder: str) -> None:
    """Be one of the workers of both runs."""
    for name, course in courses.items():
        train_on_same_workers(
            worker, name, _settings(name == "adaptive", Course(**course)), Path(folder) / name
        )


def _record(courses: dict[str, Course]) -> list[RecordedRun]:
    """Run each, and shape the link of the star's root when it has come to the steps of its course."""
    with tempfile.TemporaryDirectory() as folder, bridged_hosts(HOSTS) as hosts:
        shaper = _Shaper(hosts, Path(folder), courses)
        asked = {"courses": {name: asdict(each) for name, each in courses.items()}, "folder": folder}
        shaper.start()
        try:
            in_world(hosts.placement(WORKERS_A_HOST), train_both, asked, joined=False)
        finally:
            shaper.end()
        return [
            RecordedRun(name == "adaptive", tuple(events.read(RunDir(Path(folder) / name).events())), *times)
            for name, times in shaper.times.items()
        ]


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
        while not self._over.wait(0.05):
            if path.exists() and _last_step(path) >= step:
                return True
        return False

    def end(self) -> None:
        self._over.set()
        self.join()


def _last_step(path: Path) -> int:
    return max((r.event.step for r in events.read(path) if isinstance(r.event, Step)), default=0)


def _rows(recorded: RecordedRun) -> list[Row]:
    """A row for each step that was timed."""
    rows: list[Row] = []
    for step, t, seconds in _steps(recorded):
        link = "slow" if recorded.slow_t <= t < recorded.free_t else "free"
        rows.append(
            {
                "run": "adaptive" if recorded.adaptive else "fixed",
                "step": step,
                "step_s": seconds,
                "samples_per_s": BATCH / seconds,
                "link": link,
                "topology": _topologies(recorded).get(step, "star"),
            }
        )
    return rows


def _steps(recorded: RecordedRun) -> list[tuple[int, float, float]]:
    """Each step with when it ended and how long it took, without the first."""
    found = [(r.event.step, r.t, r.event.seconds) for r in recorded.log if isinstance(r.event, Step)]
    return found[1:]


def _topologies(recorded: RecordedRun) -> dict[int, str]:
    return {r.event.step: r.event.topology for r in recorded.log if isinstance(r.event, Signals)}


def _rate(steps: Sequence[tuple[int, float, float]]) -> float:
    return BATCH / statistics.median(seconds for _, _, seconds in steps)


def claims_of(adaptive: RecordedRun, fixed: RecordedRun) -> list[BenchClaim]:
    steps = _steps(adaptive)
    before = _rate([s for s in steps if s[1] < adaptive.slow_t][5:])
    slow = [s for s in steps if adaptive.slow_t <= s[1] < adaptive.free_t]
    changes = [(r.event.step, r.t) for r in adaptive.log if isinstance(r.event, Changed)]
    first_slow = slow[0][0]
    detected = next((step for step, t in changes if t > adaptive.slow_t), None)
    waited = None if detected is None else float(detected - first_slow + 1)
    again = _rate([s for s in slow if s[0] >= first_slow + 10][:8]) / before
    fixed_steps = _steps(fixed)
    fixed_before = _rate([s for s in fixed_steps if s[1] < fixed.slow_t][5:])
    fixed_slow = [s for s in fixed_steps if fixed.slow_t <= s[1] < fixed.free_t]
    down = _rate(fixed_slow[2:]) / fixed_before
    tops = _topologies(adaptive)
    end = [tops[step] for step, t, _ in steps if t > adaptive.free_t and step in tops]
    back = next((i for i, name in enumerate(end) if name == "star"), None)
    at_end = float(bool(end) and end[-1] == "star")
    after = f"back on the star at the end (after {'no' if back is None else back} steps of a free link)"
    return [
        at_most("steps from the slow link to the first change", waited, 5),
        at_least("throughput from the tenth slow step on, over that before", again, 0.9),
        BenchClaim("the same without adaptation: it stays down", down, "below 0.8", down < 0.8),
        BenchClaim(after, at_end, "1", at_end == 1.0),
    ]


def write_plot(bench: Bench, path: Path) -> None:
    """Throughput by step, with and without adaptation, and when the link was slow."""
    with picture(path, (10, 4)) as (axis,):
        for name, colour in (("adaptive", "C0"), ("fixed", "C1")):
            own = [row for row in bench.rows if row["run"] == name]
            steps, rates = ([number(row, key) for row in own] for key in ("step", "samples_per_s"))
            axis.plot(steps, rates, label=name, color=colour)
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
