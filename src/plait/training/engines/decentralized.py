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
from plait.core.events import Event
from plait.data import loader
from plait.data.sampler import GlobalBatch, mix
from plait.launch.worker_process import Worker
from plait.pipeline import named_state
from plait.schema.settings import TrainSettings
from plait.schema.sync_options import LOCKSTEP, HetPipeOptions, Options, options_among
from plait.sync.averaging.base import Averaging
from plait.sync.averaging.parameter_server import serving
from plait.sync.averaging.whole_state import rest_of_state
from plait.training.audit.averages import is_mean
from plait.training.audit.record import AuditRecord
from plait.training.audit.schedule import is_audited
from plait.training.audit.whole_model import ADVICE, ReplicaAudit
from plait.training.change.layers import LayerState, merge_into
from plait.training.change.members import ProgressMark, loss_of, most_advanced
from plait.training.checkpoint import Checkpoint, EngineState
from plait.training.components import Components, with_fresh_model
from plait.training.engine import IntervalResult, cannot_apply
from plait.training.engines.averaging import PREFIX as SYNC_PREFIX
from plait.training.engines.averaging import averages_gradients, make_averaging, sources_of
from plait.training.engines.throughput import ThroughputMeter
from plait.training.engines.train_step import TrainStep
from plait.training.engines.work_queue import Speed, WorkItem, WorkQueue
from plait.training.evaluate import means, sums_over_share
from plait.training.monitoring.own_pace import ShareMonitor
from plait.training.trial import Trial
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

    def synchronize(self) -> None:
        """Come to the same state as all members; PeerError if one is lost."""

    def sums_over(self, share: int, shares: int) -> torch.Tensor:
        """The sums of loss and metric over a share of the test split, on the first worker."""

    def state(self) -> EngineState:
        """The whole state, on the first worker; called by the member that writes checkpoints alone."""

    def held_state(self) -> EngineState:
        """What this worker needs besides its model and optimizer to go on among other members."""

    def close(self) -> None:
        """End the links to the other members."""


# Makes this worker's member of those there are now, from the trial's components. Its name is that of its keys
# in the store; the state is what `held_state` of the member before returned.
MakeMember = Callable[[Components, str, EngineState], Member]
# What is told of each step of this worker: its number, its epoch, its loss, and the samples of all workers.
OnMemberStep = Callable[[int, int, torch.Tensor, int], None]


