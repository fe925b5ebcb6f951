"""Workers that another launcher has started: each process of a `World` is one of them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from plait.api.world import World, world_of_one
from plait.comm.collectives import all_gather_values, broadcast_value
from plait.comm.rendezvous import Rendezvous
from plait.core.errors import InputError, PlaitError
from plait.core.logs import forwarding_warnings
from plait.core.names import resolve
from plait.launcher.display import Display, Silent, WorkerState
from plait.launcher.membership import fixed_memberships
from plait.launcher.messages import Launch
from plait.launcher.supervision.stop_signals import handling_stop_signals


class JoinedWorker:
    """A `Worker` that is a process of `world`; SIGTERM, SIGINT and SIGHUP ask it to stop."""

    def __init__(self, world: World, display: Display) -> None:
        self.rank = self.id = world.rank
        self.local_rank = world.local_rank
        self.world_size = world.world_size
        self.hosts = world.hosts
        self.host = world.hosts[world.rank]
        self.rendezvous: Rendezvous = world.rendezvous
        self.store: dist.Store = world.rendezvous.store
        self.timeout_s = world.rendezvous.timeout_s
        self.memberships = fixed_memberships(world.rank, world.hosts)
        self._display = display
        self._is_asked = False

    def stop_requested(self) -> bool:
        return self._is_asked

    def ask_to_stop(self) -> None:
        self._is_asked = True

    def report(self, progress: dict[str, Any]) -> None:
        self._display.progressed(progress)

    def ask(self, question: Mapping[str, Any]) -> Mapping[str, Any]:
        raise PlaitError("there is no coordinator in a job that another launcher has started")

    def join(self, backend: str) -> None:
        """Do nothing: `init` has created the process group."""


class JoinedWorkers:
    """The processes of `world` as the workers of a launch; made by rank 0, while the others `follow`."""

    def __init__(self, world: World, launch: Launch, display: Display) -> None:
        self.warnings: list[str] = []
        self._world, self._launch, self._display = world, launch, display

    def run(self, prepare: Callable[[], None]) -> dict[int, Any]:
        launch = self._launch
        _send(self._world, {"entry": launch.entry, "check": launch.check, "settings": launch.settings})
        _check_everywhere(self._world, launch.check, launch.settings)
        with forwarding_warnings(self._warn):
            failure: PlaitError | None = None
            try:
                prepare()
            except PlaitError as error:  # the others wait
                failure = error
            _agree(self._world, failure)
            self._display.started(_states_of(self._world))
            return {0: _train(self._world, launch.entry, launch.settings, self._display)}

    def _warn(self, text: str) -> None:
        self.warnings.append(text)
        self._display.printed(f"warning: {text}")

    def request_control(self, request: Any) -> Any:
        raise PlaitError("the launcher that started these workers decides how many there are")


def start_in_process(launch: Launch, display: Display) -> JoinedWorkers:
    """This process as the only worker of `launch`, so that a debugger works and errors are the user's own."""
    settings = {**launch.settings, "in_process": True}
    world = world_of_one(settings["settings"]["device"], launch.placement.timeout_s)
    return JoinedWorkers(world, replace(launch, settings=settings), display)


def follow(world: World) -> Any:
    """Do what rank 0 starts with `JoinedWorkers`, in all other processes; returns what the entry returns.

    InputError if rank 0 refuses.
    """
    order = broadcast_value(None, 0)
    if "failure" in order:
        raise RefusedElsewhereError(order["failure"])
    _check_everywhere(world, order["check"], order["settings"])
    _agree(world, None)
    _states_of(world)
    return _train(world, order["entry"], order["settings"], Silent())


class RefusedElsewhereError(InputError):
    """Another process has refused the job, and says why."""

    is_told = True


def refuse(world: World, failure: BaseException) -> None:
    """Tell the others, who wait in `follow`, that rank 0 does not start."""
    if world.world_size > 1:
        _send(world, {"failure": str(failure)})


def _send(world: World, order: Mapping[str, Any]) -> None:
    if world.world_size > 1:
        broadcast_value(order, 0)


def _check_everywhere(world: World, check: str | None, settings: Mapping[str, Any]) -> None:
    """Check the settings in every process, as the agent of each host does in a job that Plait launches."""
    failure: InputError | None = None
    try:
        if check is not None:
            resolve(check, "check")(settings)
    except InputError as error:
        failure = error
    _agree(world, failure)


def _agree(world: World, failure: PlaitError | None) -> None:
    """Raise on all processes if one of them has failed; the first failure is told."""
    mine = None if failure is None else str(failure)
    told = [mine] if world.world_size == 1 else all_gather_values(mine)
    if failure is not None:
        raise failure
    for rank, text in enumerate(told):
        if text is not None:
            raise RefusedElsewhereError(f"worker {rank} on {world.hosts[rank]}: {text}")


def _states_of(world: World) -> tuple[WorkerState, ...]:
    pids = [os.getpid()] if world.world_size == 1 else all_gather_values(os.getpid())
    return tuple(WorkerState(rank, host, pid) for rank, (host, pid) in enumerate(zip(world.hosts, pids)))


def _train(world: World, entry: str, settings: Mapping[str, Any], display: Display) -> Any:
    worker = JoinedWorker(world, display)

    def stop(number: int) -> None:
        if worker.stop_requested():  # a second signal ends the process
            signal.default_int_handler(number, None)
        worker.ask_to_stop()

    with handling_stop_signals(stop):
        return resolve(entry, "entry")(worker, settings)
