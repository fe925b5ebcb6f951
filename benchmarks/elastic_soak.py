"""Elastic jobs under fire: kills, hangs, pauses and resizes at random; each must end as a run in peace does.

    python benchmarks/elastic_soak.py [--faults 200] [--seed 0] [--workers 4] [--hosts 3] [--pipelines]
        [--sync partial-reduce] [--out F.jsonl]

Each trial starts `plait train` with `parallel.elastic`, does something terrible every now and then until the
job ends, and looks: the exit status, the final weights against those of one worker in peace (float64, 1e-9),
and whether processes are left. The state of a run lives in its members, so one of them is always spared.
With `--hosts` the workers are on several hosts, in network namespaces (Linux, root), and links are cut too; a
job does without the hosts that it has lost. With `--pipelines` the model is cut into a stage a worker,
planned anew for those that are left; some of its state is then lost with any of them. Under a `--sync` that
averages, weights depend on who averaged with whom: they are not compared, and the job must come to its end;
with `--pipelines`, pipelines of two stages average side by side.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from plait.core.errors import PlaitError
from plait.launcher.control import ask_job
from plait.launcher.run_dir import RunDir
from plait.planner import Schedule, save_plan
from plait.schema.job import read_job
from plait.training.checkpoint import list_checkpoints, load

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.hosts import Hosts
from support.plans import in_stages, straight_layout

MARK = "PLAIT_SOAK"
HEARTBEAT_S = 2.0
TOLERANCE = 1e-9
START_S = 60.0
# A pipeline of a stage a worker, and what its job has of its own: layers enough for six workers, a rate at
# which a deep model does not blow up rounding, and checkpoints near each other, as it goes back to them.
PIPELINE = {"plan": "model-parallel", "schedule": "flush", "microbatches": 4}
PIPELINED = {
    "model": "plait.workloads.mlp:mlp",
    "model_args": {"inputs": 64, "hidden": [32] * 6},
    "optimizer": {"kind": "sgd", "lr": 0.01, "momentum": 0.9},
    "checkpoint": {"every_steps": 10},
}
# The workers of a pipeline where several average.
STAGES = 2
# More than anything takes here; a job that is not done by then hangs.
LONGEST_S = 240.0
# Every process of a job shows its stacks when asked to.
SHOW_STACKS = """import faulthandler, signal
faulthandler.register(signal.SIGUSR1, all_threads=True)
"""


@dataclass
class SoakResult:
    """What was done to a job, and what was wrong with how it ended."""

    seed: int
    faults: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    difference: float | None = None
    wrong: list[str] = field(default_factory=list)
    said: str = ""
    stacks: str = ""


class ElasticSoak:
    """Runs elastic jobs in `folder` and does things to them."""

    def __init__(
        self,
        folder: Path,
        steps: int = 300,
        workers: int = 4,
        pause_s: float = 0.02,
        hosts: Hosts | None = None,
        names: Sequence[str] = (),
        pipelines: bool = False,
        sync: str = "all-reduce",
    ) -> None:
        self._folder = folder
        self._pipelines = pipelines
        self._sync = sync
        self._hosts = hosts
        self._names = names
        self._steps = steps
        self._workers = workers
        self._pause_s = pause_s
        self._is_side_by_side = pipelines and sync != "all-reduce"
        # A job with fewer workers ends.
        self._least = STAGES if self._is_side_by_side else 1
        self.peace: Mapping[str, Any] | None = None

    def try_once(self, seed: int) -> SoakResult:
        """One job with faults drawn from `seed`."""
        result, draw, mark = SoakResult(seed), random.Random(seed), uuid.uuid4().hex
        run = self._folder / f"run-{seed}"
        started = time.monotonic()
        with (self._folder / f"said-{seed}.txt").open("w+") as said:
            job = self._start(
                run, {"workers": min(2 + self._least, self._workers)} | self._elastic(), mark, said
            )
            try:
                self._torment(job, RunDir(run), draw, result)
                status = job.wait(max(1.0, started + LONGEST_S - time.monotonic()))
            except subprocess.TimeoutExpired:
                status = None
                result.stacks = _stacks(mark, run)
            finally:
                job.kill()
                job.wait()
            said.seek(0)
            result.said = said.read()
        result.seconds = time.monotonic() - started
        self._judge(run, status, mark, result)
        return result

    def _elastic(self) -> dict[str, Any]:
        rules = {"elastic": True, "max_workers": self._workers, "heartbeat_s": HEARTBEAT_S}
        rules |= (PIPELINE if self._pipelines else {}) | {"sync": self._sync, "min_workers": self._least}
        return rules | ({"plan": str(self._folder / "soak.plan.json")} if self._is_side_by_side else {})

    def _start(self, run: Path, parallel: Mapping[str, Any], mark: str, said: Any) -> subprocess.Popen[str]:
        job = {
            "name": "soak",
            "model": "plait.workloads.mlp:mlp_tiny",
            "data": {"kind": "digits", "batch_size": 60},
            "optimizer": {"kind": "sgd", "lr": 0.05, "momentum": 0.9},
            "steps": self._steps,
            "precision": "float64",
            "device": "cpu",
            "evaluate": {"every_steps": 40},
            "checkpoint": {"every_steps": 60},
            "parallel": {"threads": 1, "jitter": [1.0, self._pause_s], **parallel},
            **(PIPELINED if self._pipelines else {}),
        }
        if self._hosts is not None and parallel.get("elastic"):
            slots = -(-self._workers // len(self._names)) + 1
            job["cluster"] = {
                "hosts": [f"{name}:{slots}" for name in self._names],
                "shell": self._hosts.shell,
                "nic": "eth0",
                "link_timeout_s": HEARTBEAT_S,
            }
        path = self._folder / f"{run.name}.yaml"
        path.write_text(yaml.safe_dump(job))
        if self._is_side_by_side:
            settings, layout = read_job(path).settings(), straight_layout((2,) * STAGES)
            plan = in_stages(settings, layout, Schedule.FLUSH, PIPELINE["microbatches"]).stages.plan
            save_plan(plan, self._folder / "soak.plan.json")
        command = [sys.executable, "-m", "plait", "train", str(path), "--run", str(run)]
        (self._folder / "sitecustomize.py").write_text(SHOW_STACKS)
        places = os.pathsep.join([str(self._folder), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, MARK: mark, "PYTHONPATH": places}
        return subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, env=environment, text=True)

    def _torment(
        self, job: subprocess.Popen[str], folder: RunDir, draw: random.Random, result: SoakResult
    ) -> None:
        """Do things at random moments until the job ends."""
        job_pid, end = psutil.Process(job.pid), time.monotonic() + LONGEST_S
        faults = _Faults(folder, draw, (self._least, self._workers), job_pid, self._cut)
        while job.poll() is None and time.monotonic() < end:
            # To open a pipeline anew takes a while, and under fire without end it would come no further.
            time.sleep(draw.uniform(0.05, 3.0 if self._pipelines else 1.0))
            try:
                kind = faults.next()
            except (PlaitError, psutil.Error, ProcessLookupError):
                continue  # it has just ended, or what was aimed at has
            if kind is not None:
                result.faults[kind] += 1

    def _cut(self, host: str) -> bool:
        """Cut the link of a host, unless it is the one that holds the job's store."""
        if self._hosts is None or host == self._names[0]:
            return False
        self._hosts.cut(host)
        return True

    def _judge(self, run: Path, status: int | None, mark: str, result: SoakResult) -> None:
        if status != 0:
            result.wrong.append("it hangs" if status is None else f"it ended with status {status}")
        if left := _marked(mark):
            result.wrong.append(f"left behind: {left}")
        if status == 0:
            checkpoint = load(list_checkpoints(RunDir(run).checkpoints)[0])
            weights = self._weights_in_peace()
            result.difference = max(
                float((checkpoint.model[name] - weights[name]).abs().max()) for name in weights
            )
            if checkpoint.step != self._steps:
                result.wrong.append(f"it ended at step {checkpoint.step} of {self._steps}")
            if self._sync == "all-reduce" and not result.difference <= TOLERANCE:
                result.wrong.append(f"its weights differ by {result.difference:.3g}")

    def _weights_in_peace(self) -> Mapping[str, Any]:
        if self.peace is None:
            run, parallel = self._folder / "peace", {"workers": 1, "jitter": [0.0, 0.0]}
            with (self._folder / "peace.txt").open("w") as said:
                job = self._start(run, parallel, "peace", said)
                assert job.wait(LONGEST_S) == 0
            self.peace = load(list_checkpoints(RunDir(run).checkpoints)[0]).model
        return self.peace


