"""Elastic sweeps inside test worlds: real workers and a real store; a script says when the members change."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn

from plait.comm.store import StoreServer
from plait.core.codec import encode
from plait.launcher.membership import Membership, Memberships
from plait.launcher.messages import (
    CoordinatorAnswer,
    CoordinatorQuestion,
    JobMessage,
    JoinReport,
)
from plait.launcher.worker_process import LaunchedWorker
from plait.sweeping import worker as sweep_worker
from plait.sweeping.settings import SweepSettings
from support.averaging import open_store
from support.coordinating import AnsweringThread, ask_over, make_coordinator
from support.elastic import worker_request
from support.meeting import SECRET
from support.world import run_ranks

DEADLINE = timedelta(seconds=50)


@dataclass(frozen=True)
class Change:
    """After the change before, and once `worker` has asked `calls` times whether to stop, others are members.

    It asks before each interval of steps and after each step.

    Where it is `lost`, it kills itself then. With `stop` the rest is asked to stop.
    """

    worker: int
    calls: int
    members: tuple[int, ...]
    lost: bool = False
    stop: bool = False


class ScriptedSweepAgent:
    """In the place of the link to an agent: it changes the members as its script says.

    A worker asks now and then whether to stop, which is when the members may change here.
    """

    def __init__(
        self,
        worker: int,
        store: dist.Store,
        questions: dist.Store,
        first: tuple[int, ...],
        script: Sequence[Change],
    ) -> None:
        self.memberships = Memberships(worker)
        # Nobody is lost here between a change and the end of those that leave.
        self.memberships.dismiss()
        self.store = store
        self.questions = questions
        self._worker = worker
        self._script = list(script)
        self._is_stopped = False
        self._calls = 0
        self._versions = list_versions(first, script)
        threading.Thread(target=self._follow, daemon=True).start()

    @property
    def first(self) -> Membership:
        """The first version that this worker is a member of."""
        return next(each for each in self._versions.values() if self._worker in each.members)

    def send(self, message: JobMessage) -> None:
        if isinstance(message, JoinReport):
            self.store.set(f"test/joined/{message.version}/{self._worker}", "")

    @property
    def stop_requested(self) -> bool:
        self._calls += 1
        for version, change in enumerate(self._script, 2):
            if change.worker == self._worker and self._calls >= change.calls and self._is_next(version):
                self._begin(version, change)
        return self._is_stopped

    def _is_next(self, version: int) -> bool:
        """Whether that version may follow: all members have entered the one before."""
        before = self._versions[version - 1]
        entered = [f"test/joined/{before.version}/{member}" for member in before.members]
        return self.memberships.latest().version == before.version and self.store.check(entered)

    def _begin(self, version: int, change: Change) -> None:
        """Let all workers know of a version, and wait until they have entered it, or die."""
        self.store.set(f"test/version/{version}", str(os.getpid()))
        if change.lost:
            os.kill(os.getpid(), signal.SIGKILL)
        joiners = set(change.members) - set(self._versions[version - 1].members)
        if joiners:
            self.store.wait([f"test/joined/{version}/{each}" for each in joiners], DEADLINE)
        while self.memberships.latest().version < version:
            time.sleep(0.001)

    def ask(self, question: CoordinatorQuestion) -> CoordinatorAnswer:
        return CoordinatorAnswer(question.rank, ask_over(self.questions, question.content))

    def _follow(self) -> None:
        for version, change in enumerate(self._script, 2):
            self.store.wait([f"test/followed/{version}"], DEADLINE)
            if version >= self.first.version:
                self.memberships.put(self._versions[version])
            self._is_stopped = change.stop


def list_versions(first: tuple[int, ...], script: Sequence[Change]) -> dict[int, Membership]:
    lost: tuple[int, ...] = ()
    found = {1: _membership(1, first, lost)}
    for version, change in enumerate(script, 2):
        lost += (change.worker,) if change.lost else ()
        found[version] = _membership(version, change.members, lost)
    return found


def follow_versions(
    store: dist.Store, first: tuple[int, ...], script: Sequence[Change], follow: Callable[[Membership], None]
) -> None:
    """Have the coordinator follow each version, before any worker knows of it."""
    for version, membership in list(list_versions(first, script).items())[1:]:
        store.wait([f"test/version/{version}"], DEADLINE)
        if script[version - 2].lost:
            _wait_until_dead(int(store.get(f"test/version/{version}")))
        follow(membership)
        store.set(f"test/followed/{version}", "")


def _membership(version: int, members: tuple[int, ...], lost: tuple[int, ...]) -> Membership:
    return Membership(version, members, ("here",) * len(members), lost, "test", "a script")


def _wait_until_dead(pid: int) -> None:
    end = time.monotonic() + DEADLINE.total_seconds()
    with contextlib.suppress(psutil.NoSuchProcess):
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < end, f"process {pid} did not die"
            time.sleep(0.001)


def sweep_elastic(
    rank: int,
    settings: SweepSettings,
    folder: Path,
    address: str,
    first: tuple[int, ...],
    script: Sequence[Change],
) -> bool:
    """Take part in the sweep as the worker of that number, to its end."""
    torch.set_num_threads(1)
    stores = open_store(address, rank), open_store(address, rank)
    agent = ScriptedSweepAgent(rank, *stores, first, script)
    is_first = rank in first
    if is_first:
        agent.memberships.put(agent.first)
    request = worker_request(rank, agent.first, address, DEADLINE.total_seconds(), joins=not is_first)
    worker = LaunchedWorker(request, agent)  # type: ignore[arg-type]
    sweep = {"settings": encode(settings), "folder": str(folder), "resume": False}
    sweep_worker.sweep(worker, sweep)
    return True


def run_elastic_sweep(
    settings: SweepSettings, folder: Path, first: tuple[int, ...], *script: Change
) -> tuple[dict[str, Any], list[bool | None]]:
    """The result of an elastic sweep, and whether each worker came to its end: None where it was lost."""
    store = StoreServer(SECRET)
    workers = 1 + max(max(members) for members in [first, *(change.members for change in script)])
    lost = tuple(change.worker for change in script if change.lost)
    address = store.address.text
    coordinator = make_coordinator(settings, folder, first, elastic=True)
    answers = AnsweringThread(open_store(address), coordinator)

    def follow(membership: Membership) -> None:
        with answers.lock:
            coordinator.follow(membership)

    arguments = (open_store(address), first, script, follow)
    threading.Thread(target=follow_versions, args=arguments, daemon=True).start()
    try:
        ended = run_ranks(workers, sweep_elastic, settings, folder, address, first, script, may_die=lost)
        return answers.close(), ended
    finally:
        store.close()


class GatedNet(nn.Module):
    """A linear model that, after a few steps, takes two steps a second until `gate` exists."""

    forwards = 0

    def __init__(self, gate: str) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)
        self._gate = gate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and not os.path.exists(self._gate):
            GatedNet.forwards += 1
            time.sleep(0.01 if GatedNet.forwards < 10 else 0.5)
        return self.layer(x.flatten(1))
