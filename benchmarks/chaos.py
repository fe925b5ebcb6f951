"""Faults in every mode of training: what dies, hangs or has no disk is named, ends cleanly, and goes on.

    python benchmarks/chaos.py [--trials 200] [--seed 0] [--mode stash] [--fault kill-worker] [--out F.jsonl]

A trial starts `plait train` (or `sweep`) in a temporary folder and a /dev/shm of its own, waits until a step
chosen at random is done, does something terrible, and looks: the exit status, who is named, whether
processes, shared memory or temporary files are left; then it resumes and compares the final checkpoint, bit
by bit, with that of a run in peace, where that is promised. A run whose agents or whose processes are all
paused for a while has to go on by itself. Needs Linux and, for private mounts and hosts, root.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
import yaml

from plait.planner import Plan, Schedule, Settings, machines, model_parallel_plan, save_plan
from plait.profiler import profile_model
from plait.workloads.mlp import mlp_tiny

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.hosts import Hosts, missing_for_hosts

MARK = "PLAIT_CHAOS"
STEPS = 90
# Trials of a sweep do not sleep: so many that a fault meets them.
SWEEP_STEPS = 200
TIMEOUT_S = 4.0
# More than anything takes here; whoever is not done by then hangs.
LONGEST_S = 150.0
# The file of the plan that pipelines run, beside their job.
PLAN = "two.plan.json"


@dataclass(frozen=True)
class Mode:
    """A way to train: what its job sets, and what is promised of it."""

    workers: int = 2
    settings: Mapping[str, Any] = field(default_factory=dict)
    # A lost worker does not end the run.
    tolerant: bool = False
    # A resumed run ends with the same bits.
    exact: bool = True
    sweep: bool = False
    hosts: tuple[str, ...] = ()


def _pipeline(schedule: str, hosts: tuple[str, ...] = (), **more: Any) -> Mode:
    # Every forward and backward sleeps.
    settings = {"parallel.plan": PLAN, "parallel.schedule": schedule, "parallel.jitter": [1.0, 0.003], **more}
    return Mode(settings=settings, hosts=hosts)


def _sync(kind: str, workers: int, tolerant: bool = False, exact: bool = False, **options: Any) -> Mode:
    settings = {"parallel.sync": kind, "parallel.sync_options": options, "data.batch_size": 48}
    return Mode(workers, settings, tolerant, exact)


MODES: dict[str, Mode] = {
    "one": Mode(1),
    "plain": Mode(2),
    "plain-3": Mode(3),
    "loaders": Mode(2, {"data.loaders": 2}),
    "native": Mode(2, {"parallel.topology": "native"}),
    "stash": _pipeline("stash"),
    "stash-loaders": _pipeline("stash", **{"data.loaders": 2}),
    "2bw": _pipeline("2bw"),
    "flush": _pipeline("flush"),
    "gpipe": _pipeline("gpipe"),
    "zero-bubble": _pipeline("zero-bubble"),
    "none": _pipeline("none"),
    "partial-reduce": _sync("partial-reduce", 4, tolerant=True, lease_s=2.0),
    "partial-loaders": Mode(
        3,
        {"parallel.sync": "partial-reduce", "parallel.sync_options": {"lease_s": 2.0}, "data.loaders": 2},
        tolerant=True,
        exact=False,
    ),
    "ad-psgd": _sync("ad-psgd", 3, tolerant=True, lease_s=2.0),
    "pair-averaging": _sync("pair-averaging", 3, tolerant=True, lease_s=2.0),
    "pair-sync": _sync("pair-sync", 2, exact=True),
    "sma": _sync("sma", 2, exact=True),
    "local-sgd": _sync("local-sgd", 2, exact=True),
    "diloco": _sync("local-sgd", 2, exact=True, outer="nesterov"),
    "hetpipe": _sync("hetpipe", 2),
    "sweep": Mode(2, {"steps": SWEEP_STEPS}, exact=False, sweep=True),
    "sweep-loaders": Mode(2, {"steps": SWEEP_STEPS, "data.loaders": 2}, exact=False, sweep=True),
    "two-hosts": Mode(2, hosts=("w0:1", "w1:1")),
    "two-hosts-stash": _pipeline("stash", hosts=("w0:1", "w1:1")),
    "three-hosts-partial": Mode(
        3,
        {"parallel.sync": "partial-reduce", "parallel.sync_options": {"lease_s": 2.0}},
        tolerant=True,
        exact=False,
        hosts=("w0:1", "w1:1", "w2:1"),
    ),
}
FAULTS = (
    "kill-worker", "kill-agent", "kill-server", "kill-launcher", "kill-all", "kill-early", "stop-worker",
    "full-disk", "cut-link", "pause-agents", "pause-all",
)  # fmt: skip
# Longer than any limit of the launcher's own, and shorter than what the job allows.
PAUSE_S = 13.0
PAUSES = ("pause-agents", "pause-all")


@dataclass
class Row:
    """What a trial came to; `wrong` lists what should not have been."""

    mode: str
    fault: str
    seed: int
    step: int = -1
    victim: int | None = None
    status: int | None = None
    seconds: float = 0.0
    resumed: int | None = None
    exact: bool | None = None
    wrong: list[str] = field(default_factory=list)
    said: str = ""


class Trial:
    """One run and what is done to it, in a folder of its own."""

    def __init__(self, name: str, mode: Mode, folder: Path, shell: str | None = None) -> None:
        self.mode = mode
        self.folder = folder
        self.run = folder / "run"
        self.mark = uuid.uuid4().hex[:12]
        self._tmp, self._shm = folder / "tmp", folder / "shm"
        for made in (self._tmp, self._shm):
            made.mkdir(parents=True)
        if mode.settings.get("parallel.plan") == PLAN:
            save_plan(_two_stages(), folder / PLAN)
        self.job = folder / "job.yaml"
        self._content = _job(name, mode, folder, shell)

    def start(self, resume: bool = False, patient: bool = False) -> subprocess.Popen[bytes]:
        if resume or patient:
            # No worker's silence is to be noticed, and a busy machine may take long for a step.
            self._content["parallel"]["timeout_s"] = LONGEST_S
        self.job.write_text(yaml.safe_dump(self._content))
        command = [
            sys.executable,
            "-m",
            "plait",
            "sweep" if self.mode.sweep else "train",
            str(self.job),
            "-q",
        ]
        if self.mode.sweep and resume:
            command += ["--resume", str(self.run)]
        else:
            command += ["--run", str(self.run), *(["--resume"] if resume else [])]
        if self.mode.sweep and not resume:
            command += ["--over", "optimizer.lr=log:1e-3:1e-1:6", "--width", "2"]
        if os.geteuid() == 0:
            command = [
                "unshare",
                "-m",
                "sh",
                "-c",
                'mount --bind "$0" /dev/shm && exec "$@"',
                str(self._shm),
                *command,
            ]
        with self.output(resume).open("wb") as output:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | self._environment(),
                start_new_session=True,
                cwd=self.folder,
            )

    def _environment(self) -> dict[str, str]:
        # Without GPUs: CUDA cannot share memory between processes whose /dev/shm is not the host's.
        return {
            MARK: self.mark,
            "TMPDIR": str(self._tmp),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }

    def output(self, resume: bool) -> Path:
        return self.folder / ("resumed.txt" if resume else "output.txt")

    def said(self, resume: bool = False) -> str:
        """The end of what it printed."""
        return self.output(resume).read_text(errors="replace")[-500:]

    def processes(self) -> dict[int, str]:
        """The living processes of this trial, with what they are."""
        needle = f"{MARK}={self.mark}".encode()
        found = {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                is_ours = needle in Path(f"/proc/{process.pid}/environ").read_bytes()
                if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                    found[process.pid] = " ".join(process.cmdline())
        return found

    def status(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            found: dict[str, Any] = json.loads((self.run / "status.json").read_text())
            return found
        return {}

    def await_step(self, process: subprocess.Popen[bytes], step: int) -> bool:
        """Whether the run has come so far; False where it ended before, or never got there."""
        end = time.monotonic() + LONGEST_S
        while time.monotonic() < end and process.poll() is None:
            status = self.status()
            if status.get("state") == "running" and status["progress"].get("step", -1) >= step:
                return True
            time.sleep(0.01)
        return False

    def await_nothing_left(self) -> list[str]:
        """What is left a few seconds after the end."""
        end = time.monotonic() + 20.0
        while self.processes() and time.monotonic() < end:
            time.sleep(0.05)
        left = [f"process: {line[:100]}" for line in self.processes().values()]
        for folder in (self._tmp, self._shm):
            left += [f"{folder.name}: {path.name}" for path in folder.iterdir()]
        return left

    def end(self) -> None:
        _signal(list(self.processes()), signal.SIGKILL)


@functools.cache
def _two_stages() -> Plan:
    """The model in two stages; what its layers cost does not matter here."""
    profile = profile_model(mlp_tiny(), torch.zeros(4, 1, 8, 8), repeats=1)
    return model_parallel_plan(profile.graph, machines(2, 1e9), Settings(Schedule.STASH, 4))


def _job(name: str, mode: Mode, folder: Path, shell: str | None) -> dict[str, Any]:
    job: dict[str, Any] = {
        "name": name,
        "model": "plait.workloads.mlp:mlp_tiny",
        "data": {"kind": "digits", "batch_size": 32},
        "optimizer": {"kind": "sgd", "lr": 0.02, "momentum": 0.9},
        "steps": STEPS,
        "checkpoint": {"every_steps": 10, "keep_last": 2},
        "evaluate": {"every_steps": 20},
        # So long that a fault meets it in the middle.
        "parallel": {"workers": mode.workers, "timeout_s": TIMEOUT_S, "threads": 1, "jitter": [1.0, 0.02]},
        "cluster": {"link_timeout_s": 5.0},
        "run_dir": str(folder / "runs"),
    }
    if mode.hosts:
        del job["parallel"]["workers"]
        job["cluster"] |= {"hosts": list(mode.hosts), "shell": shell, "nic": "eth0"}
    for path, value in mode.settings.items():
        *parents, last = path.split(".")
        section = job
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
    return job


def digest(run: Path) -> str | None:
    """The newest checkpoint's step and bits."""
    found = sorted((run / "checkpoints").glob("step-*"))
    if not found:
        return None
    parts = [
        hashlib.sha256((found[-1] / name).read_bytes()).hexdigest()[:12]
        for name in ("model.safetensors", "optimizer.safetensors")
    ]
    return " ".join([found[-1].name, *parts])


