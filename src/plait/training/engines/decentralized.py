"""Decentralized training: members take shares of batches at their own pace, update alone, average weights.

At the end of an interval of steps all living members come to the same state, and what is due is done on it.
Nothing here needs all workers: one that ends or is stopped is left out, and the lowest rank that is there
keeps the record.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
import torch.distributed as dist

from plait.adapt.changes import BatchSizeChange, Change
from plait.core import run_events
from plait.core.errors import JobError, LostPeer, PeerError
from plait.data import loader
from plait.data.sampler import GlobalBatch, mix
from plait.pipeline import named_state
from plait.schema.sync_options import LOCKSTEP, HetPipeOptions, LeaseOptions, Options, read_options
from plait.sync.averaging.base import Averaging
from plait.sync.averaging.parameter_server import serving
from plait.sync.averaging.peers import WaitTimer
from plait.sync.averaging.whole_state import rest_of_state
from plait.training.audit.averages import is_mean
from plait.training.audit.schedule import is_audited
from plait.training.audit.whole_model import ADVICE, AuditedStep
from plait.training.change.members import Mark
from plait.training.checkpoint import Checkpoint, EngineState
from plait.training.checks.replicas import describe_rows, own_buffers
from plait.training.engine import IntervalResult, cannot_apply
from plait.training.engines.averaging import PREFIX as SYNC_PREFIX
from plait.training.engines.averaging import averages_gradients, make_averaging, sources_of
from plait.training.engines.throughput import ThroughputMeter
from plait.training.engines.train_step import TrainStep
from plait.training.engines.work_queue import Speed, WorkItem, WorkQueue
from plait.training.evaluate import means, sums_over_share
from plait.training.monitoring.asked import is_monitored
from plait.training.monitoring.own_pace import ShareMonitor
from plait.training.run import Run

LOOK_S = 0.01
PREFIX = "plait/run"


class Member(Protocol):
    """What takes work at its own pace and averages with the others: a worker, or a pipeline of workers.

    Members are numbered by their places. `averaging` is there once it is open.
    """

    place: int
    places: int
    averaging: Averaging
    # What measures its updates, where the job asks for signals.
    monitor: ShareMonitor | None

    @property
    def is_first(self) -> bool:
        """Whether this worker is the member's first, which takes work and asks for all of its workers."""

    def from_first(self, find: Callable[[], Any]) -> Any:
        """What `find` returns on the member's first worker, on all of them; plain values."""

    def workers_at(self, place: int) -> tuple[int, ...]:
        """The workers that are lost with a place; the first of them keeps a record."""

    def load(self, state: Checkpoint) -> None:
        """Go on from the tensors of a checkpoint."""

    def held_state(self) -> EngineState:
        """What others need to begin where this one does."""

    def open(self) -> bool:
        """Link up with the other members; whether some links go through the world's process group."""

    def update(self, step: int, share: int, batch: loader.Batch, factor: float) -> torch.Tensor:
        """Update on a share of a step's batch and average with others; the share's loss."""

    def weight_sums(self) -> list[float]:
        """The sum of the elements of each weight, where the member can tell."""

    def synchronize(self) -> tuple[int, ...]:
        """Come to the same state as all who live, whose places it returns."""

    def sums_over(self, share: int, shares: int) -> torch.Tensor:
        """The sums of loss and metric over a share of the test split."""

    def state(self) -> EngineState:
        """The whole state, on the first worker; called by the member that writes checkpoints alone."""

    def close(self) -> None:
        """End the links to the other members."""


