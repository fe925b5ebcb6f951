"""Training at each worker's own pace: workers claim shares of batches, update alone and average weights.

A run is cut into segments that end where an evaluation or a checkpoint is due. At the end of a segment all
living workers settle on the same state, and what is due is done on it. Nothing here needs all workers: one
that ends or is stopped is left out, and the lowest rank that is there keeps the record.
"""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from plait.core import run_events
from plait.core.errors import LostPeer, PeerError
from plait.data import loader
from plait.data.sampler import GlobalBatch, mix
from plait.launch.run_dir import RunDir
from plait.launch.worker import Worker
from plait.pipeline import named_state
from plait.schema.settings import TrainSettings
from plait.schema.sync_options import EQUAL_STEPS, HetPipeOptions, Options, read_options
from plait.sync.averaging.base import Averaging
from plait.sync.averaging.parameter_server import serving
from plait.sync.averaging.peers import WaitTimer
from plait.sync.averaging.whole_state import rest_of_state
from plait.training import checkpoint as checkpoints
from plait.training.components import Components
from plait.training.engines.averaging import PREFIX as SYNC_PREFIX
from plait.training.engines.averaging import averages_gradients, make_averaging, sources_of
from plait.training.engines.data_parallel import DataParallel
from plait.training.engines.throughput import ThroughputMeter
from plait.training.engines.work_queue import Speed, WorkItem, WorkQueue
from plait.training.evaluate import means, sums_over_share
from plait.training.interval_loop import StretchTrainer

LOOK_S = 0.01
PREFIX = "plait/run"
log = logging.getLogger(__name__)


