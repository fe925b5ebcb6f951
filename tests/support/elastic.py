"""Elastic runs inside test worlds: real workers and a real store, and versions of the members by a table."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from plait.adapt.changes import BatchSizeChange, ChangeRequest, WorkersChange
from plait.comm.handshake import Address
from plait.comm.store import StoreClient, StoreServer
from plait.core.errors import LostPeer, PeerError
from plait.launcher.membership import Membership, Memberships
from plait.launcher.messages import AgentOrder, BreakReport, JobMessage, Launch, WorkerRequest
from plait.launcher.run_dir import RunDir
from plait.launcher.worker_process import LaunchedWorker, Worker
from plait.schema.hosts import Host
from plait.schema.placement import ElasticRules, Placement
from plait.schema.settings import TrainSettings
from plait.training import components, run_loop
from plait.training.change.join_members import join_members
from plait.training.choose_engine import engine_of_stages, engine_of_sync, make_job_loop, make_sources
from plait.training.engine import ask_rank_0
from plait.training.run import Run
from plait.training.run_loop import RunLoop
from plait.workloads import data
from support.changes import StepTable
from support.meeting import SECRET
from support.world import run_ranks

# The members of each version, and the step after which the job receives it.
Versions = Sequence[tuple[int, tuple[int, ...]]]


def membership(version: int, members: tuple[int, ...], lost: tuple[int, ...] = ()) -> Membership:
    return Membership(version, members, ("here",) * len(members), lost, "test", "a table")


class ScriptedAgent:
    """In the place of the link to an agent: it keeps what the worker says.

    `after_loss` are versions, of which it publishes the next once the worker reports the loss of another one;
    with the address of a `store`, also once another worker does.
    """

    def __init__(self, worker: int, *after_loss: Membership, store: str = "") -> None:
        self.memberships = Memberships(worker)
        self._store = StoreClient(Address(store), SECRET, worker) if store else None
        if self._store is not None:
            threading.Thread(target=self._await_loss, args=[self._store], daemon=True).start()
        # Nobody is lost while others leave.
        self.memberships.dismiss()
        self.stop_requested = False
        self.said: list[JobMessage] = []
        self._after_loss = after_loss

    def send(self, message: JobMessage) -> None:
        self.said.append(message)
        if isinstance(message, BreakReport):
            later = [each for each in self._after_loss if each.version > message.version]
            self.memberships.put(later[0])
            if self._store is not None:
                self._store.set("test/lost", "")

    def _await_loss(self, store: StoreClient) -> None:
        """Publish the first version after a loss that any worker has reported."""
        with contextlib.suppress(PeerError, OSError):
            store.wait(["test/lost"], 60.0)
            self.memberships.put(self._after_loss[0])


class Announcements:
    """Sends this worker each version after its step, as the supervisor would at some moment."""

    def __init__(self, memberships: Memberships, versions: Versions) -> None:
        self._memberships = memberships
        self._at = {step: membership(n, members) for n, (step, members) in enumerate(versions, 1)}

    def next_due(self, step: int) -> int | None:
        # The loop looks for what comes next on every worker.
        if step in self._at and self._at[step].version > self._memberships.latest().version:
            self._memberships.put(self._at[step])
        return min((at for at in self._at if at > step), default=None)

    def due(self, step: int) -> list[ChangeRequest]:
        return []


def worker_request(rank: int, first: Membership, store: str, timeout_s: float, joins: bool) -> WorkerRequest:
    """What an agent asks of a worker of an elastic job on one host, whose first membership that is."""
    placement = Placement(hosts=(Host("here", 1),), elastic=ElasticRules(), timeout_s=timeout_s)
    order = AgentOrder(
        launch=Launch(placement, "", {}),
        index=0,
        capacity=1,
        membership=first,
        secret=SECRET.hex(),
        folder=".",
        modules=(),
        supervisor_timeout_s=None,
    )
    return WorkerRequest(rank, rank, None if joins else first, order, store, "127.0.0.1", "")


def elastic_worker(rank: int, versions: Versions, store: str, agent: ScriptedAgent) -> LaunchedWorker:
    """The worker of that number: of the first version, or one that joins with the first that it is in."""
    numbers = [n for n, (_, members) in enumerate(versions, 1) if rank in members]
    first = membership(numbers[0], versions[numbers[0] - 1][1])
    request = worker_request(rank, first, store, 30.0, joins=numbers[0] > 1)
    if numbers[0] > 1:
        agent.memberships.put(first)
    return LaunchedWorker(request, agent)  # type: ignore[arg-type]


def train_elastic(
    rank: int,
    settings: TrainSettings,
    folder: Path,
    store: str,
    versions: Versions,
    victim: int | None = None,
    after_loss: Membership | None = None,
    is_half_told: bool = False,
) -> dict[str, Any]:
    """Train as the worker of that number; its result, weights, gradient noise and what it told its agent.

    Where there is a `victim`, its `MortalNet` kills it. With `is_half_told`, worker 0 asks for a change and
    dies when worker 1 knows of it and others do not.
    """
    torch.set_num_threads(1)
    dist.destroy_process_group()
    MortalNet.is_victim = rank == victim
    agent = ScriptedAgent(rank) if after_loss is None else ScriptedAgent(rank, after_loss, store=store)
    worker = elastic_worker(rank, versions, store, agent)
    join_members(worker, settings)
    device = torch.device(settings.device if settings.device.startswith("cuda") else "cpu")
    parts = components.build(settings, device)
    run = Run(worker, settings, parts, RunDir(folder))
    table = Announcements(worker.memberships, versions)
    if settings.sync.kind == "auto":
        loop = make_job_loop(worker, settings, parts, RunDir(folder))
        run = loop.run
        run.trial.sources = (table,)
        result = loop.train(resume=False)
    elif settings.pipeline is not None:
        # Nothing more is asked for: a pipeline that drains for it would train otherwise.
        result = RunLoop(run, engine_of_stages(run), [table, *make_sources(run)]).train(resume=False)
    else:
        requests = StepTable({3: WorkersChange(4)})
        if is_half_told:
            requests = StepTable({3: BatchSizeChange(30)} if rank == 0 else {3: None})
        if is_half_told:
            run_loop.ask_rank_0 = half_told(rank)
        make_engine = partial(engine_of_sync, run)
        sources = [table, requests, *make_sources(run)]
        result = RunLoop(run, make_engine(), sources, make_engine).train(resume=False)
    return {
        "result": result,
        "weights": {name: value.tolist() for name, value in run.components.model.state_dict().items()},
        "sync": run.settings.sync.kind,
        "noise": run.trial.noise.state(),
        "said": [type(message).__name__ for message in agent.said],
    }


def run_elastic(
    settings: TrainSettings, folder: Path, versions: Versions, **more: Any
) -> list[dict[str, Any]]:
    """What each worker of an elastic world came to; `more` are further arguments of `train_elastic`."""
    store = StoreServer(SECRET)
    may_die = (more["victim"],) if "victim" in more else ()
    try:
        workers = 1 + max(max(members) for _, members in versions)
        arguments = (settings, folder, store.address.text, versions)
        return run_ranks(workers, train_elastic, *arguments, may_die=may_die, **more)
    finally:
        store.close()


def half_told(number: int) -> Callable[[Worker, Callable[[], Any]], Any]:
    """As `ask_rank_0`, but the first worker dies before all others know what it has decided."""

    def ask_and_die(worker: Worker, ask: Callable[[], Any]) -> Any:
        answers = ask_rank_0(worker, ask)
        is_asked = any(answer["requests"] for answer in answers)
        if is_asked and number == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if is_asked and number == 2:
            raise PeerError("worker 0 is lost", LostPeer.GONE, 0)
        return answers

    return ask_and_die


class MortalNet(nn.Module):
    """A model with running statistics; it kills the process of the victim in its forward number `dies_at`."""

    is_victim = False

    def __init__(self, dies_at: int) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self._dies_at = dies_at

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += 1
            # Workers that average take over the largest count.
            if self.is_victim and self.seen >= self._dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
        return self.layer(x.flatten(1))


class MortalLayers(nn.Sequential):
    """Layers of which two kill the process of the victim in their forward `dies_at`."""

    def __init__(self, dies_at: int, norm: bool = True) -> None:
        last = nn.BatchNorm1d(10) if norm else nn.Identity()
        super().__init__(
            nn.Flatten(), Fatal(64, dies_at), nn.ReLU(), Fatal(12, dies_at), nn.Linear(12, 10), last
        )


class Fatal(nn.Linear):
    """A layer that kills the process of the victim in its forward number `dies_at` in training."""

    def __init__(self, inputs: int, dies_at: int) -> None:
        super().__init__(inputs, 12)
        # No state that a run would refuse to train with: only this test's process has it.
        self._dies_at, self._seen = dies_at, ctypes.c_long(0)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        is_traced = type(input) is not torch.Tensor
        if self.training and MortalNet.is_victim and not is_traced:
            self._seen.value += 1
            if self._seen.value == self._dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(input)


class DigitStream(torch.utils.data.IterableDataset[Any]):
    """The digits as a stream, which says nothing of its length."""

    def __init__(self, split: str) -> None:
        self._digits = data.build("digits", split)

    def __iter__(self) -> Iterator[Any]:
        return (self._digits[number] for number in range(len(self._digits)))
