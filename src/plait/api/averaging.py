"""`Averaging`: workers that each train a copy of a model average their weights after `optimizer.step()`."""

from __future__ import annotations

import contextlib
import secrets
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from plait.api.data_parallel import check_unwrapped
from plait.api.same_model import TrainedParameters, check_optimizer, share_model
from plait.api.world import World, init
from plait.comm.collectives import all_gather_values, broadcast_value
from plait.core.errors import InputError, JobError, LostPeer, PeerError, PlaitError
from plait.core.names import did_you_mean
from plait.core.shown import shown
from plait.schema.sync_options import COLLECTIVE, KEY, KINDS, Options, read_options
from plait.sync.averaging.base import AveragedState, SyncStats
from plait.sync.averaging.collective_averages import Collective
from plait.sync.averaging.optimizer_state import rest_of_state
from plait.sync.averaging.peers import LOOK_S, WaitTimer
from plait.sync.make_averaging import AveragingWorkers, averages_gradients, make_averaging, sources_from

# Further names of a sync with some of its options.
ALIASES: dict[str, tuple[str, dict[str, str]]] = {"diloco": ("local-sgd", {"outer": "nesterov"})}
# Options that need more than the workers of a loop.
NOT_HERE = {
    "lease_s": "workers of a loop send no heartbeats, and one is gone when its process ends",
    "dedicated": "a dedicated server takes no steps, and each worker that runs the loop does",
}
# How often a worker reports its steps to those that wait for it.
REPORT_S = 1.0


