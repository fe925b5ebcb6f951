"""One worker process: who it is, how it is told to stop, and what it leaves behind when it fails."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import threading
import time
import traceback
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from plait.core.errors import PlaitError
from plait.core.names import resolve

PROGRESS_KEY = "plait/progress"
SIGNS_OF_A_LOST_PEER = (
    "Connection closed by peer",
    "Connection reset",
    "Broken pipe",
    "Timed out waiting",
    "NCCL error",
)


@dataclass(frozen=True)
class Place:
    """Where a worker stands: what its host's agent knows and hands to each of its workers."""

    host: str
    address: str
    port: int
    nic: str | None
    folder: str  # of this agent, on this host: the stop request comes and failure reports go there
    threads: int
    timeout_s: float


@dataclass(frozen=True)
class Failure:
    """Why a worker ended: `peer_lost` when it only noticed that another one was gone."""

    rank: int
    host: str
    time: float
    summary: str
    traceback: str
    peer_lost: bool
    exit_status: int


class Worker:
    """This process in its job: rank, world size, the job's store, and the request to stop."""

    def __init__(self, place: Place, rank: int, world_size: int, local_rank: int) -> None:
        self.host = place.host
        self.rank = rank
        self.world_size = world_size
        self.local_rank = local_rank
        self.timeout_s = place.timeout_s
        self._stop = os.path.join(place.folder, "stop")
        timeout = timedelta(seconds=place.timeout_s)
        self.store = dist.TCPStore(place.address, place.port, is_master=False, timeout=timeout)

    def stop_requested(self) -> bool:
        """Whether this worker's host was asked to end the job cleanly; one look at a file."""
        return os.path.exists(self._stop)

    def report(self, progress: dict[str, Any]) -> None:
        """Tell the supervisor how far the job is; rank 0 calls it a few times a second at most."""
        self.store.set(PROGRESS_KEY, json.dumps(progress))

    def join(self, backend: str) -> None:
        """Make the process group of all workers; every rank calls it."""
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("plait/world", self.store),
            rank=self.rank,
            world_size=self.world_size,
            timeout=timedelta(seconds=self.timeout_s),
        )


def enter(entry: str, settings: dict[str, Any], place: dict[str, Any]) -> Any:
    """Be one worker: run `entry(worker, settings)`. Torch's agent calls it in a fresh process."""
    here = Place(**place)
    _die_with_agent(here)
    # Ctrl-C reaches the whole terminal; the supervisor alone decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    rank = int(os.environ["RANK"])
    try:
        if here.nic is not None:
            # The interface that the other hosts know; the libraries' own guess may be another.
            os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = here.nic
        torch.set_num_threads(here.threads)
        worker = Worker(here, rank, int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"]))
        value = resolve(entry, "entry")(worker, settings)
        sys.stdout.flush()
        sys.stderr.flush()
        return value
    except BaseException as failure:
        _leave_report(here, rank, failure)
        sys.stdout.flush()
        sys.stderr.flush()
        # A process group with a dead peer can block in its destructor.
        os._exit(1)


def _leave_report(place: Place, rank: int, failure: BaseException) -> None:
    report = Failure(
        rank=rank,
        host=place.host,
        time=time.time(),
        summary=f"{type(failure).__name__}: {failure}"
        if not isinstance(failure, PlaitError)
        else str(failure),
        # A message in the user's own words needs no traceback.
        traceback="" if isinstance(failure, PlaitError) else traceback.format_exc(),
        peer_lost=_is_peer_lost(failure),
        exit_status=failure.exit_status if isinstance(failure, PlaitError) else 1,
    )
    Path(place.folder, f"failure-{rank}.json").write_text(json.dumps(asdict(report)))


def _is_peer_lost(failure: BaseException) -> bool:
    """Whether torch only tells of a connection that broke or stayed silent, not of a fault here."""
    words = str(failure)
    return isinstance(failure, RuntimeError) and any(sign in words for sign in SIGNS_OF_A_LOST_PEER)


def _die_with_agent(place: Place) -> None:
    """End this process when its host's agent is gone: the agent holds a pipe open that then closes.

    The kernel's own notice of a parent's death does not help: the parent is the server that forks workers,
    and that lives as long as they do.
    """

    def wait() -> None:
        # Opened without blocking: an agent that is gone already would never open its end.
        pipe = os.open(lifeline(place.folder), os.O_RDONLY | os.O_NONBLOCK)
        with contextlib.suppress(BlockingIOError):
            os.read(pipe, 1)
            os.kill(os.getpid(), signal.SIGKILL)
        os.set_blocking(pipe, True)
        os.read(pipe, 1)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


def lifeline(folder: str) -> str:
    """The named pipe that an agent holds open while it lives."""
    return os.path.join(folder, "lifeline")


def die_with_parent() -> None:
    """Have the kernel end this process when its parent ends, however that happens (Linux)."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
        if os.getppid() == 1:
            os._exit(1)