class Chaos:
    """Runs trials in `folder`; each mode's run in peace is made once, to compare with."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._peace: dict[str, str | None] = {}
        self._hosts: Hosts | None = None

    @contextlib.contextmanager
    def open(self) -> Iterator[Chaos]:
        try:
            yield self
        finally:
            if self._hosts is not None:
                self._hosts.remove()

    def in_peace(self, mode: str) -> tuple[str | None, list[str]]:
        """The final checkpoint of the mode without any fault, and what such a run leaves behind."""
        trial = self._trial(mode, "peace")
        process = trial.start()
        status = process.wait(LONGEST_S)
        wrong = (
            []
            if status == 0
            else [f"in peace it ended with {status}: {trial.output(False).read_text()[-500:]}"]
        )
        wrong += trial.await_nothing_left()
        self._peace[mode] = digest(trial.run)
        return self._peace[mode], wrong

    def try_once(self, mode: str, fault: str, seed: int) -> Row:
        """One trial."""
        if mode not in self._peace and MODES[mode].exact:
            self.in_peace(mode)
        row, draw = Row(mode, fault, seed), random.Random(f"{mode}/{fault}/{seed}")
        trial = self._trial(mode, f"{fault}-{seed}")
        disk = _SmallDisk(trial.run) if fault == "full-disk" else contextlib.nullcontext()
        try:
            with disk:
                self._disturb(trial, row, draw)
            self._resume(trial, row)
        finally:
            trial.end()
        return row

    def _trial(self, mode: str, name: str) -> Trial:
        if MODES[mode].hosts and self._hosts is None:
            if reason := missing_for_hosts():
                raise SystemExit(reason)
            self._hosts = Hosts()
            self._hosts.make("w0", "w1", "w2")
        shell = self._hosts.shell if self._hosts is not None else None
        folder = self._folder / f"{mode}-{name}"
        shutil.rmtree(folder, ignore_errors=True)
        return Trial("chaos", MODES[mode], folder, shell)

    def _disturb(self, trial: Trial, row: Row, draw: random.Random) -> None:
        process = trial.start(patient=row.fault in PAUSES)
        begun = time.monotonic()
        if row.fault == "kill-early":
            _wait_for_start(trial, process, draw.random())
        else:
            # Whoever has not taken a step cannot be done without yet.
            row.step = draw.randrange(int(trial.mode.tolerant), STEPS // 2)
            if not trial.await_step(process, row.step):
                row.wrong.append(
                    f"it never came to step {row.step}: {trial.output(False).read_text()[-500:]}"
                )
                return
        acted = time.monotonic()
        FAULT_ACTIONS[row.fault](Act(self, trial, process, row, draw))
        try:
            row.status = process.wait(LONGEST_S)
        except subprocess.TimeoutExpired:
            row.wrong.append(f"it hangs {LONGEST_S:.0f} s after the fault")
            trial.end()
            row.status = process.wait()
        row.seconds = round(time.monotonic() - acted, 2)
        row.said = trial.said()
        row.wrong += trial.await_nothing_left()
        self._judge(trial, row, begun)

    def _judge(self, trial: Trial, row: Row, begun: float) -> None:
        tolerant = trial.mode.tolerant
        expected: dict[str, tuple[int, ...]] = {
            "kill-worker": (0,) if tolerant else (1,),
            # A lost host is done without, too, unless it is the first.
            "kill-agent": (0, 1) if tolerant and trial.mode.hosts else (1,),
            "kill-server": (0, 1) if tolerant and trial.mode.hosts else (1,),
            "kill-launcher": (-9,),
            "kill-all": (-9,),
            # 137: what is killed may still be the shell that begins it, and it says so of its child.
            "kill-early": (-9, 137, 1, 0),
            "stop-worker": (0,) if tolerant else (1,),
            "full-disk": (1,),
            "cut-link": (1,),
            "pause-agents": (0,),
            "pause-all": (0,),
        }
        if row.status not in expected[row.fault]:
            row.wrong.append(f"status {row.status}, expected {expected[row.fault]}")
        text = trial.output(False).read_text(errors="replace")
        if (
            row.fault in ("kill-worker", "stop-worker")
            and not tolerant
            and f"worker {row.victim} on" not in text
        ):
            row.wrong.append(f"worker {row.victim} is not named")
        if "Traceback" in text:
            row.wrong.append("a traceback")
        limits = {"stop-worker": TIMEOUT_S + 15, "cut-link": 25}
        late = row.seconds > limits.get(row.fault, 15)
        if late and row.fault not in PAUSES and not (tolerant and row.status == 0):
            row.wrong.append(f"noticed after {row.seconds} s")
        if row.fault == "full-disk" and "No space left" not in text:
            row.wrong.append("nothing is said of the disk")

    def _resume(self, trial: Trial, row: Row) -> None:
        """Go on, and compare."""
        if row.fault == "cut-link":
            assert self._hosts is not None
            self._hosts.join("w1")
        if not ((trial.run / "settings.json").exists() or (trial.run / "sweep.json").exists()):
            if row.fault != "kill-early":
                row.wrong.append("nothing to resume")
            return
        process = trial.start(resume=True)
        try:
            row.resumed = process.wait(LONGEST_S)
        except subprocess.TimeoutExpired:
            row.wrong.append("the resumed run hangs")
            trial.end()
            return
        if row.resumed != 0:
            row.wrong.append(f"the resumed run ended with {row.resumed}: {trial.said(resume=True)}")
        row.wrong += [f"after the resumed run: {left}" for left in trial.await_nothing_left()]
        unfinished = [path.name for path in trial.run.glob("checkpoints/.*")]
        if unfinished:
            row.wrong.append(f"unfinished checkpoints stay: {unfinished}")
        if trial.mode.exact:
            row.exact = digest(trial.run) == self._peace[row.mode]
            if not row.exact:
                row.wrong.append("the resumed run ends with other bits")

    def cut(self, name: str) -> None:
        assert self._hosts is not None
        self._hosts.cut(name)


class _SmallDisk:
    """A small file system at `folder` while this lasts; later its content is an ordinary folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> None:
        self._folder.mkdir(parents=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "none", str(self._folder)], check=True)

    def __exit__(self, *_: object) -> None:
        (self._folder / "filler").unlink(missing_ok=True)
        kept = self._folder.with_name("kept")
        shutil.copytree(self._folder, kept, symlinks=True)
        subprocess.run(["umount", "-l", str(self._folder)], check=True)
        self._folder.rmdir()
        kept.rename(self._folder)