class Averaging:
    """Within it, workers average their weights after each `optimizer.step()`, as `sync` does.

    Each worker trains a copy of `model` on samples that only it has, at its speed; nothing else of the loop
    changes.

    At the start the model of rank 0 is copied to all workers. At the end all have the same: the mean of their
    weights, buffers and optimizer's states. Weights are the parameters that require a gradient when the block
    begins. With one worker it is a plain loop.

    `sync` and its options are those of a job's `parallel.sync` and `parallel.sync_options`: `partial-reduce`
    (with the workers that are ready), `ad-psgd` and `pair-averaging` (with a random other one, in a thread),
    `pair-sync` (in random pairs), `local-sgd` (all, every N steps), `diloco` (the same with an outer
    optimizer), `sma` (a step towards the mean) and `hetpipe` (a parameter server). `seed` decides which
    workers meet; it is the same on all of them.

    Workers may take unlike numbers of steps: one that leaves the block waits for the others, which go on.
    Its weights of then are in the mean at the end, so they should not be much older than the others'.

    Examples:
        ```python
        model = nn.Linear(8, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with plait.Averaging(model, optimizer, "local-sgd", every=4):
            for _ in range(8):
                optimizer.zero_grad()
                model(torch.randn(16, 8)).square().mean().backward()
                optimizer.step()
        ```
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        sync: str = "partial-reduce",
        *,
        seed: int = 0,
        world: World | None = None,
        **sync_options: bool | float | str,
    ) -> None:
        self.world = init() if world is None else world
        self.model, self.optimizer, self.seed = model, optimizer, seed
        if not isinstance(sync, str):
            raise InputError(
                f"Averaging: sync: found {shown(sync)}, expected a name, such as 'partial-reduce'"
            )
        self.sync, more = ALIASES.get(sync, (sync, {}))
        self.options = _read(self.sync, {**more, **sync_options}, self.world.world_size)
        _check(model, optimizer)
        # What averages have cost since the block began: groups, their members, waits and bytes.
        self.stats = SyncStats()
        self._running: _Running | None = None
        # Tells of a loop that is not in its block.
        self._outside = optimizer.register_step_post_hook(self._warn)

    def _warn(self, *_: object) -> None:
        self._outside.remove()
        if self.world.world_size > 1:
            warnings.warn(
                "Averaging: optimizer.step was called outside of its block, where nothing is averaged; write "
                "`with plait.Averaging(...):` around the loop",
                stacklevel=2,
            )

    def synchronize(self) -> None:
        """Give all workers the same state in the middle of the loop, such as for an evaluation.

        All call it; it is what leaving the block does.
        """
        if self._running is not None:
            self._running.averaging.synchronize()

    def __enter__(self) -> Averaging:
        if self._running is not None:
            raise InputError("Averaging: its block is entered twice; use one Averaging after the other")
        self._outside.remove()
        if self.world.world_size > 1:
            self._running = _Running(self)
            self.stats = self._running.averaging.stats
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        running, self._running = self._running, None
        if running is not None and kind is None:
            if running.steps == 0:
                warnings.warn(
                    "Averaging: its optimizer took no step in the block, so only the weights at its end are "
                    "averaged; give it the optimizer that the loop steps",
                    stacklevel=2,
                )
            running.end()
        elif running is not None:
            running.abandon()


class _Running:
    """The averaging of a block with several workers, which all make theirs together."""

    def __init__(self, settings: Averaging) -> None:
        model, optimizer, options = settings.model, settings.optimizer, settings.options
        _check_same([settings.sync, str(options), settings.seed, type(optimizer).__name__])
        share_model("Averaging", model, settings.world)
        self._trained = TrainedParameters("Averaging", model)
        weights, buffers = self._trained.parameters, list(model.buffers())
        self._world, self._kind = settings.world, settings.sync
        rendezvous = self._world.rendezvous
        self._store = rendezvous.store
        self._prefix: str = broadcast_value(f"plait/averaging/{secrets.token_hex(8)}", 0)
        sources = sources_from(weights, buffers, optimizer, options)
        scaler = torch.amp.GradScaler(enabled=False)
        rest = rest_of_state(self._store, self._prefix, weights, buffers, optimizer, scaler)
        workers = AveragingWorkers(
            rendezvous, self._store, self._prefix, self._world.hosts, self._world.rank, set, may_leave=True
        )
        self.averaging = make_averaging(workers, sources, options, settings.seed, when_synchronized=rest)
        self._mean = Collective(AveragedState(sources[:2], rest))
        self.steps, self._reported = 0, time.monotonic()
        if averages_gradients(options):
            self._hook = optimizer.register_step_pre_hook(self._before_step)
        else:
            self._hook = optimizer.register_step_post_hook(self._after_step)

    def _before_step(self, optimizer: object, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        if any(value is not None for value in (*args[1:], *named.values())):
            raise InputError(
                "Averaging: average='gradients' needs them before the step, and optimizer.step was given a "
                "closure that computes them; use average='weights'"
            )
        self._after_step(optimizer, args, named)

    def _after_step(self, optimizer: object, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._trained.check()
        self.averaging.after_update()
        self.steps += 1
        now = time.monotonic()
        if now - self._reported >= REPORT_S:
            self._reported = now
            self._report("steps", str(self.steps))

    def end(self) -> None:
        """Leave, wait until all have left, and take the mean of all."""
        self._hook.remove()
        if self._kind in COLLECTIVE:
            # A worker that is early takes part in the averages of the others until they are done, too.
            self.averaging.synchronize()
            dist.barrier()
            self.averaging.close()
            return
        try:
            self.averaging.close()
        except BaseException:
            self._report("left", "failed")
            raise
        self._report("left", "done")
        self._await_others()
        self._mean.synchronize()

    def abandon(self) -> None:
        """Leave because of an error here: the others go on as far as they can without this worker."""
        self._hook.remove()
        self._report("left", "failed")
        with contextlib.suppress(PlaitError):
            self.averaging.close()

    def _await_others(self) -> None:
        """Wait as long as the others take steps."""
        waiting = set(range(self._world.world_size)) - {self._world.rank}
        steps: dict[int, bytes] = {}
        waited = WaitTimer(time.monotonic, self._world.rendezvous.timeout_s)
        while True:
            for rank in sorted(waiting):
                if (left := self._read("left", rank)) == b"failed":
                    message = f"worker {rank} left the block with an error; look at its output"
                    raise PeerError(f"Averaging: {message}", LostPeer.GONE, rank)
                now = self._read("steps", rank) or b"0"
                if left or steps.get(rank) != now:
                    steps[rank] = now
                    waited.restart()
                waiting -= {rank} if left else set()
            if not waiting:
                return
            if waited.is_over():
                names = ", ".join(map(str, sorted(waiting)))
                raise PeerError(
                    f"Averaging: worker {names} took no step for {waited.limit_s:g} s and has not left the "
                    "block; it hangs or is gone, or its steps take longer than timeout_s of plait.init",
                    LostPeer.SILENT,
                    min(waiting),
                )
            time.sleep(LOOK_S)

    def _report(self, what: str, value: str) -> None:
        self._store.set(f"{self._prefix}/{what}/{self._world.rank}", value)

    def _read(self, what: str, rank: int) -> bytes:
        """What a worker has reported, empty if nothing."""
        key = f"{self._prefix}/{what}/{rank}"
        return self._store.get(key) if self._store.check([key]) else b""


def _read(sync: str, given: dict[str, bool | float | str], workers: int) -> Options:
    """The options of a sync that averages, checked as those of a job."""
    for name in NOT_HERE.keys() & given.keys():
        raise InputError(f"Averaging: found the option {name}={given[name]!r}, but {NOT_HERE[name]}")
    if sync in ("all-reduce", "auto"):
        raise InputError(
            f"Averaging: found {sync!r}, which averages no weights; use plait.DataParallel, which sums "
            "gradients, or name a sync such as 'partial-reduce'"
        )
    if sync not in KINDS:
        names = sorted({*KINDS, *ALIASES} - {"all-reduce"})
        raise InputError(f"Averaging: sync: found {sync!r}{did_you_mean(str(sync), names)}")
    try:
        return read_options(sync, given, workers)
    except JobError as failure:  # the keys of a job are arguments here
        raise InputError(f"Averaging: {str(failure).removeprefix(KEY).lstrip('.: ')}") from None


def _check(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuse a model that another object keeps equal, and an optimizer of another model."""
    for value, expected in ((model, nn.Module), (optimizer, torch.optim.Optimizer)):
        if not isinstance(value, expected):
            raise InputError(
                f"Averaging: found a {type(value).__name__} where a torch {expected.__name__} was expected; "
                "the model comes first, then its optimizer"
            )
    check_unwrapped("Averaging", model)
    TrainedParameters("Averaging", model)  # there must be some
    check_optimizer("Averaging", model, optimizer)


def _check_same(values: list[str | int]) -> None:
    """Refuse arguments that differ between workers, which call it together."""
    of_all: list[list[str | int]] = all_gather_values(values)
    for rank, others in enumerate(of_all):
        for first, other in zip(of_all[0], others):
            if first != other:
                raise InputError(
                    f"Averaging: found {other} on rank {rank} and {first} on rank 0; give all workers the "
                    "same sync, options, seed and kind of optimizer"
                )