class OwnPaceTrainer(StretchTrainer):
    """Trains `parts` beside the other workers, averaging weights; `hosts` names the host of each rank."""

    def __init__(
        self, worker: Worker, settings: TrainSettings, parts: Components, folder: RunDir, hosts: Sequence[str]
    ) -> None:
        super().__init__(worker, settings, parts, folder)
        self._hosts = hosts
        # Who averages with whom, by places: here every worker has one.
        self._place, self._places = self._seat()
        self._options = read_options(settings.sync.kind, settings.sync.options, self._places)
        self._members = tuple(range(self._places))
        # Places whose workers serve the others take no work; the others share it.
        self._idle = _dedicated(self._options, self._places)
        self._shares = self._places - len(self._idle)
        self._segment = 0
        self._evaluations = 0
        self._speed = Speed()
        # Keys in the store that someone who was stopped may still come to.
        self._stale: list[str] = []
        self._sync_state: named_state.Tensors = {}
        self._is_linked = False
        self._pace = ThroughputMeter()
        self._counted = 0
        self._unrecorded: tuple[int, int, torch.Tensor, float] | None = None

    def _seat(self) -> tuple[int, int]:
        """This worker's place, of how many."""
        return self.worker.rank, self.worker.world_size

    def _workers_at(self, place: int) -> tuple[int, ...]:
        """The workers that are lost with a place; the first of them keeps a record."""
        return (place,)

    def _make_engine(self) -> DataParallel | None:
        return DataParallel(self.worker, self.settings, self.parts, alone=True)

    def _average_buffers(self) -> None:
        """Settling has done it."""

    def _close(self) -> None:
        self._averaging.close()

    def begin(self, steps: int) -> None:
        """Get ready to go on, and link up with the other workers."""
        # Before the clock starts, as where gradients are summed.
        self._link()
        super().begin(steps)

    def _link(self) -> None:
        self._averaging = self._open()
        self._is_linked = True
        if self._averaging.tolerant:
            leave_world(self._links_by_world())
            self.worker.tolerate_losses()

    def _links_by_world(self) -> bool:
        """Whether the links between some workers go through the world's process group."""
        return False

    def _open(self) -> Averaging:
        """Link up with the other workers; all call it together."""
        parts = self.parts
        sources = sources_of(parts, self._options)
        weights, buffers = list(parts.model.parameters()), list(parts.model.buffers())
        rest = rest_of_state(self.worker.store, SYNC_PREFIX, weights, buffers, parts.optimizer, parts.scaler)
        seed = self.settings.seed
        made = make_averaging(
            self.worker, self._hosts, sources, self._options, seed, step=self.step, at_settle=rest
        )
        if self._sync_state:
            made.load_state(self._by_weight(self._sync_state))
        if averages_gradients(self._options) and self.engine is not None:
            self.engine.before_update = made.after_update
        return made

    def _take_stretch(self, steps: list[GlobalBatch]) -> bool:
        """Work on these steps, then settle."""
        claims = WorkQueue(
            self.worker.store,
            f"{PREFIX}/claims/{self._segment}",
            steps,
            self._shares,
            self._place,
            self._places,
            fixed=self.settings.sync.kind in EQUAL_STEPS,
            ahead=self.settings.data.loaders > 0,
            speed=self._speed,
        )
        self._counted = 0
        self._work(claims)
        members = self._settle()
        self._delete_stale(members)
        while claims.is_work_left():
            self._work(claims)
            members = self._settle()
        self._segment += 1
        self._stale += claims.store_keys()
        done, after = claims.done()
        self.step += done
        self.position = after or self.position
        self._record_step(sum(len(b.samples) for b in steps[:done]))
        self._note_pace(force=True)
        self._note_members(members)
        return claims.stopped()

    def _work(self, claims: WorkQueue) -> None:
        """Take claims until none is left."""
        for claim, batch in self._load(claims) if self._place not in self._idle else ():
            step = self.step + claim.index
            factor = self._lr_factor(step)
            loss = self._update(step, claim.place, batch, factor)
            # Others have taken the claims before this one.
            self._record_step(claim.before)
            self._unrecorded = (step + 1, batch.epoch, loss, self.parts.base_lrs[0] * factor)
            self._pace.count(step + 1, batch.count)
            self._note_pace()
            if self.worker.stop_requested():
                claims.stop()

    def _update(self, step: int, share: int, batch: loader.Batch, factor: float) -> torch.Tensor:
        """Update on a share of a step's batch and average with others; the share's loss."""
        assert self.engine is not None
        # Random numbers depend on the seed, the step and the share alone, whoever takes it.
        loader.seed_all(mix(self.settings.seed, step, share))
        loss = torch.zeros((), dtype=torch.float64)
        if batch.count:
            loss, _ = self.engine.step(batch, factor)
        if not averages_gradients(self._options):
            self._averaging.after_update()
        return loss

    def _settle(self) -> tuple[int, ...]:
        """Come to the same state as all who live, whose places it returns."""
        return self._averaging.settle()

    def _record_step(self, samples: int) -> None:
        """Write this worker's last step down; `samples` of the segment were used by then, all workers'."""
        if self._unrecorded is not None:
            self.recorder.step(*self._unrecorded, max(0, samples - self._counted))
            self._counted = max(samples, self._counted)
        self._unrecorded = None

    def _delete_stale(self, members: tuple[int, ...]) -> None:
        """Delete the keys of earlier segments once all who may ever look at them have come to a later one."""
        if not set(members) | self._averaging.ended() >= set(range(self._places)):
            return
        for key in self._stale if self._place == min(members) else ():
            self.worker.store.delete_key(key)
        self._stale = []

    def _load(self, claims: WorkQueue) -> Iterator[tuple[WorkItem, loader.Batch]]:
        """The claims that this worker begins, with their samples; loader processes read ahead of the work."""
        for claim, batch in self._fetch(claims.take(), self.settings.data.loaders):
            if claims.leaves():
                return
            if claims.begin(claim):
                yield claim, batch
        yield from self._fetch(claims.take_over(), loaders=0)

    def _fetch(self, claims: Iterator[WorkItem], loaders: int) -> Iterator[tuple[WorkItem, loader.Batch]]:
        taken: deque[WorkItem] = deque()

        def order() -> Iterator[GlobalBatch]:
            for claim in claims:
                taken.append(claim)
                yield claim.batch

        found = loader.load(
            self.parts.train_set,
            order(),
            seed=self.settings.seed,
            rank=0,
            world_size=1,
            loaders=loaders,
            pin=self.parts.device.type == "cuda",
        )
        for batch in found:
            yield taken.popleft(), batch

    def _measure(self) -> dict[str, float]:
        """Mean loss and metric over the test split, shared among those who have just settled.

        A worker that ends meanwhile takes its share with it. The first that has all there is says what
        holds, so that all decide alike.
        """
        self._evaluations += 1
        key, store, place = f"{PREFIX}/evaluation/{self._evaluations}", self.worker.store, self._place
        if place in self._members:
            sums = self._sums_over(self._members.index(place), len(self._members))
            store.set(f"{key}/{place}", json.dumps(sums.tolist()))
        self._stale += [f"{key}/all", *(f"{key}/{member}" for member in self._members)]
        waiting = set(self._members)
        waited = WaitTimer(time.monotonic, self.worker.timeout_s)
        total = torch.zeros(4, dtype=torch.float64)
        while waiting and not store.check([f"{key}/all"]):
            for member in [m for m in waiting if store.check([f"{key}/{m}"])]:
                total += torch.tensor(json.loads(store.get(f"{key}/{member}")), dtype=torch.float64)
                waiting.discard(member)
                waited.restart()
            waiting &= set(self._averaging.living())
            if waiting and waited.is_over():
                late = [self._workers_at(member)[0] for member in sorted(waiting)]
                raise PeerError(
                    f"worker {self.worker.rank} waited {waited.limit_s:g} s for the evaluation of worker "
                    f"{', '.join(map(str, late))}; it hangs, or is slower than parallel.timeout_s allows",
                    LostPeer.SILENT,
                    late[0],
                )
            time.sleep(LOOK_S if waiting else 0)
        agreed = store.compare_set(f"{key}/all", "", json.dumps(total.tolist()))
        return means(self.parts, torch.tensor(json.loads(agreed), dtype=torch.float64))

    def _sums_over(self, share: int, shares: int) -> torch.Tensor:
        """The sums of loss and metric over a share of the test split."""
        return sums_over_share(self.parts, self.settings, share, shares)

    def _writes(self) -> bool:
        return self._place == min(self._members)

    def _save_last(self, metrics: dict[str, float]) -> None:
        """Write the last checkpoint, and leave only once someone has: the next where the writer is lost."""
        super()._save_last(metrics)
        saved = f"{PREFIX}/saved"
        while not self._writes() and not self.worker.store.check([saved]):
            time.sleep(LOOK_S)
            living = tuple(sorted(set(self._members) & set(self._averaging.living())))
            if min(self._members) not in living and living:
                self._note_members(living)
                super()._save_last(metrics)
        if self._writes():
            self.worker.store.set(saved, "1")

    def _state(self) -> checkpoints.Checkpoint:
        """With what the sync keeps besides the state of workers, by the names of the weights."""
        if not self._is_linked:
            return replace(super()._state(), sync=self._sync_state)
        own = {
            f"{self.parts.names[weight]}/{key}": tensor
            for key, tensors in self._averaging.state().items()
            for weight, tensor in zip(self.parts.model.parameters(), tensors)
        }
        return replace(super()._state(), sync=own)

    def _take_up(self, state: checkpoints.Checkpoint) -> None:
        super()._take_up(state)
        self._sync_state = state.sync

    def _by_weight(self, state: named_state.Tensors) -> dict[str, list[torch.Tensor]]:
        """What `_state` wrote down of the sync: for each key a tensor for each weight, or none."""
        names = [self.parts.names[weight] for weight in self.parts.model.parameters()]
        keys = {path.rpartition("/")[2] for path in state}
        return {
            key: [state[f"{name}/{key}"] for name in names]
            for key in sorted(keys)
            if all(f"{name}/{key}" in state for name in names)
        }

    def _note_members(self, members: tuple[int, ...]) -> None:
        """Keep the record where the one that kept it is gone; tell of those that are missing."""
        lost = sorted(w for place in set(self._members) - set(members) for w in self._workers_at(place))
        self._members = members
        if self._averaging.tolerant:
            out = [w for place in set(range(self._places)) - set(members) for w in self._workers_at(place)]
            self.worker.leave_out(sorted(out))
        if lost and self._writes():
            if self._events is not None:
                self.recorder.take_over(self._events)
            self.recorder.warn(
                f"worker {', '.join(map(str, lost))} is gone or silent since step {self.step}; "
                f"{sum(len(self._workers_at(m)) for m in members)} of {self.worker.world_size} workers go on"
            )
            for worker in lost:
                self._note(run_events.WorkerLost(worker, self.step))
        distance = self._averaging.tally.distances[-1] if self._averaging.tally.distances else 0.0
        self._note(run_events.Settled(self.step, tuple(self._workers_at(m)[0] for m in members), distance))

    def _note_pace(self, force: bool = False) -> None:
        if force or self._pace.is_due():
            self._note(self._pace.event(self._averaging.tally))


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