def _wait_for_start(trial: Trial, process: subprocess.Popen[bytes], share: float) -> None:
    """Wait for some moment between the first process and the first step, by what there is to see."""
    seen = [
        lambda: True,
        lambda: len(trial.processes()) > 1,
        lambda: len(trial.processes()) > 2,
        lambda: bool(trial.status()),
    ]
    moment = seen[int(share * len(seen))]
    end = time.monotonic() + LONGEST_S
    while not moment() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.005)


@dataclass(frozen=True)
class Act:
    """Where a fault is done, and by which random numbers."""

    chaos: Chaos
    trial: Trial
    process: subprocess.Popen[bytes]
    row: Row
    draw: random.Random


def _kill_worker(act: Act, number: int = signal.SIGKILL) -> None:
    worker = act.draw.choice(act.trial.status()["workers"])
    act.row.victim = worker["rank"]
    os.kill(worker["pid"], number)


def _stop_worker(act: Act) -> None:
    _kill_worker(act, signal.SIGSTOP)


def _kill_named(name: str) -> Callable[[Act], None]:
    def kill(act: Act) -> None:
        named = [pid for pid, line in act.trial.processes().items() if name in line]
        os.kill(act.draw.choice([pid for pid in named if _is_first(pid, name)]), signal.SIGKILL)

    return kill