class WholeModel:
    """A member that is one worker with the whole model; `hosts` names the host of each rank.

    `name` distinguishes its keys in the store from those of earlier averaging in the same run.
    """

    is_first = True

    def __init__(self, run: Run, hosts: Sequence[str], name: str = "") -> None:
        self._run = run
        self._hosts = hosts
        self._prefix = f"{SYNC_PREFIX}{name}"
        self.place, self.places = run.worker.rank, run.worker.world_size
        sync = run.settings.sync
        self._options = read_options(sync.kind, sync.options, self.places)
        self._sync_state: named_state.Tensors = {}
        self.monitor = ShareMonitor(run) if is_monitored(run.settings) else None
        self._samples = 0
        self._audit: AuditedStep | None = None

    def from_first(self, find: Callable[[], Any]) -> Any:
        return find()

    def workers_at(self, place: int) -> tuple[int, ...]:
        return (place,)

    def load(self, state: Checkpoint) -> None:
        self._run.parts.load(state)
        self._sync_state = state.sync

    def held_state(self) -> EngineState:
        return replace(self._run.parts.state(), sync=self._sync_state)

    def open(self) -> bool:
        run, parts = self._run, self._run.parts
        if names := list(own_buffers(parts.model)):
            (content,) = parts.train_set.example_batches((4,), run.settings.seed)
            inputs, _ = loader.to_device(content, parts.device, parts.dtype)
            if words := describe_rows(parts.model, inputs, names):
                raise JobError(f"model: {words}")
        self._step = TrainStep(parts, run.settings, rank=run.worker.rank, own_monitor=self.monitor)
        weights, buffers = list(parts.model.parameters()), list(parts.model.buffers())
        rest = rest_of_state(run.worker.store, self._prefix, weights, buffers, parts.optimizer, parts.scaler)
        self.averaging = make_averaging(
            run.worker,
            self._hosts,
            sources_of(parts, self._options),
            self._options,
            run.settings.seed,
            prefix=self._prefix,
            step=run.trial.step,
            when_synchronized=rest,
        )
        if self._sync_state:
            self.averaging.load_state(self._by_weight(self._sync_state))
        if averages_gradients(self._options):
            self._step.before_update = self._average_gradients
        if self.monitor is not None:
            self.monitor.warn_without_parts(averages_gradients(self._options))
        return False

    def _average_gradients(self) -> None:
        with contextlib.ExitStack() as around:
            if self._audit is not None:
                around.enter_context(self._audit.averaging_before_update())
            if self.monitor is not None:
                weights = list(self._run.parts.model.parameters())
                around.enter_context(self.monitor.averaging_gradients(weights, self._samples, self.averaging))
            self.averaging.after_update()

    def update(self, step: int, share: int, batch: loader.Batch, factor: float) -> torch.Tensor:
        # Random numbers depend on the seed, the step and the share alone, whichever worker takes it.
        loader.seed_all(mix(self._run.settings.seed, step, share))
        loss = torch.zeros((), dtype=torch.float64)
        self._samples = batch.count
        if batch.count:
            loss = self._audited_step(step, share, batch, factor)
        if not averages_gradients(self._options):
            self.averaging.after_update()
        return loss

    def _audited_step(self, step: int, share: int, batch: loader.Batch, factor: float) -> torch.Tensor:
        """A step alone, taken a second time where that is due."""
        run = self._run
        if not is_audited(run.settings, step):
            return self._step.step([batch], [factor])[0][0]
        self._audit = AuditedStep(run, step, mix(run.settings.seed, step, share), together=False)
        self._step.recorded = self._audit.parts
        loss = self._step.step([batch], [factor])[0][0]
        self._step.recorded = None
        self._audit.end(run.audits, loss)
        self._audit = None
        return loss

    def weight_sums(self) -> list[float]:
        return [float(weight.detach().double().sum()) for weight in self._run.parts.model.parameters()]

    def synchronize(self) -> tuple[int, ...]:
        return self.averaging.synchronize()

    def sums_over(self, share: int, shares: int) -> torch.Tensor:
        return sums_over_share(self._run.parts, self._run.settings, share, shares)

    def state(self) -> EngineState:
        """With what the sync keeps besides the state of workers, by the names of the weights."""
        parts = self._run.parts
        own = {
            f"{parts.names[weight]}/{key}": tensor
            for key, tensors in self.averaging.state().items()
            for weight, tensor in zip(parts.model.parameters(), tensors)
        }
        return replace(parts.state(), sync=own)

    def close(self) -> None:
        self.averaging.close()

    def _by_weight(self, state: named_state.Tensors) -> dict[str, list[torch.Tensor]]:
        """What `state` wrote down of the sync: for each key a tensor for each weight, or none."""
        parts = self._run.parts
        names = [parts.names[weight] for weight in parts.model.parameters()]
        keys = {path.rpartition("/")[2] for path in state}
        return {
            key: [state[f"{name}/{key}"] for name in names]
            for key in sorted(keys)
            if all(f"{name}/{key}" in state for name in names)
        }


