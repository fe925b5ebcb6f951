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

import torch
import torch.distributed as dist

from plait.cluster.worker import Worker
from plait.runtime import events, loading
from plait.runtime.averagings import make_averaging, sources_of
from plait.runtime.build import Parts
from plait.runtime.claims import Claim, Claims
from plait.runtime.data_parallel import DataParallel
from plait.runtime.evaluate import means, sums_over_share
from plait.runtime.folder import RunFolder
from plait.runtime.sampling import GlobalBatch, mix
from plait.runtime.settings import TrainSettings
from plait.runtime.stretch_trainer import StretchTrainer
from plait.sync.averaging import Tally
from plait.sync.options import EQUAL_STEPS, read_options

PACE_S = 1.0
LOOK_S = 0.01
PREFIX = "plait/run"
log = logging.getLogger(__name__)


class OwnPaceTrainer(StretchTrainer):
    """Trains `parts` beside the other workers, averaging weights; `hosts` names the host of each rank."""

    def __init__(
        self, worker: Worker, settings: TrainSettings, parts: Parts, folder: RunFolder, hosts: Sequence[str]
    ) -> None:
        super().__init__(worker, settings, parts, folder)
        self._hosts = hosts
        self._options = read_options(settings.sync.kind, settings.sync.options, worker.world_size)
        self._members = tuple(range(worker.world_size))
        self._segment = 0
        self._evaluations = 0
        self._pace = _Pace()
        self._counted = 0
        self._unrecorded: tuple[int, int, torch.Tensor, float] | None = None

    def _make_engine(self) -> DataParallel:
        return DataParallel(self.worker, self.settings, self.parts, alone=True)

    def _average_buffers(self) -> None:
        """Settling has done it."""

    def _close(self) -> None:
        self._averaging.close()

    def begin(self, steps: int) -> None:
        """Get ready to go on, and link up with the other workers."""
        super().begin(steps)
        self._averaging = make_averaging(
            self.worker,
            self._hosts,
            sources_of(self.parts, getattr(self._options, "state", False)),
            self._options,
            self.settings.seed,
        )
        if self._averaging.tolerant and dist.is_initialized():
            # All are linked by now. Collectives, and a group's end, would wait for workers that are gone.
            dist.destroy_process_group()

    def _take_stretch(self, steps: list[GlobalBatch]) -> bool:
        """Work on these steps, then settle."""
        workers = self.worker.world_size
        fixed = self.worker.rank if self.settings.sync.kind in EQUAL_STEPS else None
        claims = Claims(self.worker.store, f"{PREFIX}/claims/{self._segment}", steps, workers, fixed)
        self._counted = 0
        self._work(claims)
        members = self._averaging.settle()
        while claims.is_work_left():
            self._work(claims)
            members = self._averaging.settle()
        self._segment += 1
        done, after = claims.done()
        self.step += done
        self.position = after or self.position
        self._record_step(sum(len(b.samples) for b in steps[:done]))
        self._note_pace(force=True)
        self._note_members(members)
        return claims.stopped()

    def _work(self, claims: Claims) -> None:
        """Take claims until none is left."""
        assert self.engine is not None
        for claim, batch in self._load(claims):
            step = self.step + claim.index
            # Random numbers depend on the seed, the step and the share alone, whoever takes it.
            loading.seed_all(mix(self.settings.seed, step, claim.place))
            factor = self._lr_factor(step)
            loss = torch.zeros((), dtype=torch.float64)
            if batch.count:
                loss, _ = self.engine.step(batch, factor)
            self._averaging.after_update()
            # Others have taken the claims before this one.
            self._record_step(claim.before)
            self._unrecorded = (step + 1, batch.epoch, loss, self.parts.base_lrs[0] * factor)
            self._pace.count(step + 1, batch.count)
            self._note_pace()
            if self.worker.stop_requested():
                claims.stop()

    def _record_step(self, samples: int) -> None:
        """Write this worker's last step down; `samples` of the segment were used by then, all workers'."""
        if self._unrecorded is not None:
            self.recorder.step(*self._unrecorded, max(0, samples - self._counted))
            self._counted = max(samples, self._counted)
        self._unrecorded = None

    def _load(self, claims: Claims) -> Iterator[tuple[Claim, loading.Batch]]:
        """This worker's claims with their samples; loader processes claim ahead of the work."""
        taken: deque[Claim] = deque()

        def order() -> Iterator[GlobalBatch]:
            for claim in claims.take():
                taken.append(claim)
                yield claim.batch

        found = loading.load(
            self.parts.train_set,
            order(),
            seed=self.settings.seed,
            rank=0,
            world_size=1,
            loaders=self.settings.data.loaders,
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
        key, store, rank = f"{PREFIX}/evaluation/{self._evaluations}", self.worker.store, self.worker.rank
        if rank in self._members:
            place, count = self._members.index(rank), len(self._members)
            sums = sums_over_share(self.parts, self.settings, place, count)
            store.set(f"{key}/{rank}", json.dumps(sums.tolist()))
        waiting = set(self._members)
        total = torch.zeros(4, dtype=torch.float64)
        while waiting and not store.check([f"{key}/all"]):
            for member in [m for m in waiting if store.check([f"{key}/{m}"])]:
                total += torch.tensor(json.loads(store.get(f"{key}/{member}")), dtype=torch.float64)
                waiting.discard(member)
            waiting &= set(self._averaging.living())
            time.sleep(LOOK_S if waiting else 0)
        agreed = store.compare_set(f"{key}/all", "", json.dumps(total.tolist()))
        return means(self.parts, torch.tensor(json.loads(agreed), dtype=torch.float64))

    def _writes(self) -> bool:
        return self.worker.rank == min(self._members)

    def _note_members(self, members: tuple[int, ...]) -> None:
        """Keep the record where the one that kept it is gone; tell of those that are missing."""
        lost = sorted(set(self._members) - set(members))
        self._members = members
        if lost and self._writes():
            if self._events is not None:
                self.recorder.take_over(self._events)
            self.recorder.warn(
                f"worker {', '.join(map(str, lost))} is gone or silent since step {self.step}; "
                f"{len(members)} of {self.worker.world_size} workers go on"
            )
            for worker in lost:
                self._note(events.WorkerLost(worker, self.step))
        distance = self._averaging.tally.distances[-1] if self._averaging.tally.distances else 0.0
        self._note(events.Settled(self.step, members, distance))

    def _note_pace(self, force: bool = False) -> None:
        if force or self._pace.is_due():
            self._note(self._pace.event(self._averaging.tally))


class _Pace:
    """How fast this worker goes, between two events."""

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._step = self._updates = self._samples = 0
        self._before = Tally()

    def count(self, step: int, samples: int) -> None:
        self._step = step
        self._updates += 1
        self._samples += samples

    def is_due(self) -> bool:
        return time.monotonic() - self._since >= PACE_S

    def event(self, tally: Tally) -> events.Pace:
        """What was counted since the event before."""
        now = time.monotonic()
        seconds, before = now - self._since, self._before
        groups = tally.groups - before.groups
        event = events.Pace(
            step=self._step,
            updates=self._updates,
            samples=self._samples,
            seconds=round(seconds, 6),
            samples_per_s=round(self._samples / max(seconds, 1e-9), 1),
            wait_share=round((tally.waited_s - before.waited_s) / max(seconds, 1e-9), 4),
            groups=groups,
            group_size=round((tally.members - before.members) / groups, 3) if groups else None,
            bytes_sent=tally.bytes_sent - before.bytes_sent,
        )
        self._since, self._updates, self._samples = now, 0, 0
        self._before = Tally(tally.groups, tally.members, tally.waited_s, tally.bytes_sent)
        return event
