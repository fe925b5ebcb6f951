"""Malformed inputs by the thousand: each must be accepted, or refused with one clear message.

    python benchmarks/fuzz_inputs.py [--inputs 10000] [--seed 0] [--target plan] [--target graph]

Every input is read in a child process that may take so much CPU time and so much memory for it. Counted are,
for each target: clean errors (exit status 2, one message of at most 2,500 letters), inputs that were accepted
and used, tracebacks, errors that are not clear, hangs and inputs that take all memory. Exit status 1 when
there is any of the last four. An input can be made again from the target, the seed and its number.
"""

from __future__ import annotations

import argparse
import collections
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import psutil

from fuzz_targets import TARGETS
from plait.core.errors import InputError, PlaitError

KINDS = ("clean error", "accepted", "traceback", "unclear", "hang", "memory")
BAD = KINDS[2:]
LONGEST_MESSAGE = 2500
# An input that sleeps takes no CPU time; after so long it counts as a hang too.
LONGEST_WALL_S = 60.0


class TakesTooLong(BaseException):
    """The CPU time of one input is used up."""


@dataclass(frozen=True)
class Case:
    """One input, by its target and number."""

    target: str
    number: int


@dataclass(frozen=True)
class Outcome:
    """What came of an input: one of KINDS, where in Plait and with which words it ended, and the input."""

    kind: str
    where: str = ""
    words: str = ""
    shown: str = ""


def run_case(case: Case, seed: int, folder: Path, cpu_s: float) -> Outcome:
    """Make an input and let Plait read it, within `cpu_s` seconds of CPU time."""
    source = random.Random(f"{seed}/{case.target}/{case.number}")
    shown, use = TARGETS[case.target][0](source, folder, case.number)
    try:
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        try:
            use()
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    except TakesTooLong as failure:
        return Outcome("hang", _where(failure), "", shown)
    except MemoryError as failure:
        return Outcome("memory", _where(failure), "", shown)
    except PlaitError as failure:
        clear = failure.exit_status == InputError.exit_status and 0 < len(str(failure)) <= LONGEST_MESSAGE
        kind = "clean error" if clear else "unclear"
        return Outcome(kind, f"{type(failure).__name__} {_where(failure)}", str(failure), shown)
    except BaseException as failure:
        return Outcome("traceback", f"{type(failure).__name__} {_where(failure)}", str(failure), shown)
    return Outcome("accepted", "", "", shown)


def _where(failure: BaseException) -> str:
    """The innermost line of Plait in the failure's traceback."""
    frames = [f for f in traceback.extract_tb(failure.__traceback__) if "plait/" in f.filename]
    return f"{frames[-1].filename.rpartition('plait/')[2]}:{frames[-1].lineno}" if frames else ""