def _is_first(pid: int, name: str) -> bool:
    """Whether it is no child of another of its kind: workers are forked from the server."""
    with contextlib.suppress(psutil.Error):
        parent = psutil.Process(pid).parent()
        return parent is None or name not in " ".join(parent.cmdline())
    return False


def _pause(name: str) -> Callable[[Act], None]:
    def pause(act: Act) -> None:
        named = [pid for pid, line in act.trial.processes().items() if name in line]
        act.draw.shuffle(named)
        _signal(named, signal.SIGSTOP)
        try:
            time.sleep(PAUSE_S)
        finally:
            _signal(named, signal.SIGCONT)

    return pause


def _signal(pids: Sequence[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _kill_launcher(act: Act) -> None:
    act.process.kill()


def _kill_all(act: Act) -> None:
    pids = list(act.trial.processes())
    act.draw.shuffle(pids)
    _signal(pids, signal.SIGKILL)


def _kill_any(act: Act) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(act.draw.choice(sorted(act.trial.processes()) or [act.process.pid]), signal.SIGKILL)


def _fill_disk(act: Act) -> None:
    with contextlib.suppress(OSError), (act.trial.run / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(b"\0" * 4096)


def _cut_link(act: Act) -> None:
    act.chaos.cut("w1")


FAULT_ACTIONS: dict[str, Callable[[Act], None]] = {
    "kill-worker": _kill_worker,
    "kill-agent": _kill_named("plait.launcher.agent"),
    "kill-server": _kill_named("plait.launcher.fork_server"),
    "kill-launcher": _kill_launcher,
    "kill-all": _kill_all,
    "kill-early": _kill_any,
    "stop-worker": _stop_worker,
    "full-disk": _fill_disk,
    "cut-link": _cut_link,
    "pause-agents": _pause("plait.launcher.agent"),
    "pause-all": _pause(""),
}


def applies(mode: str, fault: str) -> bool:
    """Whether the fault can happen in the mode."""
    if fault == "cut-link":
        return len(MODES[mode].hosts) == 2
    return not (fault == "stop-worker" and mode == "one")


def choose(count: int, seed: int, modes: Sequence[str], faults: Sequence[str]) -> list[tuple[str, str, int]]:
    """So many trials, each combination as often as any other."""
    pairs = [(mode, fault) for mode in modes for fault in faults if applies(mode, fault)]
    random.Random(seed).shuffle(pairs)
    return [(*pairs[i % len(pairs)], seed + i) for i in range(count)]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mode", action="append", choices=list(MODES))
    parser.add_argument("--fault", action="append", choices=FAULTS)
    parser.add_argument("--out", type=Path, help="a file for one JSON object a trial")
    asked = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="plait-chaos-") as folder, Chaos(Path(folder)).open() as chaos:
        for mode, fault, seed in choose(
            asked.trials, asked.seed, asked.mode or list(MODES), asked.fault or FAULTS
        ):
            row = chaos.try_once(mode, fault, seed)
            rows.append(row)
            print(
                f"{len(rows):4} {mode:20} {fault:13} {'; '.join(row.wrong) or 'fine'} ({row.seconds} s)",
                flush=True,
            )
            if asked.out is not None:
                with asked.out.open("a") as file:
                    file.write(json.dumps(asdict(row)) + "\n")
            shutil.rmtree(Path(folder) / f"{mode}-{fault}-{seed}", ignore_errors=True)
    _print_table(rows)
    return int(any(row.wrong for row in rows))


def _print_table(rows: Sequence[Row]) -> None:
    print(f"\n{'mode':20} {'trials':>6} {'wrong':>6} {'exact':>9} {'slowest end, s':>15}")
    counts = Counter(row.mode for row in rows)
    for mode, count in counts.items():
        own = [row for row in rows if row.mode == mode]
        exact = [row.exact for row in own if row.exact is not None]
        wrong = sum(bool(row.wrong) for row in own)
        same, slowest = f"{sum(exact)}/{len(exact)}", max(r.seconds for r in own)
        print(f"{mode:20} {count:6} {wrong:6} {same:>9} {slowest:15}")
    print(f"{len(rows)} trials, {sum(bool(row.wrong) for row in rows)} with something wrong")


if __name__ == "__main__":
    sys.exit(main())