class _Faults:
    """What can be done to a running job; a member that holds its state is always spared."""

    def __init__(
        self,
        folder: RunDir,
        draw: random.Random,
        workers: tuple[int, int],
        job: psutil.Process,
        cut: Callable[[str], bool],
    ) -> None:
        self._cut_link = cut
        self._cut: set[str] = set()
        self._folder = folder
        self._draw = draw
        self._least, self._workers = workers
        self._job = job
        self._settled: set[int] = set()
        self._hit: set[int] = set()
        kinds: Sequence[tuple[str, Callable[[dict[str, Any]], bool], int]] = (
            ("kill", lambda now: self._signal(now, signal.SIGKILL), 4),
            ("hang", lambda now: self._signal(now, signal.SIGSTOP), 1),
            ("pause", self._pause, 2),
            ("pause an agent", self._pause_agent, 1),
            ("pause everything", self._pause_everything, 1),
            ("kill a joiner", self._kill_joiner, 1),
            ("resize", self._resize, 3),
            ("leave", self._leave, 1),
            ("cut a link", self._cut_one, 1),
        )
        self._kinds = [(name, act) for name, act, weight in kinds for _ in range(weight)]

    def next(self) -> str | None:
        """Do something; what it was, or None where it would have ended the job."""
        kind, act = self._draw.choice(self._kinds)
        now = ask_job(self._folder)
        if now["is_settled"]:
            self._settled = set(now["members"])
        if not self._settled:
            return None  # it has not begun
        return kind if act(now) else None

    def _signal(self, now: dict[str, Any], number: signal.Signals) -> bool:
        victim = self._draw.choice(now["members"])
        spared = self._settled & set(now["members"]) - self._hit - {victim}
        if len(spared) < self._least or victim in self._hit:
            return False
        self._hit.add(victim)
        os.kill(now["pids"][str(victim)], number)
        return True

    def _pause(self, now: dict[str, Any]) -> bool:
        pid = now["pids"][str(self._draw.choice(now["members"]))]
        self._pause_for([psutil.Process(pid)], self._draw.uniform(0.05, HEARTBEAT_S / 3))
        return True

    def _pause_agent(self, now: dict[str, Any]) -> bool:
        """Pause an agent, which may hold the job's store, for longer than its workers may be silent."""
        agent = self._draw.choice(self._job.children())
        self._pause_for([agent], HEARTBEAT_S * self._draw.uniform(1.1, 1.6))
        return True

    def _pause_everything(self, now: dict[str, Any]) -> bool:
        """Pause all processes of the job, as one pauses a container."""
        processes = [self._job, *self._job.children(recursive=True)]
        self._draw.shuffle(processes)
        self._pause_for(processes, HEARTBEAT_S * self._draw.uniform(1.1, 1.6))
        return True

    @staticmethod
    def _pause_for(processes: Sequence[psutil.Process], seconds: float) -> None:
        try:
            for process in processes:
                with contextlib.suppress(psutil.Error):
                    process.suspend()
            time.sleep(seconds)
        finally:
            for process in processes:
                with contextlib.suppress(psutil.Error):
                    process.resume()

    def _kill_joiner(self, now: dict[str, Any]) -> bool:
        workers = [
            worker
            for agent in self._job.children()
            for server in agent.children()
            for worker in server.children()
            if worker.pid not in now["pids"].values()
        ]
        if not workers or (not now["is_settled"] and len(now["members"]) < 2):
            return False
        self._draw.choice(workers).kill()
        return True

    def _cut_one(self, now: dict[str, Any]) -> bool:
        places = {int(worker): host for worker, host in now["places"].items()}
        host = self._draw.choice(sorted(now["hosts"]))
        there = {worker for worker, place in places.items() if place == host}
        left = self._settled & set(now["members"]) - self._hit - there
        if host in self._cut or len(left) < self._least:
            return False
        if not self._cut_link(host):
            return False
        self._cut.add(host)
        self._hit |= there
        return True

    def _resize(self, now: dict[str, Any]) -> bool:
        ask_job(self._folder, {"workers": self._draw.randint(self._least, self._workers), "why": "soak"})
        return True

    def _leave(self, now: dict[str, Any]) -> bool:
        leaver = self._draw.choice(now["members"])
        if len(now["members"]) <= self._least or len(self._settled - self._hit - {leaver}) < self._least:
            return False
        workers = max(self._least, len(now["members"]) - self._draw.randint(0, 1))
        ask_job(self._folder, {"workers": workers, "without": [leaver], "why": "soak"})
        return True


