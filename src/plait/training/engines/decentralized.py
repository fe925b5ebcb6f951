"""Decentralized training: members take shares of batches at their own pace, update alone, average weights.

At the end of an interval of steps all members come to the same state, and what is due is done on it. Under
syncs that do not need all of them, an interval goes on where one is lost; after it, as under the others, the
rest links up again.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from plait.adapt.changes import BatchSizeChange, Change
from plait.comm.collectives import all_gather_values
from plait.core import run_events
from plait.core.errors import JobError, LostPeer, PeerError
from plait.data import loader
from plait.data.sampler import GlobalBatch, mix
from plait.pipeline import named_state
from plait.schema.sync_options import LOCKSTEP, HetPipeOptions, Options, options_among
from plait.sync.averaging.base import Averaging
from plait.sync.averaging.parameter_server import serving
from plait.sync.averaging.whole_state import rest_of_state
from plait.training.audit.averages import is_mean
from plait.training.audit.schedule import is_audited
from plait.training.audit.whole_model import ADVICE, AuditedStep
from plait.training.change.members import CannotGoOn, ProgressMark, loss_of, most_advanced
from plait.training.checkpoint import Checkpoint, EngineState
from plait.training.checks.replicas import describe_rows, own_buffers
from plait.training.components import with_fresh_model
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
from plait.training.worker_group import group_of_world

PREFIX = "plait/run"


class Member(Protocol):
    """What takes work at its own pace and averages with the others: a worker, or a pipeline of workers.

    It is linked with the other members when it is made. Members are numbered by their places; `workers` are
    those that this worker averages with, itself among them, by place.
    """

    place: int
    workers: tuple[int, ...]
    averaging: Averaging
    # What measures its updates, where the job asks for signals.
    monitor: ShareMonitor | None

    @property
    def is_first(self) -> bool:
        """Whether this worker is the member's first, which takes work and asks for all of its workers."""

    def from_first(self, find: Callable[[], Any]) -> Any:
        """What `find` returns on the member's first worker, on all of them; plain values."""

    def update(self, step: int, share: int, batch: loader.Batch, factor: float) -> torch.Tensor:
        """Update on a share of a step's batch and average with others; the share's loss."""

    def weight_sums(self) -> list[float]:
        """The sum of the elements of each weight, where the member can tell."""

    def synchronize(self) -> tuple[int, ...]:
        """Come to the same state as all who live, whose places it returns."""

    def sums_over(self, share: int, shares: int) -> torch.Tensor:
        """The sums of loss and metric over a share of the test split, on the first worker."""

    def state(self) -> EngineState:
        """The whole state, on the first worker; called by the member that writes checkpoints alone."""

    def held_state(self) -> EngineState:
        """What this worker needs besides its model and optimizer to go on among other members."""

    def close(self) -> None:
        """End the links to the other members."""


# Makes this worker's member of those there are now. Its name is that of its keys in the store; the state is
# what `held_state` of the member before returned.
MakeMember = Callable[[str, EngineState], Member]


