"""A soak of partial reduce: 2,000 rounds, 8 workers slowed, stopped (SIGSTOP) and killed at random.

Killed workers do not come back; three are left at the end. Says what was done and what holds: no hang, no
living worker left without averages, the distance to the mean bounded.

    python benchmarks/sync_soak.py [--rounds 2000] [--seed 0]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from plait.cluster.mail import open_mail
from plait.cluster.presence import Presence
from plait.sync.averaging import Peers
from plait.sync.connectivity import components, recent
from plait.sync.partial_reduce import PartialReduce
from plait.sync.rounds import Rules, read_round

WORKERS = 8
LEASE_S = 1.0
LEAST_LEFT = 3
STEP_S = 0.02
# What a wait may take: a lease, the grace of a round, and what a busy machine adds.
LONGEST_S = 10.0


def work(rank: int, port: int, rounds: int, seed: int, pipe: Connection) -> None:
    """Step, drift at random and average until so many rounds are over; then settle."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    mail = open_mail(store, "soak", rank, ["here"] * WORKERS, "127.0.0.1", 30.0)
    presence = Presence(store, "soak", rank, range(WORKERS), LEASE_S)
    weights = [torch.zeros(1000)]
    sync = PartialReduce(Peers(store, "soak", mail, presence), [lambda: weights], Rules())
    draws = random.Random(f"{seed}/{rank}")
    noise = torch.Generator().manual_seed(seed * 1000 + rank)
    longest, alone_in_a_row, most_alone, steps = 0.0, 0, 0, 0
    while int(store.compare_set("soak/partial/hint", "", "0")) < rounds:
        slow = draws.choice([1, 1, 1, 2, 4])
        time.sleep(STEP_S * slow)
        # A step pulls towards zero, so that without averaging workers would differ by a fixed amount.
        weights[0].mul_(0.9).add_(torch.randn(1000, generator=noise))
        started = time.monotonic()
        sync.after_update()
        longest = max(longest, time.monotonic() - started)
        alone_in_a_row = alone_in_a_row + 1 if len(sync.groups[-1]) == 1 else 0
        most_alone = max(most_alone, alone_in_a_row)
        steps += 1
    members = sync.settle()
    pipe.send(
        {
            "steps": steps,
            "longest_s": longest,
            "most_alone": most_alone,
            "members": members,
            "distance": sync.tally.distances[-1],
            "value": float(weights[0].sum()),
        }
    )
    time.sleep(1.0)
    sync.close()
    os._exit(0)


def disturb(processes: list[Any], store: dist.TCPStore, rounds: int, seed: int) -> dict[str, int]:
    """Stop and kill workers at random until the rounds are over; how often which."""
    draws = random.Random(seed)
    done = {"stops": 0, "kills": 0}
    end = time.monotonic() + 1200
    kill_at = sorted(draws.sample(range(rounds // 10, rounds * 9 // 10), WORKERS - LEAST_LEFT))
    while (number := int(store.compare_set("soak/partial/hint", "", "0"))) < rounds:
        if time.monotonic() > end:
            raise SystemExit(f"hang: {number} of {rounds} rounds after 20 minutes")
        alive = [p for p in processes if p.is_alive()]
        if kill_at and number >= kill_at[0]:
            kill_at.pop(0)
            draws.choice(alive).kill()
            done["kills"] += 1
        elif draws.random() < 0.5:
            victim = draws.choice(alive)
            os.kill(victim.pid, signal.SIGSTOP)
            # Some pauses are shorter than a lease, some longer.
            time.sleep(draws.choice([0.1, 0.5, 1.5 * LEASE_S]))
            os.kill(victim.pid, signal.SIGCONT)
            done["stops"] += 1
        time.sleep(draws.uniform(0.1, 0.5))
    return done


def main() -> int:
    """Run the soak; exit status 1 where something does not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "plait.sync.partial_reduce"])
    pipes, processes = [], []
    for rank in range(WORKERS):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=work, args=(rank, store.port, asked.rounds, asked.seed, theirs))
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    started = time.monotonic()
    done = disturb(processes, store, asked.rounds, asked.seed)
    found = [_answer(pipe) for pipe in pipes]
    for process in processes:
        process.kill()
        process.join()
    return report(asked.rounds, done, found, time.monotonic() - started, store)


def _answer(pipe: Any) -> dict[str, Any] | None:
    try:
        return pipe.recv() if pipe.poll(30) else {"hang": True}
    except EOFError:
        return None


def report(rounds: int, done: dict[str, int], found: list[Any], seconds: float, store: dist.TCPStore) -> int:
    """Print what was found and what holds; 0 where all does."""
    living = [answer for answer in found if answer is not None]
    answered = [answer for answer in living if "hang" not in answer]
    groups = _last_groups(store, rounds)
    survivors = [rank for rank, answer in enumerate(found) if answer is not None]
    holds = {
        "no hang": len(answered) == len(living) and all(a["longest_s"] < LONGEST_S for a in answered),
        "all the living settled together": len({a["members"] for a in answered}) == 1,
        "the living agree at the end": len({a["value"] for a in answered}) == 1,
        "nobody stayed alone for ten rounds": all(a["most_alone"] < 10 for a in answered),
        "the distance to the mean is bounded": all(a["distance"] < 2 * 1000**0.5 * 2.3 for a in answered),
        "those who took part within 10 rounds are connected": _are_connected(groups, len(survivors)),
    }
    shown = {
        "rounds": rounds,
        "seconds": round(seconds, 1),
        **done,
        "survivors": survivors,
        "longest_wait_s": round(max((a["longest_s"] for a in answered), default=-1), 2),
        "largest_distance": round(max((a["distance"] for a in answered), default=-1), 2),
        "mean_group": round(sum(map(len, groups)) / max(len(groups), 1), 2),
        "holds": holds,
    }
    print(json.dumps(shown, indent=1))
    return 0 if all(holds.values()) else 1


def _are_connected(groups: list[tuple[int, ...]], workers: int) -> bool:
    """Whether at every round the groups of the last ten connect all workers that are in any of them.

    Who was stopped for longer than a lease is in none.
    """
    for end in range(1, len(groups) + 1):
        window = recent(groups[:end], workers, 10)
        full = sum(map(len, groups[:end])) >= 10 * workers
        if full and len(components(window, {rank for group in window for rank in group})) > 1:
            return False
    return True


def _last_groups(store: dist.TCPStore, rounds: int) -> list[tuple[int, ...]]:
    """The groups of the last rounds, those that the store still has."""
    keys = [(n, f"soak/partial/record/{n}") for n in range(max(0, rounds - 200), rounds)]
    return [read_round(n, store.get(key)).members for n, key in keys if store.check([key])]


if __name__ == "__main__":
    sys.exit(main())
