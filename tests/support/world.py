"""Small real worlds: `run_ranks` starts gloo processes and returns what each returned.

A server that has imported torch, and from which they are forked, makes a world cost tenths of a second.
Everything has a deadline: a rank that fails shows its traceback, a rank that says nothing is named, and no
process outlives the call.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

from support.server import Forked


class WorldError(AssertionError):
    """A rank failed, died or stayed silent."""


def run_ranks(
    n: int,
    fn: Callable[..., Any],
    *args: Any,
    deadline_s: float = 60.0,
    may_die: tuple[int, ...] = (),
    kill_when: Callable[[], bool] | None = None,
    **kwargs: Any,
) -> list[Any]:
    """What `fn(rank, *args, **kwargs)` returned on each of `n` ranks of one gloo world.

    `fn` and its values must be picklable (module level). Ranks in `may_die` may end without a word: their
    place in the result holds None. All others must return within `deadline_s`. Once `kill_when` says
    so, every rank is killed (SIGKILL) and has None in the result.
    """
    with tempfile.TemporaryDirectory() as folder:
        ranks = [_start(r, n, folder, fn, args, kwargs, deadline_s) for r in range(n)]
        try:
            if kill_when is not None:
                may_die = _wait_to_kill(ranks, deadline_s, kill_when)
            return _collect(ranks, Path(folder), deadline_s, may_die)
        finally:
            for process, _ in ranks:
                process.kill()
                process.join()


def _start(rank: int, n: int, folder: str, fn: Any, args: Any, kwargs: Any, deadline_s: float) -> Any:
    ours, theirs = Pipe(duplex=False)
    with theirs:
        return Forked(_rank_main, (rank, n, folder, fn, args, kwargs, deadline_s), theirs.fileno()), ours


def _rank_main(rank: int, n: int, folder: str, fn: Any, args: Any, kwargs: Any, deadline_s: float) -> None:
    import torch
    import torch.distributed as dist

    pipe: Connection[Any, Any] = Connection(Forked.DESCRIPTOR, readable=False)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    faulthandler.enable()
    with (Path(folder) / f"stacks-{rank}").open("w") as stacks:
        # A silent rank leaves its stack behind just before the caller's patience ends.
        faulthandler.dump_traceback_later(max(deadline_s - 1.0, deadline_s * 0.8), file=stacks)
        try:
            store = dist.FileStore(os.path.join(folder, "store"), n)
            timeout = timedelta(seconds=deadline_s)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=n, timeout=timeout)
            # Who is done at once must not end while others are still connecting to it.
            store.set(f"connected {rank}", "")
            store.wait([f"connected {other}" for other in range(n)], timeout)
            answer = (True, fn(rank, *args, **kwargs))
        except BaseException:
            answer = (False, traceback.format_exc())
        pipe.send(answer)
        pipe.close()
        sys.stdout.flush()
        sys.stderr.flush()
        # Threads and connections that are left would hold up an ordinary exit.
        os._exit(0)


def _collect(ranks: list[Any], folder: Path, deadline_s: float, may_die: tuple[int, ...]) -> list[Any]:
    results: list[Any] = [None] * len(ranks)
    waiting = {pipe: rank for rank, (_, pipe) in enumerate(ranks)}
    failures: list[str] = []
    end = time.monotonic() + deadline_s
    while waiting and set(waiting.values()) - set(may_die):
        ready = wait(list(waiting), timeout=max(0.0, end - time.monotonic()))
        if not ready:
            silent = sorted(set(waiting.values()) - set(may_die))
            stacks = [f"rank {r} hung at:\n{_stack(folder / f'stacks-{r}')}" for r in silent]
            story = "\n".join([*failures, *stacks])
            raise WorldError(f"no answer from ranks {silent} within {deadline_s} s\n{story}")
        for pipe in ready:
            rank = waiting.pop(pipe)
            results[rank], failure = _receive(pipe, ranks[rank][0], rank, rank in may_die)
            if failure:
                failures.append(failure)
                # The others will only fail because of this one: give them a moment, then report.
                end = min(end, time.monotonic() + 2.0)
    if failures:
        raise WorldError("\n".join(failures))
    return results


def _stack(path: Path) -> str:
    """What a silent rank leaves behind; one that started late on a busy machine leaves it late."""
    end = time.monotonic() + 10.0
    while not (text := path.read_text()) and time.monotonic() < end:
        time.sleep(0.05)
    return text


def _wait_to_kill(ranks: list[Any], deadline_s: float, moment: Callable[[], bool]) -> tuple[int, ...]:
    """Wait until the moment has come or all ranks have answered; kills the ranks that had not by then."""
    pipes = {pipe: rank for rank, (_, pipe) in enumerate(ranks)}
    end = time.monotonic() + deadline_s
    while not moment():
        if len(wait(list(pipes), timeout=0.002)) == len(pipes):
            return ()
        if time.monotonic() > end:
            raise WorldError(f"the moment to kill the ranks did not come within {deadline_s} s")
    answered = {pipes[pipe] for pipe in wait(list(pipes), timeout=0)}
    for process, _ in ranks:
        process.kill()
    return tuple(rank for rank in range(len(ranks)) if rank not in answered)


def _receive(pipe: Any, process: Any, rank: int, may_die: bool) -> tuple[Any, str | None]:
    try:
        fine, value = pipe.recv()
    except EOFError:
        process.join(5)
        return None, None if may_die else f"rank {rank} died with exit code {process.exitcode}"
    return (value, None) if fine else (None, f"rank {rank} raised:\n{value}")