class WholeModel:
    """A member that is one worker with the whole model."""

    is_first = True

    def __init__(self, run: Run, name: str, held: EngineState) -> None:
        self._run = run
        self.place, self.workers = run.worker.rank, run.worker.memberships.current.members
        sync = run.settings.sync
        self._options = options_among(sync.kind, sync.options, len(self.workers))
        self.monitor = ShareMonitor(run) if is_monitored(run.settings) else None
        self._samples = 0
        self._audit: AuditedStep | None = None
        self._open(f"{SYNC_PREFIX}/{name}")
        if held.sync:
            self.averaging.load_state(self._by_weight(held.sync))

    def from_first(self, find: Callable[[], Any]) -> Any:
        return find()

    def _open(self, prefix: str) -> None:
        run, parts = self._run, self._run.components
        if names := list(own_buffers(parts.model)):
            (content,) = parts.train_set.example_batches((4,), run.settings.seed)
            inputs, _ = loader.to_device(content, parts.device, parts.dtype)
            if words := describe_rows(parts.model, inputs, names):
                raise JobError(f"model: {words}")
        self._step = TrainStep(parts, run.settings, rank=run.worker.rank, own_monitor=self.monitor)
        weights, buffers = list(parts.model.parameters()), list(parts.model.buffers())
        self.averaging = make_averaging(
            run.worker,
            run.worker.hosts,
            sources_of(parts, self._options),
            self._options,
            run.settings.seed,
            prefix=prefix,
            step=run.trial.step,
            when_synchronized=rest_of_state(
                run.worker.store, prefix, weights, buffers, parts.optimizer, parts.scaler
            ),
        )
        if averages_gradients(self._options):
            self._step.before_update = self._average_gradients
        if self.monitor is not None:
            self.monitor.warn_without_parts(averages_gradients(self._options))

    def _average_gradients(self) -> None:
        with contextlib.ExitStack() as around:
            if self._audit is not None:
                around.enter_context(self._audit.averaging_before_update())
            if self.monitor is not None:
                weights = list(self._run.components.model.parameters())
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
        return [float(weight.detach().double().sum()) for weight in self._run.components.model.parameters()]

    def synchronize(self) -> tuple[int, ...]:
        return self.averaging.synchronize()

    def sums_over(self, share: int, shares: int) -> torch.Tensor:
        return sums_over_share(self._run.components, self._run.settings, share, shares)

    def state(self) -> EngineState:
        return replace(self._run.components.state(), sync=self.held_state().sync)

    def held_state(self) -> EngineState:
        """What the sync keeps besides the state of workers, by the names of the weights."""
        parts = self._run.components
        own = {
            f"{parts.names[weight]}/{key}": tensor
            for key, tensors in self.averaging.state().items()
            for weight, tensor in zip(parts.model.parameters(), tensors)
        }
        return EngineState({}, {}, sync=own)

    def close(self) -> None:
        self.averaging.close()

    def _by_weight(self, state: named_state.Tensors) -> dict[str, list[torch.Tensor]]:
        """What `state` wrote down of the sync: for each key a tensor for each weight, or none."""
        parts = self._run.components
        names = [parts.names[weight] for weight in parts.model.parameters()]
        keys = {path.rpartition("/")[2] for path in state}
        return {
            key: [state[f"{name}/{key}"] for name in names]
            for key in sorted(keys)
            if all(f"{name}/{key}" in state for name in names)
        }


@dataclass(frozen=True)
class Reports:
    """What each worker reported at the end of an interval, in the order of ranks."""

    stops: list[bool]
    # Whether there are other members to go on among.
    changes: list[bool]
    # Where some step was found to differ from what it should compute, in words.
    differences: list[str | None]
    # The sums of each member's weights before and after the average; what its updates measured.
    sums: list[list[list[float]]]
    signals: list[list[float]]


