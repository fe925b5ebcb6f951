"""A soak of partial reduce: 2,000 rounds, 8 workers slowed, stopped (SIGSTOP) and killed at random.

Killed workers do not come back; three are left at the end. Every worker writes down each round it was in;
from that, and from what was done to whom, follows what holds: no hang, no round lost among the living, all
who live connected within every ten rounds, and the distance to their mean bounded.

    python benchmarks/sync_soak.py [--rounds 2000] [--seed 0]
"""

from __future__ import annotations

import argparse
import bisect
import json
import math
import multiprocessing
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from plait.comm.handshake import Address
from plait.comm.rendezvous import Rendezvous
from plait.comm.store import StoreClient, StoreServer
from plait.core.errors import PeerError
from plait.launcher.worker_process import JobStore
from plait.sync.averaging.base import AveragedState
from plait.sync.averaging.group_graph import components
from plait.sync.averaging.mailbox import open_mailbox
from plait.sync.averaging.partial_reduce import PartialReduce
from plait.sync.averaging.partial_reduce_rules import Rules
from plait.sync.averaging.peers import Peers

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.leases import Leases

WORKERS = 8
SECRET = b"of the soak"
LEASE_S = 1.0
LEAST_LEFT = 3
STEP_S = 0.02
ELEMENTS = 1000
SHOWN = 50  # elements that are written down to tell the distance from
# A step keeps 0.9 of a weight and adds noise of 1: so far from the mean is who never averages.
ALONE = math.sqrt(ELEMENTS / (1 - 0.9**2))
# What a wait may take: a lease, the grace of a round, and what a busy machine adds.
LONGEST_S = 10.0


@dataclass(frozen=True)
class Disturbance:
    """What was done to a worker, and when, by the wall clock."""

    rank: int
    what: str
    start: float
    end: float


@dataclass(frozen=True)
class Took:
    """A worker was in a round: when it had its mean, and some of the weights it left with."""

    number: int
    members: tuple[int, ...]
    t: float
    weights: tuple[float, ...]


def work(rank: int, address: str, rounds: int, seed: int, folder: str, pipe: Connection) -> None:
    """Step, drift at random and average until `rounds` rounds are over; then all are to synchronize."""
    torch.set_num_threads(1)
    store = JobStore(StoreClient(Address(address), SECRET, rank))
    rendezvous = Rendezvous(store, SECRET, rank, ["here"] * WORKERS, timeout_s=30.0)
    mailbox = open_mailbox(rendezvous, "soak")
    presence = Leases(store, "soak", rank, range(WORKERS), LEASE_S)
    weights = [torch.zeros(ELEMENTS)]
    peers = Peers(store, "soak", mailbox, presence.lost)
    sync = PartialReduce(peers, AveragedState([lambda: weights]), Rules())
    draws = random.Random(f"{seed}/{rank}")
    noise = torch.Generator().manual_seed(seed * 1000 + rank)
    longest, steps = 0.0, 0
    with Path(folder, f"{rank}.jsonl").open("w", buffering=1) as log:
        while int(store.compare_set("soak/partial/hint", "", "0")) < rounds:
            time.sleep(STEP_S * draws.choice([1, 1, 1, 2, 4]))
            weights[0].mul_(0.9).add_(torch.randn(ELEMENTS, generator=noise))
            started = time.monotonic()
            sync.after_update()
            longest = max(longest, time.monotonic() - started)
            shown = [round(w, 3) for w in weights[0][:SHOWN].tolist()]
            log.write(json.dumps([sync.last.number, sync.last.members, time.time(), shown]) + "\n")
            steps += 1
    try:
        sync.synchronize()
        lost = None
    except PeerError as failure:
        lost = failure.peer
    pipe.send({"steps": steps, "longest_s": longest, "lost": lost})
    time.sleep(1.0)
    sync.close()
    os._exit(0)


