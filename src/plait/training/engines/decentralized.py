"""Decentralized training: members take shares of batches at their own pace, update alone, average weights.

At the end of an interval of steps all members come to the same state, and what is due is done on it. Under
syncs that do not need all of them, an interval goes on where one is lost; after it, as under the others, the
rest links up again.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plait.adapt.changes import BatchSizeChange, Change
from plait.adapt.members import ProgressMark, loss_of
from plait.core import run_events
from plait.core.events import Event
from plait.data.loader import Batch, DataSource, load
from plait.data.sampler import GlobalBatch
from plait.launcher.worker_process import Worker
from plait.schema.settings import TrainSettings
from plait.schema.sync_options import LOCKSTEP, HetPipeOptions, Options, options_among
from plait.sync.averaging.parameter_server import serving
from plait.training.audit.averages import is_mean
from plait.training.audit.record import AuditRecord
from plait.training.audit.replica_audit import ADVICE
from plait.training.audit.schedule import is_audited
from plait.training.batch_streams import order_of
from plait.training.checkpoint import Checkpoint, EngineState
from plait.training.components import TrialInit
from plait.training.engine import IntervalResult, cannot_apply
from plait.training.engines.averaging_member import MakeMember, Member, MemberInit, MemberState
from plait.training.engines.throughput import ThroughputMeter
from plait.training.engines.train_step import AnyComponents
from plait.training.engines.work_queue import Speed, WorkItem, WorkQueue, sample_count
from plait.training.evaluate import results
from plait.training.trial import Trial
from plait.training.worker_group import ALONE, WorkerGroup, group_of_world

PREFIX = "plait/run"


def _ignore(*given: object) -> None:
    pass


@dataclass(frozen=True)
class Observers:
    """Who is told what decentralized training does; by default, nobody.

    `on_step` is told of this worker's steps: the number of the step, its epoch, the trials' losses, and the
    samples of all workers since the step before. `on_event` is told of what else is worth recording. `audits`
    has what audits found.
    """

    on_step: Callable[[int, int, Tensor, int], None] = _ignore
    on_event: Callable[[Event], None] = _ignore
    audits: AuditRecord | None = None


NOBODY = Observers()


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
    signals: list[list[Any]]
    # The sums of the losses of its shares, each weighted by its part of the batch, for each trial.
    losses: list[list[float]]


class DecentralizedEngine:
    """Steps that members take as they can: each updates alone, and averages weights with some others.

    Where the workers or the trials change, it is closed and opened again with a member that `make_member`
    makes. Its name is that of `next_name`: the same on all members, and used once. `state` is what they
    train, from one member to the next. `order` gives a trial's batches to come, by their samples. In a sweep,
    `group` are the workers that train the trials.
    """

    # No worker has a step that it could take again.
    in_progress: tuple[Sequence[Batch], Sequence[float]] = ((), ())

    def __init__(
        self,
        worker: Worker,
        trials: list[Trial],
        state: MemberState,
        make_member: MakeMember,
        next_name: Callable[[], str],
        order: Callable[[Trial, DataSource], Iterator[GlobalBatch]],
        observers: Observers = NOBODY,
        group: WorkerGroup | None = None,
    ) -> None:
        self._worker = worker
        self.trials = trials
        self._state = state
        self._make_member = make_member
        self._next_name = next_name
        self._order = order
        self._observers = observers
        # Set in a sweep; in a run the group is that of its members.
        self._fixed_group = group
        self._group = group or ALONE
        self._opened: Member | None = None
        # The slots whose trials read batches; and for each trial, whose batches of these it has.
        self._readers: list[int] = []
        self._reader_of: list[int] = []
        # Steps done in the last interval, and whether an update is in progress.
        self.done, self.is_in_step = 0, False
        self._losses = torch.zeros(0, dtype=torch.float64)
        self._prefix, self._intervals = "", 0
        self._idle = range(0)
        self._speed = Speed()
        self._throughput = ThroughputMeter()
        # Samples of the interval that were recorded, and this worker's last step, which was not.
        self._counted = 0
        self._unrecorded: tuple[int, int, Tensor] | None = None
        # Whether this worker asks to stop; whether all members hold the same.
        self._asks_stop = self._is_settled = False
        # Whether members have averaged in this interval, and the sums of this worker's weights before.
        self._has_averaged = False
        self._sums_before: list[float] = []
        # The keys in the store of the interval before.
        self._used_keys: list[str] = []

    @property
    def components(self) -> AnyComponents:
        return self._state.components

    def load(self, state: Checkpoint) -> None:
        self._state.load(state)

    def open(self) -> None:
        name = self._next_name()
        self._group = self._fixed_group or group_of_world(self._worker)
        self._opened = member = self._make_member(MemberInit(self.trials, self._group, name))
        self._prefix, self._intervals, self._is_settled = f"{PREFIX}/{name}", 0, False
        self._speed, self._throughput, self._used_keys = Speed(), ThroughputMeter(), []
        sync, places = self._settings.sync, len(member.workers)
        # Places whose workers serve the others take no work; the others share it.
        self._idle = _dedicated(options_among(sync.kind, sync.options, places), places)

    @property
    def _settings(self) -> TrainSettings:
        """The settings of the first trial, for what all trials have in common."""
        return self.trials[0].settings

    @property
    def _member(self) -> Member:
        assert self._opened is not None
        return self._opened

    def train(self, steps: int) -> IntervalResult:
        """Work on these steps, then come to the same state.

        Where a worker is lost and the others need it to average, they leave the interval: what they had begun
        of its last batches counts as done.
        """
        self.done, self.is_in_step = 0, False
        batches = self._next_batches(steps)
        queue = self._queue(batches)
        reports = lost = None
        try:
            reports = self._work_together(queue, batches)
        except RuntimeError as failure:
            lost = loss_of(self._worker, failure)
            if lost is None:
                raise
            queue.stop()
        self.done = done = queue.done()
        step, samples = self.trials[0].step + done, sum(map(sample_count, batches[:done]))
        positions = tuple(
            batches[done - 1][reader].after if done else trial.position
            for trial, reader in zip(self.trials, self._reader_of)
        )
        losses = () if reports is None else tuple(map(sum, zip(*reports.losses)))
        if self._unrecorded is None and losses and done:
            # Others have done all steps of this interval.
            mean = torch.tensor(losses, dtype=torch.float64) / done
            self._unrecorded = (step, batches[done - 1][0].epoch, mean)
        self._record_step(samples)
        self._note_throughput(force=True)
        self._note_average(step)
        self._intervals += 1
        if reports is None:
            return IntervalResult(done, positions, lost=lost)
        self._take(reports, step, losses[0] / done if done else math.nan, samples)
        self._delete_keys_before(queue)
        return IntervalResult(
            done,
            positions,
            stopped=any(reports.stops),
            change_asked=any(reports.changes),
            losses=losses,
        )

    def _next_batches(self, steps: int) -> list[tuple[GlobalBatch, ...]]:
        """The batches of these steps, of each reader: trials that read the same batches share them."""
        keys = [(order_of(trial), trial.position) for trial in self.trials]
        self._readers = [slot for slot, key in enumerate(keys) if key not in keys[:slot]]
        self._reader_of = [self._readers.index(keys.index(key)) for key in keys]
        orders = [self._order(self.trials[slot], self._source(slot)) for slot in self._readers]
        return list(itertools.islice(zip(*orders), steps))

    def _source(self, slot: int) -> DataSource:
        return self.components.of_trial(slot).train_set

    def _work_together(self, queue: WorkQueue, batches: Sequence[object]) -> Reports:
        """Work until none is left, and come to the same state; what each worker reports then."""
        self._losses = torch.zeros(len(self.trials), dtype=torch.float64)
        self._counted, self._asks_stop, self._is_settled, self._has_averaged = 0, False, False, False
        if self._is_waiting:
            queue.await_end(self._worker.memberships.raise_loss)
        else:
            self._work_until_none_is_left(queue)
        first, settings, audits = self.trials[0].step, self._settings, self._observers.audits
        steps = range(first, first + len(batches)) if audits is not None else ()
        audited = any(is_audited(settings, step) for step in steps)
        reports = self._exchange_reports(audited)
        self._is_settled = True
        return reports

    @property
    def _is_waiting(self) -> bool:
        """Whether this worker has no place among the members."""
        return self._member.place >= len(self._member.workers)

    def _work_until_none_is_left(self, queue: WorkQueue) -> None:
        self._work(queue)
        self._synchronize()
        while self._member.from_first(queue.is_work_left):
            self._work(queue)
            self._synchronize()
        if self._group.is_first and self._group.size > len(self._member.workers):
            queue.end()

    def _queue(self, batches: Sequence[Sequence[GlobalBatch]]) -> WorkQueue:
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
        signals = []
        if member.monitor is not None and not self._is_waiting:
            signals = member.monitor.take(member.position)
        is_asked = self._worker.memberships.is_asked
        # Of a pipeline, its first worker has the losses.
        losses = self._losses.tolist() if member.is_first else [0.0] * len(self.trials)
        own = [self._asks_stop, is_asked, self._difference, sums, signals, losses]
        found = Reports(*map(list, zip(*self._group.of_all(own))))
        if audited:
            self._compare_weights(found.sums)
        return found

    def _take(self, reports: Reports, step: int, loss: float, samples: int) -> None:
        """Take note of what workers reported after `step` steps.

        `loss` is the mean of those in this interval, which had `samples` samples.
        """
        monitor, audits = self._member.monitor, self._observers.audits
        if monitor is not None:
            monitor.arrive(step, loss, samples, filter(None, reports.signals))
        if audits is not None:
            audits.difference = next(filter(None, reports.differences), audits.difference)

    @property
    def _difference(self) -> str | None:
        """Where some step was found to differ from what it should compute, in words."""
        return None if self._observers.audits is None else self._observers.audits.difference

    def _delete_keys_before(self, queue: WorkQueue) -> None:
        """Delete the keys of the interval before: nobody looks at them once all have reported in this."""
        for key in self._used_keys if self._group.is_first else ():
            self._worker.store.delete_key(key)
        self._used_keys = queue.store_keys()

    def _compare_weights(self, sums: Sequence[Sequence[Sequence[float]]]) -> None:
        """Compare what members hold after they took the mean with each other, and with what each brought."""
        step, audits, (before, after) = self.trials[0].step, self._observers.audits, zip(*sums)
        assert audits is not None
        if any(numbers != after[0] for numbers in after):
            what = "workers that took the mean of their weights do not hold the same"
            audits.add_difference(step, what, ADVICE)
        elif not is_mean(self._member.averaging, before, after[0]):
            what = "the weights that workers have in common are not the mean of what each had"
            audits.add_difference(step, what, ADVICE)

    def _work(self, queue: WorkQueue) -> None:
        """Take work until none is left."""
        worker, first = self._worker, self.trials[0].step
        for item, batches in self._items(queue) if self._member.place not in self._idle else ():
            self.is_in_step = True
            losses = self._update(item, [batches[reader] for reader in self._reader_of])
            self.is_in_step = False
            step = first + item.index + 1
            # Others have taken the work before this.
            self._record_step(item.before)
            self._unrecorded = (step, batches[0].epoch, losses)
            self._throughput.count(step, sum(batch.count for batch in batches))
            self._note_throughput()
            if not self._member.is_first:
                continue
            self._asks_stop = self._asks_stop or worker.stop_requested()
            if self._asks_stop or worker.memberships.is_asked or self._difference is not None:
                queue.stop()

    def _items(self, queue: WorkQueue) -> Iterator[tuple[WorkItem, list[Batch]]]:
        """The work of this member, as its first worker takes it; the others have no samples."""
        work = self._load(queue) if self._member.is_first else iter(())
        while True:
            own = next(work, None)
            if (number := self._number_of(own)) is None:
                return
            yield own or queue.without_samples(number)

    def _number_of(self, own: tuple[WorkItem, list[Batch]] | None) -> int | None:
        """The number of the work that the member's first worker has taken, if there was any."""
        number: int | None = self._member.from_first(lambda: None if own is None else own[0].number)
        return number

    def _update(self, item: WorkItem, batches: Sequence[Batch]) -> Tensor:
        member, steps = self._member, [trial.step + item.index for trial in self.trials]
        factors = [trial.lr_factor(step) for trial, step in zip(self.trials, steps)]
        with contextlib.ExitStack() as around:
            if member.monitor is not None:
                around.enter_context(member.monitor.updating(member.averaging))
            losses = member.update(steps, item.place, batches, factors)
        weights = [item.weights[reader] for reader in self._reader_of]
        self._losses = self._losses.to(losses.device) + losses.detach() * losses.new_tensor(weights)
        return losses

    def _record_step(self, samples: int) -> None:
        """Record this worker's last step; `samples` of the interval were used by then, all workers'."""
        if self._unrecorded is not None:
            self._observers.on_step(*self._unrecorded, max(0, samples - self._counted))
            self._counted = max(samples, self._counted)
        self._unrecorded = None

    def _load(self, queue: WorkQueue) -> Iterator[tuple[WorkItem, list[Batch]]]:
        """The work that this worker begins, with its samples; loader processes read ahead of it."""
        for item, batches in self._fetch(queue.take(), self._settings.data.loaders):
            if queue.leaves():
                return
            if queue.begin(item):
                yield item, batches
        yield from self._fetch(queue.take_over(), loaders=0)

    def _fetch(self, items: Iterator[WorkItem], loaders: int) -> Iterator[tuple[WorkItem, list[Batch]]]:
        *copies, items = itertools.tee(items, len(self._readers) + 1)
        reads = [self._read(number, copy, loaders) for number, copy in enumerate(copies)]
        for *batches, item in zip(*reads, items):
            yield item, batches

    def _read(self, number: int, items: Iterator[WorkItem], loaders: int) -> Iterator[Batch]:
        """The samples of one reader's batches."""
        slot, pin = self._readers[number], self.components.device.type == "cuda"
        order, seed = (item.batches[number] for item in items), self.trials[slot].settings.seed
        return load(self._source(slot), order, seed=seed, rank=0, world_size=1, loaders=loaders, pin=pin)

    def evaluate(self, slots: Sequence[int] = (0,)) -> list[dict[str, float]]:
        """Mean loss and metrics over the test split, of which each member takes a share."""
        member, components = self._member, self.components
        totals = member.totals_over(slots, member.place, len(member.workers))
        return results(self._group, [components.of_trial(slot) for slot in slots], totals)

    def state(self, slot: int = 0) -> EngineState | None:
        return self._member.state(slot)

    def check_entering(self, entering: Sequence[TrialInit]) -> None:
        """Refuse trials that cannot join the present ones, before anything changes."""
        self._state.check_entering(entering)

    def change_trials(
        self, leaving: Sequence[int], entering: Sequence[TrialInit], trials: list[Trial]
    ) -> None:
        """Remove and add trials; `trials` are the trials after the change."""
        self.synchronize()
        self.close()
        self._state.change(leaving, entering)
        self.trials = trials
        self.open()

    def apply(self, change: Change) -> None:
        # Work is drawn anew for each interval.
        if not isinstance(change, BatchSizeChange):
            raise cannot_apply(change, f"sync {self._settings.sync.kind}")

    def synchronize(self, staying: Sequence[int] = ()) -> None:
        """Take the mean of all, unless they hold the same: some may have left an interval in its middle.

        Layers that only workers outside `staying` hold go to those in it.
        """
        if not self._is_settled and not self._is_waiting:
            self._synchronize()
        self._is_settled = True
        self._member.leave_to(staying)

    def find_source(self, marks: Sequence[ProgressMark]) -> tuple[int, EngineState] | None:
        return self._state.find_source(marks)

    def close(self) -> None:
        member, self._opened = self._opened, None
        if member is None:
            return
        was_lost = self._worker.memberships.loss() is not None
        with contextlib.suppress(*([RuntimeError] if was_lost else [])):
            member.close()

    def _note_average(self, step: int) -> None:
        """Record the members that have averaged at the end of the interval, unless a loss ended it before."""
        if not self._has_averaged:
            return
        averaging, workers = self._member.averaging, self._member.workers
        distance = averaging.stats.distances[-1] if averaging.stats.distances else 0.0
        self._observers.on_event(run_events.Settled(step, workers, distance))

    def _note_throughput(self, force: bool = False) -> None:
        if force or self._throughput.is_due():
            self._observers.on_event(self._throughput.event(self._member.averaging.stats))


def _dedicated(options: Options, places: int) -> range:
    if isinstance(options, HetPipeOptions) and options.dedicated:
        return serving(places, options.servers, dedicated=True)
    return range(0)