class DecentralizedEngine:
    """Steps that members take as they can: each updates alone, and averages weights with some others.

    Where the job's workers change, it is closed and opened again with a member that `make_member` makes.
    """

    def __init__(self, run: Run, make_member: MakeMember) -> None:
        self._run = run
        self._make_member = make_member
        self._opened: Member | None = None
        self._held = EngineState({}, {})
        self._prefix, self._intervals = "", 0
        self._idle = range(0)
        self._speed = Speed()
        self._throughput = ThroughputMeter()
        # Samples of the interval that were recorded, and this worker's last step, which was not.
        self._counted = 0
        self._unrecorded: tuple[int, int, torch.Tensor, float] | None = None
        # Whether this worker asks to stop; whether all members hold the same.
        self._asks_stop = self._is_settled = False
        # The places that took part in the last average, and the sums of this worker's weights before it.
        self._averaged: tuple[int, ...] = ()
        self._sums_before: list[float] = []
        # The keys in the store of the interval before.
        self._used_keys: list[str] = []

    def load(self, state: Checkpoint) -> None:
        self._run.components.load(state)
        self._held = EngineState({}, {}, sync=state.sync)

    def open(self) -> None:
        run = self._run
        name = run.name_of_opening()
        self._opened = member = self._make_member(name, self._held)
        self._prefix, self._intervals, self._is_settled = f"{PREFIX}/{name}", 0, False
        self._speed, self._throughput, self._used_keys = Speed(), ThroughputMeter(), []
        sync, places = run.settings.sync, len(member.workers)
        # Places whose workers serve the others take no work; the others share it.
        self._idle = _dedicated(options_among(sync.kind, sync.options, places), places)

    @property
    def _member(self) -> Member:
        assert self._opened is not None
        return self._opened

    def train(self, steps: int) -> IntervalResult:
        """Work on these steps, then come to the same state.

        Where a worker is lost and the others need it to average, they leave the interval: what they had begun
        of its last batches counts as done.
        """
        run = self._run
        batches = list(itertools.islice(run.order(), steps))
        queue = self._queue(batches)
        reports = lost = None
        try:
            reports = self._work_together(queue, batches)
        except RuntimeError as failure:
            lost = loss_of(run.worker, failure)
            if lost is None:
                raise
            queue.stop()
        done = queue.done()
        step, samples = run.trial.step + done, sum(len(batch.samples) for batch in batches[:done])
        position = batches[done - 1].after if done else run.trial.position
        self._record_step(samples)
        self._note_throughput(force=True)
        self._note_average(step)
        self._intervals += 1
        if reports is None:
            return IntervalResult(done, (position,), lost=lost)
        self._take(reports, step, samples)
        self._delete_keys_before(queue)
        return IntervalResult(
            done, (position,), stopped=any(reports.stops), change_asked=any(reports.changes)
        )

    def _work_together(self, queue: WorkQueue, batches: Sequence[GlobalBatch]) -> Reports:
        """Work until none is left, and come to the same state; what each worker reports then."""
        self._counted, self._asks_stop, self._is_settled, self._averaged = 0, False, False, ()
        self._work(queue)
        self._synchronize()
        while self._member.from_first(queue.is_work_left):
            self._work(queue)
            self._synchronize()
        self._check_complete()
        first, settings = self._run.trial.step, self._run.settings
        audited = any(is_audited(settings, first + index) for index in range(len(batches)))
        reports = self._exchange_reports(audited)
        self._is_settled = True
        return reports

    def _queue(self, batches: list[GlobalBatch]) -> WorkQueue:
        run, member, places = self._run, self._member, len(self._member.workers)
        return WorkQueue(
            run.worker.store,
            f"{self._prefix}/claims/{self._intervals}",
            batches,
            places - len(self._idle),
            member.place,
            places,
            fixed=run.settings.sync.kind in LOCKSTEP,
            ahead=run.settings.data.loaders > 0,
            speed=self._speed,
        )

    def _synchronize(self) -> None:
        self._sums_before = self._member.weight_sums()
        places = self._member.synchronize()
        self._averaged = tuple(self._member.from_first(lambda: places))

    def _check_complete(self) -> None:
        """Report the loss of a member that was not there when the others averaged."""
        member = self._member
        if member.place not in self._averaged:
            raise CannotGoOn("the others have averaged without this worker", LostPeer.GONE)
        missing = [worker for place, worker in enumerate(member.workers) if place not in self._averaged]
        if missing:
            raise PeerError(f"worker {missing[0]} is lost", LostPeer.GONE)

    def _exchange_reports(self, audited: bool) -> Reports:
        """Let all workers know what each reports; where weights are `audited`, they are compared."""
        run, member = self._run, self._member
        sums = [self._sums_before, member.weight_sums()] if audited else []
        signals = member.monitor.take() if member.monitor is not None and member.is_first else []
        is_asked = run.worker.memberships.is_asked
        own = [self._asks_stop, is_asked, run.audits.difference, sums, signals]
        found = Reports(*map(list, zip(*all_gather_values(own))))
        if audited:
            self._compare_weights(found.sums)
        return found

    def _take(self, reports: Reports, step: int, samples: int) -> None:
        """Take note of what workers reported after `step` steps, `samples` of them in this interval."""
        monitor, audits = self._member.monitor, self._run.audits
        if monitor is not None:
            monitor.arrive(step, samples, dict(enumerate(each for each in reports.signals if each)))
        audits.difference = next(filter(None, reports.differences), audits.difference)

    def _delete_keys_before(self, queue: WorkQueue) -> None:
        """Delete the keys of the interval before: nobody looks at them once all have reported in this."""
        for key in self._used_keys if self._run.worker.rank == 0 else ():
            self._run.worker.store.delete_key(key)
        self._used_keys = queue.store_keys()

    def _compare_weights(self, sums: Sequence[Sequence[Sequence[float]]]) -> None:
        """Compare what members hold after they took the mean with each other, and with what each brought."""
        run, (before, after) = self._run, zip(*sums)
        if any(numbers != after[0] for numbers in after):
            what = "workers that took the mean of their weights do not hold the same"
            run.audits.add_difference(run.trial.step, what, ADVICE)
        elif not is_mean(self._member.averaging, before, after[0]):
            what = "the weights that workers have in common are not the mean of what each had"
            run.audits.add_difference(run.trial.step, what, ADVICE)

    def _work(self, queue: WorkQueue) -> None:
        """Take work until none is left."""
        run, worker = self._run, self._run.worker
        for item, batch in self._items(queue) if self._member.place not in self._idle else ():
            step = run.trial.step + item.index
            loss = self._update(step, item, batch)
            # Others have taken the work before this.
            self._record_step(item.before)
            self._unrecorded = (step + 1, batch.epoch, loss, run.lr(step))
            self._throughput.count(step + 1, batch.count)
            self._note_throughput()
            if not self._member.is_first:
                continue
            self._asks_stop = self._asks_stop or worker.stop_requested()
            if self._asks_stop or worker.memberships.is_asked or run.audits.difference is not None:
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

    def _record_step(self, samples: int) -> None:
        """Record this worker's last step; `samples` of the interval were used by then, all workers'."""
        if self._unrecorded is not None:
            self._run.metrics.step(*self._unrecorded, max(0, samples - self._counted))
            self._counted = max(samples, self._counted)
        self._unrecorded = None

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

        for batch in self._run.load(self._run.components.train_set, order(), loaders=loaders):
            yield taken.popleft(), batch

    def evaluate(self, slots: Sequence[int] = (0,)) -> list[dict[str, float]]:
        """Mean loss and metric over the test split, of which each member takes a share."""
        run, member = self._run, self._member
        sums = member.sums_over(member.place, len(member.workers))
        own = sums if member.is_first else torch.zeros_like(sums)
        total = group_of_world(run.worker).total(own, run.components.device)
        return [means(run.components, total)]

    def state(self, slot: int = 0) -> EngineState | None:
        state = self._member.state() if self._member.place == 0 else None
        return state if self._member.is_first else None

    def apply(self, change: Change) -> None:
        # Work is drawn anew for each interval.
        if not isinstance(change, BatchSizeChange):
            raise cannot_apply(change, f"sync {self._run.settings.sync.kind}")

    def synchronize(self, staying: Sequence[int]) -> None:
        """Take the mean of all, unless they hold the same: some may have left an interval in its middle."""
        if not self._is_settled:
            self._synchronize()
            self._check_complete()
            self._is_settled = True

    def find_source(self, marks: Sequence[ProgressMark]) -> tuple[int, EngineState] | None:
        if self._run.settings.pipeline is None:
            return most_advanced(marks), replace(self._run.components.state(), sync=self._held.sync)
        if len(set(marks)) == 1:
            return 0, EngineState({}, {})
        # What a worker holds are stages: only those of a whole pipeline at one step make a state.
        self._run.components = with_fresh_model(self._run.components, self._run.settings, keep_scale=False)
        self._held = EngineState({}, {})
        return None

    def close(self) -> None:
        member, self._opened = self._opened, None
        if member is None:
            return
        self._held = member.held_state()
        was_lost = self._run.worker.memberships.loss() is not None
        with contextlib.suppress(*([RuntimeError] if was_lost else [])):
            member.close()

    def _note_average(self, step: int) -> None:
        """Record the members that have averaged at the end of the interval, unless a loss ended it before."""
        if not self._averaged:
            return
        averaging, workers = self._member.averaging, self._member.workers
        distance = averaging.stats.distances[-1] if averaging.stats.distances else 0.0
        self._run.record(
            run_events.Settled(step, tuple(workers[place] for place in self._averaged), distance)
        )

    def _note_throughput(self, force: bool = False) -> None:
        if force or self._throughput.is_due():
            self._run.record(self._throughput.event(self._member.averaging.stats))


def _dedicated(options: Options, places: int) -> range:
    if isinstance(options, HetPipeOptions) and options.dedicated:
        return serving(places, options.servers, dedicated=True)
    return range(0)