class DecentralizedEngine:
    """Steps that members take as they can: each updates alone, and averages weights with some others.

    `name` is as that of `WholeModel`. With `keep_world` the process group stays for who comes after, and the
    loss of a worker ends the run.
    """

    def __init__(self, run: Run, member: Member, name: str = "", keep_world: bool = False) -> None:
        self._run = run
        self._member = member
        self._prefix = f"{PREFIX}{name}"
        self._keep_world = keep_world
        sync = run.settings.sync
        self._options = read_options(sync.kind, sync.options, member.places)
        self._members = tuple(range(member.places))
        # Places whose workers serve the others take no work; the others share it.
        self._idle = _dedicated(self._options, member.places)
        self._intervals = self._evaluations = self._asked = 0
        self._speed = Speed()
        # Keys in the store that someone who was stopped may still come to.
        self._stale: list[str] = []
        self._throughput = ThroughputMeter()
        # Samples of the interval that were recorded, and this worker's last step, which was not.
        self._counted = 0
        self._unrecorded: tuple[int, int, torch.Tensor, float] | None = None
        self._difference_key = f"{self._prefix}/difference"
        self._sums_before: list[float] = []

    def load(self, state: Checkpoint) -> None:
        self._member.load(state)

    def held_state(self) -> EngineState:
        return self._member.held_state()

    def open(self) -> None:
        needs_world = self._member.open()
        if self._member.averaging.tolerant and not self._keep_world:
            leave_world(needs_world)
            assert isinstance(self._options, LeaseOptions)
            self._run.worker.tolerate_losses(self._options.lease_s)

    def train(self, steps: int) -> IntervalResult:
        """Work on these steps, then come to the same state."""
        run, member, settings = self._run, self._member, self._run.settings
        batches = list(itertools.islice(run.order(), steps))
        queue = WorkQueue(
            run.worker.store,
            f"{self._prefix}/claims/{self._intervals}",
            batches,
            member.places - len(self._idle),
            member.place,
            member.places,
            fixed=settings.sync.kind in LOCKSTEP,
            ahead=settings.data.loaders > 0,
            speed=self._speed,
        )
        self._counted = 0
        self._work(queue)
        members = self._synchronize()
        self._delete_stale(members)
        while member.from_first(queue.is_work_left):
            self._work(queue)
            members = self._synchronize()
        if any(is_audited(settings, run.trial.step + i) for i in range(len(batches))):
            self._audit_average(members)
        self._intervals += 1
        self._stale += queue.store_keys()
        done = member.from_first(queue.done)
        after = batches[done - 1].after if done else None
        samples = sum(len(b.samples) for b in batches[:done])
        self._record_step(samples)
        self._exchange_signals(members, run.trial.step + done, samples)
        self._note_throughput(force=True)
        self._note_members(members, run.trial.step + done)
        if member.from_first(lambda: run.worker.store.check([self._difference_key])):
            # Where one worker has found a difference, all of them stop by it.
            run.audits.difference = run.worker.store.get(self._difference_key).decode()
        position = after or run.trial.position
        return IntervalResult(done, (position,), stopped=member.from_first(queue.stopped))

    def _synchronize(self) -> tuple[int, ...]:
        self._sums_before = self._member.weight_sums()
        places = self._member.synchronize()
        return tuple(self._member.from_first(lambda: places))

    def _audit_average(self, members: tuple[int, ...]) -> None:
        """Compare what members hold after they took the mean with each other, and with what each brought."""
        run, own = self._run, self._member.weight_sums()
        gathered = self._gather(f"sums/{self._intervals}", [*self._sums_before, *own], members, "sums")
        before, after = ([n[at : at + len(own)] for n in gathered.values()] for at in (0, len(own)))
        if any(numbers != after[0] for numbers in after):
            what = "workers that took the mean of their weights do not hold the same"
            run.audits.add_difference(run.trial.step, what, ADVICE)
        elif len(gathered) == self._member.places and not is_mean(self._member.averaging, before, after[0]):
            what = "the weights that workers have in common are not the mean of what each had"
            run.audits.add_difference(run.trial.step, what, ADVICE)

    def _work(self, queue: WorkQueue) -> None:
        """Take work until none is left."""
        run = self._run
        for item, batch in self._items(queue) if self._member.place not in self._idle else ():
            step = run.trial.step + item.index
            loss = self._update(step, item, batch)
            # Others have taken the work before this.
            self._record_step(item.before)
            self._unrecorded = (step + 1, batch.epoch, loss, run.lr(step))
            self._throughput.count(step + 1, batch.count)
            self._note_throughput()
            if run.audits.difference is not None:
                run.worker.store.set(self._difference_key, run.audits.difference)
            if self._member.is_first and (run.worker.stop_requested() or run.audits.difference is not None):
                queue.stop()

    def _items(self, queue: WorkQueue) -> Iterator[tuple[WorkItem, loader.Batch]]:
        """The work of this member, as its first worker takes it; the others have no samples."""
        work = self._load(queue) if self._member.is_first else iter(())
        while True:
            own = next(work, None)
            if (number := self._number_of(own)) is None:
                return
            yield own or queue.without_samples(number)

    def _number_of(self, own: tuple[WorkItem, loader.Batch] | None) -> int | None:
        """The number of the work that the member's first worker has taken, if there was any."""
        number: int | None = self._member.from_first(lambda: None if own is None else own[0].number)
        return number

    def _update(self, step: int, item: WorkItem, batch: loader.Batch) -> torch.Tensor:
        member, factor = self._member, self._run.trial.lr_factor(step)
        if member.monitor is None:
            return member.update(step, item.place, batch, factor)
        with member.monitor.updating(member.averaging):
            return member.update(step, item.place, batch, factor)

    def _exchange_signals(self, members: tuple[int, ...], step: int, samples: int) -> None:
        """Let all living members know what each has measured in an interval."""
        monitor = self._member.monitor
        if monitor is not None:
            gathered = self._gather(f"signals/{self._intervals}", monitor.take(), members, "signals")
            monitor.arrive(step, samples, gathered)

    def _record_step(self, samples: int) -> None:
        """Record this worker's last step; `samples` of the interval were used by then, all workers'."""
        if self._unrecorded is not None:
            self._run.metrics.step(*self._unrecorded, max(0, samples - self._counted))
            self._counted = max(samples, self._counted)
        self._unrecorded = None

    def _delete_stale(self, members: tuple[int, ...]) -> None:
        """Delete the keys of earlier intervals once all who may look at them have come to a later one."""
        member = self._member
        if not set(members) | member.averaging.ended() >= set(range(member.places)):
            return
        for key in self._stale if member.is_first and member.place == min(members) else ():
            self._run.worker.store.delete_key(key)
        self._stale = []

    def _load(self, queue: WorkQueue) -> Iterator[tuple[WorkItem, loader.Batch]]:
        """The work that this worker begins, with its samples; loader processes read ahead of it."""
        for item, batch in self._fetch(queue.take(), self._run.settings.data.loaders):
            if queue.leaves():
                return
            if queue.begin(item):
                yield item, batch
        yield from self._fetch(queue.take_over(), loaders=0)

    def _fetch(self, items: Iterator[WorkItem], loaders: int) -> Iterator[tuple[WorkItem, loader.Batch]]:
        taken: deque[WorkItem] = deque()

        def order() -> Iterator[GlobalBatch]:
            for item in items:
                taken.append(item)
                yield item.batch

        for batch in self._run.load(self._run.parts.train_set, order(), loaders=loaders):
            yield taken.popleft(), batch

    def evaluate(self, slots: Sequence[int] = (0,)) -> list[dict[str, float]]:
        """Mean loss and metric over the test split, shared among those who have just synchronized."""
        self._evaluations += 1
        member, own = self._member, None
        if member.place in self._members:
            own = member.sums_over(self._members.index(member.place), len(self._members)).tolist()
        gathered = self._gather(f"evaluation/{self._evaluations}", own, self._members, "the evaluation")
        total = torch.tensor(list(gathered.values()), dtype=torch.float64).reshape(-1, 4).sum(0)
        return [means(self._run.parts, total)]

    def _gather(
        self, name: str, own: list[float] | None, members: tuple[int, ...], what: str
    ) -> dict[int, list[float]]:
        """The numbers of all `members` that live, by place; the same on all that ask."""
        gathered = self._member.from_first(lambda: self._gathered(name, own, members, what))
        return {int(place): numbers for place, numbers in gathered}

    def _gathered(self, name: str, own: list[float] | None, members: tuple[int, ...], what: str) -> Any:
        """The numbers of `members`, through the store.

        A worker that ends meanwhile takes its numbers with it. The first that has all there are says what
        holds, so that all decide alike.
        """
        member, worker = self._member, self._run.worker
        key, store = f"{self._prefix}/{name}", worker.store
        if own is not None:
            store.set(f"{key}/{member.place}", json.dumps(own))
        self._stale += [f"{key}/all", *(f"{key}/{each}" for each in members)]
        waiting, found = set(members), {}
        waited = WaitTimer(time.monotonic, worker.timeout_s)
        while waiting and not store.check([f"{key}/all"]):
            for each in [m for m in waiting if store.check([f"{key}/{m}"])]:
                found[each] = json.loads(store.get(f"{key}/{each}"))
                waiting.discard(each)
                waited.restart()
            waiting &= set(member.averaging.living())
            if waiting and waited.is_over():
                late = [member.workers_at(each)[0] for each in sorted(waiting)]
                raise PeerError(
                    f"worker {worker.rank} waited {waited.limit_s:g} s for {what} of worker "
                    f"{', '.join(map(str, late))}; it hangs, or is slower than parallel.timeout_s allows",
                    LostPeer.SILENT,
                    late[0],
                )
            time.sleep(LOOK_S if waiting else 0)
        return json.loads(store.compare_set(f"{key}/all", "", json.dumps(sorted(found.items()))))

    def state(self, slot: int = 0) -> EngineState | None:
        state = self._member.state() if self._writes() else None
        return state if self._member.is_first else None

    def _writes(self) -> bool:
        """Whether it is this member that writes checkpoints."""
        return self._member.place == min(self._members)

    def finish(self, save: Callable[[], None]) -> None:
        """Save, and leave only once someone has: the next where the writer is lost."""
        save()
        while members := self._member.from_first(self._await_saved):
            self._note_members(tuple(members), self._run.trial.step)
            save()

    def _await_saved(self) -> tuple[int, ...]:
        """Return once the last checkpoint is saved; or, where the writer is lost, those that live."""
        saved, store = f"{self._prefix}/saved", self._run.worker.store
        if self._writes():
            store.set(saved, "1")
        while not store.check([saved]):
            time.sleep(LOOK_S)
            living = tuple(sorted(set(self._members) & set(self._member.averaging.living())))
            if min(self._members) not in living and living:
                return living
        return ()

    def ask_first(self, ask: Callable[[], Any]) -> Any:
        """Of those that live: should the first be lost before it has answered, the next one is asked."""
        return self._member.from_first(lambda: self._asked_first(ask))

    def _asked_first(self, ask: Callable[[], Any]) -> Any:
        self._asked += 1
        key, store, worker = f"{self._prefix}/asked/{self._asked}", self._run.worker.store, self._run.worker
        self._stale.append(key)
        waited = WaitTimer(time.monotonic, worker.timeout_s)
        while not store.check([key]):
            first = min(set(self._members) & set(self._member.averaging.living()))
            if self._member.place == first:
                return json.loads(store.compare_set(key, "", json.dumps(ask())))
            if waited.is_over():
                asked = self._member.workers_at(first)[0]
                raise PeerError(
                    f"worker {worker.rank} waited {waited.limit_s:g} s for what worker {asked} decides",
                    LostPeer.SILENT,
                    asked,
                )
            time.sleep(LOOK_S)
        return json.loads(store.get(key))

    def apply(self, change: Change) -> None:
        # Work is drawn anew for each interval.
        if not isinstance(change, BatchSizeChange):
            raise cannot_apply(change, f"sync {self._run.settings.sync.kind}")

    def settle(self, staying: Sequence[int]) -> None:
        """All have the same state at the end of each interval."""

    def choose_source(self, marks: Sequence[Mark]) -> int | None:
        raise JobError("parallel.elastic: workers that average come and go by themselves")

    def warm_up(self) -> None:
        """No worker joins that averages."""

    def close(self) -> None:
        self._member.close()

    def _note_members(self, members: tuple[int, ...], step: int) -> None:
        """Keep the record where the worker that kept it is gone; record the workers that are missing."""
        run, averaging, workers_at = self._run, self._member.averaging, self._member.workers_at
        lost = sorted(w for place in set(self._members) - set(members) for w in workers_at(place))
        self._members = members
        if lost and self._writes() and self._member.is_first:
            run.take_over_record()
            run.metrics.warn(
                f"worker {', '.join(map(str, lost))} is gone or silent since step {step}; "
                f"{sum(len(workers_at(m)) for m in members)} of {run.worker.world_size} workers go on"
            )
            for worker in lost:
                run.note(run_events.WorkerLost(worker, step))
        distance = averaging.stats.distances[-1] if averaging.stats.distances else 0.0
        # The workers that this one averages with: those with the same stage.
        index = workers_at(self._member.place).index(run.worker.rank)
        run.note(run_events.Settled(step, tuple(workers_at(m)[index] for m in members), distance))

    def _note_throughput(self, force: bool = False) -> None:
        if force or self._throughput.is_due():
            self._run.note(self._throughput.event(self._member.averaging.stats))


def _dedicated(options: Options, places: int) -> range:
    if isinstance(options, HetPipeOptions) and options.dedicated:
        return serving(places, options.servers, dedicated=True)
    return range(0)


def leave_world(needed: bool) -> None:
    """End the process group once all are linked, unless some links `needed` it.

    Collectives, and a group's end, would wait for workers that are gone.
    """
    if dist.is_initialized() and not needed:
        dist.destroy_process_group()