def _stacks(mark: str, run: Path) -> str:
    """Where the processes of a job that hangs are, and what it says of its workers."""
    with contextlib.suppress(PlaitError):
        print(ask_job(RunDir(run)), flush=True)
    for process in _processes(mark):
        process.send_signal(signal.SIGUSR1)
    time.sleep(2.0)
    return "\n".join(f"{path.name}:\n{path.read_text()[-6000:]}" for path in sorted(run.glob("logs/*.err")))


def _processes(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _marked(mark: str, seconds: float = 5.0) -> list[str]:
    """Processes of the job that are left some seconds after its end."""
    end = time.monotonic() + seconds
    while True:
        found = []
        for process in _processes(mark):
            with contextlib.suppress(psutil.Error):
                found.append(" ".join(process.cmdline())[:80])
        if not found or time.monotonic() > end:
            return found
        time.sleep(0.2)


@contextlib.contextmanager
def _made(names: Sequence[str]) -> Iterator[Hosts | None]:
    """Hosts of these names in network namespaces; None where there are none."""
    if not names:
        yield None
        return
    hosts = Hosts()
    try:
        hosts.make(*names)
        yield hosts
    finally:
        hosts.remove()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--pause", type=float, default=0.02, help="seconds that each step sleeps")
    parser.add_argument("--hosts", type=int, default=0, help="put workers on so many hosts, and cut links")
    parser.add_argument("--pipelines", action="store_true", help="cut the model into a stage a worker")
    parser.add_argument("--sync", default="all-reduce", help="how workers agree")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    total: Counter[str] = Counter()
    peace: Mapping[str, Any] | None = None
    failed, seed = 0, asked.seed
    names = [f"w{number}" for number in range(asked.hosts)]
    with tempfile.TemporaryDirectory() as folder:
        while total.total() < asked.faults:
            with _made(names) as hosts:
                soak = ElasticSoak(
                    Path(folder),
                    asked.steps,
                    asked.workers,
                    asked.pause,
                    hosts,
                    names,
                    asked.pipelines,
                    asked.sync,
                )
                soak.peace = peace
                result = soak.try_once(seed)
                peace = soak.peace
            seed += 1
            total += result.faults
            failed += bool(result.wrong)
            print(
                f"seed {result.seed}: {result.faults.total()} faults {dict(result.faults)} in "
                f"{result.seconds:.0f} s, difference {result.difference}; "
                f"{'; '.join(result.wrong) or 'as in peace'}",
                flush=True,
            )
            if result.wrong:
                print(result.said, result.stacks, flush=True)
            if asked.out is not None:
                with asked.out.open("a") as file:
                    file.write(json.dumps(vars(result)) + "\n")
    print(f"{total.total()} faults in {seed - asked.seed} jobs: {dict(total)}; {failed} jobs went wrong")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