def disturb(processes: list[Any], store: StoreClient, rounds: int, seed: int) -> list[Disturbance]:
    """Stop and kill workers at random until the rounds are over; what was done."""
    draws = random.Random(seed)
    done: list[Disturbance] = []
    end = time.monotonic() + 1200
    kill_at = sorted(draws.sample(range(rounds // 10, rounds * 9 // 10), WORKERS - LEAST_LEFT))
    while (number := int(store.compare_set("soak/partial/hint", "", "0"))) < rounds:
        if time.monotonic() > end:
            raise SystemExit(f"hang: {number} of {rounds} rounds after 20 minutes")
        rank = draws.choice([rank for rank, process in enumerate(processes) if process.is_alive()])
        started = time.time()
        if kill_at and number >= kill_at[0]:
            kill_at.pop(0)
            processes[rank].kill()
            processes[rank].join()
            done.append(Disturbance(rank, "kill", started, math.inf))
        elif draws.random() < 0.5:
            os.kill(processes[rank].pid, signal.SIGSTOP)
            # Some pauses are shorter than a lease, some longer.
            time.sleep(draws.choice([0.1, 0.5, 1.5 * LEASE_S]))
            os.kill(processes[rank].pid, signal.SIGCONT)
            done.append(Disturbance(rank, "stop", started, time.time()))
        time.sleep(draws.uniform(0.1, 0.5))
    return done


def main() -> int:
    """Run the soak; exit status 1 where something does not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    server = StoreServer(SECRET)
    store = StoreClient(server.address, SECRET, WORKERS)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "plait.sync.averaging.partial_reduce"])
    pipes, processes = [], []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(WORKERS):
            ours, theirs = context.Pipe(duplex=False)
            told = (rank, server.address.text, asked.rounds, asked.seed, folder, theirs)
            process = context.Process(target=work, args=told)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        started = time.monotonic()
        done = disturb(processes, store, asked.rounds, asked.seed)
        answers = [_answer(pipe) for pipe in pipes]
        for process in processes:
            process.kill()
            process.join()
        logs = {rank: _read(Path(folder, f"{rank}.jsonl")) for rank in range(WORKERS)}
    return report(asked.rounds, done, answers, logs, time.monotonic() - started)


def _answer(pipe: Any) -> dict[str, Any] | None:
    try:
        return pipe.recv() if pipe.poll(30) else {"hang": True}
    except EOFError:
        return None


def _read(path: Path) -> list[Took]:
    """What a worker wrote down; a killed one may have left half a line."""
    lines = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [Took(n, tuple(members), t, tuple(shown)) for n, members, t, shown in map(json.loads, lines)]


def report(
    rounds: int,
    done: Sequence[Disturbance],
    answers: Sequence[dict[str, Any] | None],
    logs: Mapping[int, list[Took]],
    seconds: float,
) -> int:
    """Print what was found and what holds; 0 where all does."""
    living = [answer for answer in answers if answer is not None]
    answered = [answer for answer in living if "hang" not in answer]
    groups = {took.number: took for log in logs.values() for took in log}
    void, unheard = rounds - len([n for n in groups if n < rounds]), list(_unheard(groups, logs, done))
    apart = list(_apart(groups, done))
    distances = list(_distances(logs, done))
    stops = sum(d.what == "stop" for d in done)
    holds = {
        "no hang": len(answered) == len(living) and all(a["longest_s"] < LONGEST_S for a in answered),
        # A run links its workers up again then.
        "a full average names a worker that is lost": all(a["lost"] is not None for a in answered),
        # Who leads a round may be killed or stopped in it: the others have their mean in the next one.
        "no round is lost but to a stop or a kill": void <= len(done) and not unheard,
        "all the living are connected within every 10 rounds": not apart,
        "nobody is farther from the mean than without averaging": max(distances) < ALONE,
    }
    shown = {
        "rounds": rounds,
        "seconds": round(seconds, 1),
        "stops": stops,
        "kills": len(done) - stops,
        "survivors": [rank for rank, answer in enumerate(answers) if answer is not None],
        "void_rounds": void,
        "unheard": unheard[:5],
        "disconnected_at": apart[:5],
        "longest_wait_s": round(max((a["longest_s"] for a in answered), default=-1), 2),
        "distance_median": round(statistics.median(distances), 1),
        "distance_largest": round(max(distances), 1),
        "distance_without_averaging": round(ALONE, 1),
        "mean_group": round(statistics.fmean(len(took.members) for took in groups.values()), 2),
        "holds": holds,
    }
    print(json.dumps(shown))
    return 0 if all(holds.values()) else 1


def _touched(done: Sequence[Disturbance], start: float, end: float) -> set[int]:
    """Who was stopped or dead at some time between `start` and `end`."""
    return {d.rank for d in done if d.start <= end and d.end >= start}


def _unheard(
    groups: Mapping[int, Took], logs: Mapping[int, list[Took]], done: Sequence[Disturbance]
) -> Iterator[tuple[int, int]]:
    """Rounds with a worker that was counted in and never heard, though it and the leader were left alone."""
    own = {rank: {took.number: took.members for took in log} for rank, log in logs.items()}
    for number, took in groups.items():
        touched = _touched(done, took.t - 2 * LEASE_S, took.t + LEASE_S)
        # The first member leads.
        for rank in set(took.members) - touched if took.members[0] not in touched else ():
            if own[rank].get(number) != took.members:
                yield number, rank


def _apart(groups: Mapping[int, Took], done: Sequence[Disturbance]) -> Iterator[tuple[int, list[list[int]]]]:
    """The rounds after which the last ten had not connected all who lived through them, and their parts."""
    order = [groups[number] for number in sorted(groups)]
    for last in range(1, len(order) + 1):
        end = order[last - 1].t
        dead = {d.rank for d in done if d.what == "kill" and d.start <= end}
        window = _window(order[:last], WORKERS - len(dead), done)
        if window is None:
            continue
        # Who was stopped for longer than a lease is away, and back when the others have heard of it.
        begin = window[0].t - LEASE_S
        away = {d.rank for d in done if d.end - d.start >= LEASE_S and d.start <= end and d.end >= begin}
        parts = components([took.members for took in window], set(range(WORKERS)) - dead - away)
        if len(parts) > 1:
            yield order[last - 1].number, [sorted(part) for part in parts]


def _window(order: Sequence[Took], living: int, done: Sequence[Disturbance]) -> list[Took] | None:
    """The groups of the last ten rounds; None where there have not been so many.

    One whose leader was stopped meanwhile may be known to the others too late to be counted.
    """
    places, found = 0, []
    for took in reversed(order):
        if took.members[0] not in _touched(done, took.t - 2 * LEASE_S, took.t):
            places += len(took.members)
        if places > 10 * living:
            return found
        found.insert(0, took)
    return None


def _distances(logs: Mapping[int, list[Took]], done: Sequence[Disturbance]) -> Iterator[float]:
    """How far each living worker was from the mean of all, a few times a second."""
    t, end = max(log[0].t for log in logs.values()), max(log[-1].t for log in logs.values())
    scale = math.sqrt(ELEMENTS / SHOWN)
    while t < end:
        dead = {d.rank for d in done if d.what == "kill" and d.start <= t}
        living = [log for rank, log in logs.items() if rank not in dead]
        now = [log[bisect.bisect_right(log, t, key=lambda took: took.t) - 1].weights for log in living]
        states = torch.tensor(now)
        yield from (scale * (states - states.mean(0)).norm(dim=1)).tolist()
        t += 0.25


if __name__ == "__main__":
    sys.exit(main())