class WholeModel:
    """A member that is one worker with the whole model of a trial; `monitor` measures its updates."""

    is_first = True

    def __init__(
        self,
        worker: Worker,
        trial: Trial,
        components: Components,
        audit: ReplicaAudit,
        monitor: ShareMonitor | None,
        name: str,
        held: EngineState,
    ) -> None:
        self._settings = trial.settings
        self._components = components
        self._audit = audit
        self.monitor = monitor
        self.place, self.workers = worker.rank, worker.memberships.current.members
        sync = trial.settings.sync
        self._options = options_among(sync.kind, sync.options, len(self.workers))
        self._samples = 0
        self._open(worker, f"{SYNC_PREFIX}/{name}", trial.step)
        if held.sync:
            self.averaging.load_state(self._by_weight(held.sync))

    def from_first(self, find: Callable[[], Any]) -> Any:
        return find()

    def _open(self, worker: Worker, prefix: str, step: int) -> None:
        parts, settings = self._components, self._settings
        self._step = TrainStep(parts, settings, rank=worker.rank, own_monitor=self.monitor)
        weights, buffers = list(parts.model.parameters()), list(parts.model.buffers())
        self.averaging = make_averaging(
            worker,
            worker.hosts,
            sources_of(parts, self._options),
            self._options,
            settings.seed,
            prefix=prefix,
            step=step,
            when_synchronized=rest_of_state(
                worker.store, prefix, weights, buffers, parts.optimizer, parts.scaler
            ),
        )
        if averages_gradients(self._options):
            self._step.before_update = self._average_gradients
        if self.monitor is not None:
            self.monitor.warn_without_parts(averages_gradients(self._options))

    def _average_gradients(self) -> None:
        with contextlib.ExitStack() as around:
            around.enter_context(self._audit.averaging_before_update())
            if self.monitor is not None:
                weights = list(self._components.model.parameters())
                around.enter_context(self.monitor.averaging_gradients(weights, self._samples, self.averaging))
            self.averaging.after_update()

    def update(self, step: int, share: int, batch: loader.Batch, factor: float) -> torch.Tensor:
        # Random numbers depend on the seed, the step and the share alone, whichever worker takes it.
        loader.seed_all(mix(self._settings.seed, step, share))
        losses = torch.zeros(1, dtype=torch.float64)
        self._samples = batch.count
        if batch.count:
            self._audit.begin_share(self._step, step, share)
            losses, _ = self._step.step([batch], [factor])
            self._audit.end(self._step, losses)
        if not averages_gradients(self._options):
            self.averaging.after_update()
        return losses[0]

    def weight_sums(self) -> list[float]:
        return [float(weight.detach().double().sum()) for weight in self._components.model.parameters()]

    def synchronize(self) -> None:
        self.averaging.synchronize()

    def sums_over(self, share: int, shares: int) -> torch.Tensor:
        return sums_over_share(self._components, self._settings, share, shares)

    def state(self) -> EngineState:
        return replace(self._components.state(), sync=self.held_state().sync)

    def held_state(self) -> EngineState:
        """What the sync keeps besides the state of workers, by the names of the weights."""
        parts = self._components
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
        parts = self._components
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

    Where the job's workers change, it is closed and opened again with a member that `make_member` makes. Its
    name is that of `next_name`: the same on all members, and used once. `trials` has one trial; `order` gives
    its batches to come, by their samples. `on_step` is told of this worker's steps, `on_event` of what else
    is worth recording, and `on_components` of the components of a model that was built again.
    """

    def __init__(
        self,
        worker: Worker,
        trials: Sequence[Trial],
        components: Components,
        make_member: MakeMember,
        next_name: Callable[[], str],
        order: Callable[[], Iterator[GlobalBatch]],
        audits: AuditRecord,
        on_step: OnMemberStep,
        on_event: Callable[[Event], None],
        on_components: Callable[[Components], None],
    ) -> None:
        self._worker = worker
        self._trials = trials
        self._components = components
        self._make_member = make_member
        self._next_name = next_name
        self._order = order
        self._audits = audits
        self._on_step = on_step
        self._on_event = on_event
        self._on_components = on_components
        self._opened: Member | None = None
        self._held = EngineState({}, {})
        self._prefix, self._intervals = "", 0
        self._idle = range(0)
        self._speed = Speed()
        self._throughput = ThroughputMeter()
        # Samples of the interval that were recorded, and this worker's last step, which was not.
        self._counted = 0
        self._unrecorded: tuple[int, int, torch.Tensor] | None = None
        # Whether this worker asks to stop; whether all members hold the same.
        self._asks_stop = self._is_settled = False
        # Whether members have averaged in this interval, and the sums of this worker's weights before.
        self._has_averaged = False
        self._sums_before: list[float] = []
        # The keys in the store of the interval before.
        self._used_keys: list[str] = []

    def load(self, state: Checkpoint) -> None:
        self._components.load(state)
        self._held = EngineState({}, {}, sync=state.sync)

    def open(self) -> None:
        name, held = self._next_name(), self._held
        if held.model:
            # A model that was cut into stages cannot be cut once more.
            self._build_again()
            merge_into(self._components, LayerState(held.model, held.optimizer))
        self._opened = member = self._make_member(self._components, name, held)
        self._prefix, self._intervals, self._is_settled = f"{PREFIX}/{name}", 0, False
        self._speed, self._throughput, self._used_keys = Speed(), ThroughputMeter(), []
        sync, places = self._settings.sync, len(member.workers)
        # Places whose workers serve the others take no work; the others share it.
        self._idle = _dedicated(options_among(sync.kind, sync.options, places), places)

    def _build_again(self, keep_scale: bool = True) -> None:
        """Have the model and the optimizer as the job makes them."""
        self._components = with_fresh_model(self._components, self._settings, keep_scale)
        self._on_components(self._components)

    @property
    def _settings(self) -> TrainSettings:
        return self._trials[0].settings

    @property
    def _member(self) -> Member:
        assert self._opened is not None
        return self._opened

    def train(self, steps: int) -> IntervalResult:
        """Work on these steps, then come to the same state.

        Where a worker is lost and the others need it to average, they leave the interval: what they had begun
        of its last batches counts as done.
        """
        trial = self._trials[0]
        batches = list(itertools.islice(self._order(), steps))
        queue = self._queue(batches)
        reports = lost = None
        try:
            reports = self._work_together(queue, batches)
        except RuntimeError as failure:
            lost = loss_of(self._worker, failure)
            if lost is None:
                raise
            queue.stop()
        done = queue.done()
        step, samples = trial.step + done, sum(len(batch.samples) for batch in batches[:done])
        position = batches[done - 1].after if done else trial.position
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
        self._counted, self._asks_stop, self._is_settled, self._has_averaged = 0, False, False, False
        self._work(queue)
        self._synchronize()
        while self._member.from_first(queue.is_work_left):
            self._work(queue)
            self._synchronize()
        first, settings = self._trials[0].step, self._settings
        audited = any(is_audited(settings, first + index) for index in range(len(batches)))
        reports = self._exchange_reports(audited)
        self._is_settled = True
        return reports

    def _queue(self, batches: list[GlobalBatch]) -> WorkQueue:
        settings, member, places = self._settings, self._member, len(self._member.workers)
        return WorkQueue(
            self._worker.store,
            f"{self._prefix}/claims/{self._intervals}",
            batches,
            places - len(self._idle),
            member.place,
            places,
            fixed=settings.sync.kind in LOCKSTEP,
            ahead=settings.data.loaders > 0,
            speed=self._speed,
        )

    def _synchronize(self) -> None:
        self._sums_before = self._member.weight_sums()
        self._member.synchronize()
        self._has_averaged = True

    def _exchange_reports(self, audited: bool) -> Reports:
        """Let all workers know what each reports; where weights are `audited`, they are compared."""
        member = self._member
        sums = [self._sums_before, member.weight_sums()] if audited else []
        signals = member.monitor.take() if member.monitor is not None and member.is_first else []
        is_asked = self._worker.memberships.is_asked
        own = [self._asks_stop, is_asked, self._audits.difference, sums, signals]
        found = Reports(*map(list, zip(*all_gather_values(own))))
        if audited:
            self._compare_weights(found.sums)
        return found

    def _take(self, reports: Reports, step: int, samples: int) -> None:
        """Take note of what workers reported after `step` steps, `samples` of them in this interval."""
        monitor, audits = self._member.monitor, self._audits
        if monitor is not None:
            monitor.arrive(step, samples, dict(enumerate(each for each in reports.signals if each)))
        audits.difference = next(filter(None, reports.differences), audits.difference)

    def _delete_keys_before(self, queue: WorkQueue) -> None:
        """Delete the keys of the interval before: nobody looks at them once all have reported in this."""
        for key in self._used_keys if self._worker.rank == 0 else ():
            self._worker.store.delete_key(key)
        self._used_keys = queue.store_keys()

    def _compare_weights(self, sums: Sequence[Sequence[Sequence[float]]]) -> None:
        """Compare what members hold after they took the mean with each other, and with what each brought."""
        step, (before, after) = self._trials[0].step, zip(*sums)
        if any(numbers != after[0] for numbers in after):
            what = "workers that took the mean of their weights do not hold the same"
            self._audits.add_difference(step, what, ADVICE)
        elif not is_mean(self._member.averaging, before, after[0]):
            what = "the weights that workers have in common are not the mean of what each had"
            self._audits.add_difference(step, what, ADVICE)

    def _work(self, queue: WorkQueue) -> None:
        """Take work until none is left."""
        worker, first = self._worker, self._trials[0].step
        for item, batch in self._items(queue) if self._member.place not in self._idle else ():
            step = first + item.index
            loss = self._update(step, item, batch)
            # Others have taken the work before this.
            self._record_step(item.before)
            self._unrecorded = (step + 1, batch.epoch, loss)
            self._throughput.count(step + 1, batch.count)
            self._note_throughput()
            if not self._member.is_first:
                continue
            self._asks_stop = self._asks_stop or worker.stop_requested()
            if self._asks_stop or worker.memberships.is_asked or self._audits.difference is not None:
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
        member, factor = self._member, self._trials[0].lr_factor(step)
        if member.monitor is None:
            return member.update(step, item.place, batch, factor)
        with member.monitor.updating(member.averaging):
            return member.update(step, item.place, batch, factor)

    def _record_step(self, samples: int) -> None:
        """Record this worker's last step; `samples` of the interval were used by then, all workers'."""
        if self._unrecorded is not None:
            self._on_step(*self._unrecorded, max(0, samples - self._counted))
            self._counted = max(samples, self._counted)
        self._unrecorded = None

    def _load(self, queue: WorkQueue) -> Iterator[tuple[WorkItem, loader.Batch]]:
        """The work that this worker begins, with its samples; loader processes read ahead of it."""
        for item, batch in self._fetch(queue.take(), self._settings.data.loaders):
            if queue.leaves():
                return
            if queue.begin(item):
                yield item, batch
        yield from self._fetch(queue.take_over(), loaders=0)

    def _fetch(self, items: Iterator[WorkItem], loaders: int) -> Iterator[tuple[WorkItem, loader.Batch]]:
        source, pin = self._components.train_set, self._components.device.type == "cuda"
        taken: deque[WorkItem] = deque()

        def order() -> Iterator[GlobalBatch]:
            for item in items:
                taken.append(item)
                yield item.batch

        seed = self._settings.seed
        for batch in loader.load(source, order(), seed=seed, rank=0, world_size=1, loaders=loaders, pin=pin):
            yield taken.popleft(), batch

    def evaluate(self, slots: Sequence[int] = (0,)) -> list[dict[str, float]]:
        """Mean loss and metric over the test split, of which each member takes a share."""
        member, components = self._member, self._components
        sums = member.sums_over(member.place, len(member.workers))
        own = sums if member.is_first else torch.zeros_like(sums)
        total = group_of_world(self._worker).total(own, components.device)
        return [means(components, total)]

    def state(self, slot: int = 0) -> EngineState | None:
        state = self._member.state() if self._member.place == 0 else None
        return state if self._member.is_first else None

    def apply(self, change: Change) -> None:
        # Work is drawn anew for each interval.
        if not isinstance(change, BatchSizeChange):
            raise cannot_apply(change, f"sync {self._settings.sync.kind}")

    def synchronize(self, staying: Sequence[int]) -> None:
        """Take the mean of all, unless they hold the same: some may have left an interval in its middle."""
        if not self._is_settled:
            self._synchronize()
            self._is_settled = True

    def find_source(self, marks: Sequence[ProgressMark]) -> tuple[int, EngineState] | None:
        if self._settings.pipeline is None:
            return most_advanced(marks), replace(self._components.state(), sync=self._held.sync)
        if len(set(marks)) == 1:
            return 0, EngineState({}, {})
        # What a worker holds are stages: only those of a whole pipeline at one step make a state.
        self._build_again(keep_scale=False)
        self._held = EngineState({}, {})
        return None

    def close(self) -> None:
        member, self._opened = self._opened, None
        if member is None:
            return
        self._held = member.held_state()
        was_lost = self._worker.memberships.loss() is not None
        with contextlib.suppress(*([RuntimeError] if was_lost else [])):
            member.close()

    def _note_average(self, step: int) -> None:
        """Record the members that have averaged at the end of the interval, unless a loss ended it before."""
        if not self._has_averaged:
            return
        averaging, workers = self._member.averaging, self._member.workers
        distance = averaging.stats.distances[-1] if averaging.stats.distances else 0.0
        self._on_event(run_events.Settled(step, workers, distance))

    def _note_throughput(self, force: bool = False) -> None:
        if force or self._throughput.is_due():
            self._on_event(self._throughput.event(self._member.averaging.stats))


def _dedicated(options: Options, places: int) -> range:
    if isinstance(options, HetPipeOptions) and options.dedicated:
        return serving(places, options.servers, dedicated=True)
    return range(0)