def serve(pipe: Connection, seed: int, cpu_s: float, memory: int) -> None:
    """A child's life: read the inputs it is told, one at a time."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    signal.signal(signal.SIGPROF, _raise)
    used = psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (used + memory, resource.getrlimit(resource.RLIMIT_AS)[1]))
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        while (case := pipe.recv()) is not None:
            pipe.send(run_case(case, seed, Path(tempfile.mkdtemp(dir=folder)), cpu_s))
            for path in Path(folder).iterdir():
                shutil.rmtree(path, ignore_errors=True)


def _raise(*_: Any) -> None:
    raise TakesTooLong


class Child:
    """A process that reads inputs, and the input it reads now."""

    def __init__(self, seed: int, cpu_s: float, memory: int) -> None:
        self._limit_s = cpu_s
        self.pipe, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("fork")
        self.process = context.Process(target=serve, args=(theirs, seed, cpu_s, memory), daemon=True)
        self.process.start()
        theirs.close()
        self.case: Case | None = None

    def give(self, case: Case | None) -> None:
        self.case = case
        self._cpu_s, self._started = self._used(), time.monotonic()
        self.pipe.send(case)

    def _used(self) -> float:
        times = psutil.Process(self.process.pid).cpu_times()
        return float(times.user + times.system)

    def hangs(self) -> bool:
        """Whether it no longer hears that its time is over, as code in C may not."""
        waited = time.monotonic() - self._started > LONGEST_WALL_S
        return self.case is not None and (waited or self._used() - self._cpu_s > 2 * self._limit_s + 1)

    def answer(self) -> Outcome:
        try:
            return self.pipe.recv()
        except EOFError:
            self.process.join()
            return Outcome("memory", f"its process ended with {self.process.exitcode}")

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


def outcomes(
    cases: list[Case], seed: int, processes: int, cpu_s: float, memory: int
) -> Iterator[tuple[Case, Outcome]]:
    """What comes of each of `cases`, read by `processes` children at a time."""
    waiting = collections.deque(cases)
    children = [Child(seed, cpu_s, memory) for _ in range(min(processes, len(cases)))]
    for child in children:
        child.give(waiting.popleft())
    while children:
        wait([child.pipe for child in children], timeout=1.0)
        for child in list(children):
            outcome = None
            if child.pipe.poll():
                outcome = child.answer()
            elif child.hangs():
                outcome = Outcome("hang", "in code that hears no signal")
                child.kill()
            if outcome is None:
                continue
            assert child.case is not None
            yield child.case, outcome
            children.remove(child)
            if not waiting:
                if child.process.is_alive():
                    child.give(None)
                    child.process.join()
                continue
            if not child.process.is_alive():
                child = Child(seed, cpu_s, memory)
            child.give(waiting.popleft())
            children.append(child)


def choose(inputs: int, targets: list[str]) -> list[Case]:
    """So many inputs, dealt to the targets by their shares, each target at least one."""
    shares = {name: TARGETS[name][1] for name in targets}
    counts = {name: max(1, round(inputs * share / sum(shares.values()))) for name, share in shares.items()}
    return [Case(name, number) for name, count in counts.items() for number in range(count)]


def table(counts: dict[str, collections.Counter[str]]) -> str:
    rows = [("target", "inputs", *KINDS)]
    for name, found in counts.items():
        rows.append((name, str(found.total()), *(str(found[kind]) for kind in KINDS)))
    total = sum(counts.values(), collections.Counter())
    rows.append(("all", str(total.total()), *(str(total[kind]) for kind in KINDS)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=10000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", action="append", choices=list(TARGETS), help="only this one (repeatable)")
    parser.add_argument("--without", action="append", choices=list(TARGETS), default=[], help="not this one")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--cpu-s", type=float, default=6.0, help="CPU seconds that an input may take")
    parser.add_argument("--memory-mb", type=int, default=1024, help="memory that an input may take")
    parser.add_argument("--accepted", action="store_true", help="list what was accepted, too")
    asked = parser.parse_args()
    targets = [name for name in asked.target or TARGETS if name not in asked.without]
    cases = choose(asked.inputs, targets)
    counts: dict[str, collections.Counter[str]] = {}
    least: dict[tuple[str, str, str], tuple[Case, Outcome]] = {}
    started = time.monotonic()
    for case, outcome in outcomes(cases, asked.seed, asked.processes, asked.cpu_s, asked.memory_mb << 20):
        counts.setdefault(case.target, collections.Counter())[outcome.kind] += 1
        if outcome.kind == "accepted" and asked.accepted:
            print(f"accepted {case.target} {case.number}: {outcome.shown[:200]}")
        if outcome.kind in BAD:
            key = (case.target, outcome.kind, outcome.where)
            if key not in least or len(outcome.shown) < len(least[key][1].shown):
                least[key] = (case, outcome)
    print(table({name: counts[name] for name in TARGETS if name in counts}))
    for (target, kind, where), (case, outcome) in sorted(least.items()):
        print(f"{kind} in {target} at {where}, number {case.number}: {outcome.shown[:200]}")
        if outcome.words:
            print(f"    {outcome.words[:200]!r}")
    print(f"{len(cases)} inputs, seed {asked.seed}, {time.monotonic() - started:.0f} s")
    sys.exit(bool(least))


if __name__ == "__main__":
    main()
