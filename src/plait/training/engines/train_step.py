"""A step on a whole model: forward and backward on this worker's share of a batch, agreement, update.

N workers on a global batch take the same steps as one process on it. Each weights its loss by its share's
size, and gradients are summed. BatchNorm uses the statistics of each worker's share, as in
DistributedDataParallel; `average_buffers` gives all workers the mean of their running statistics, weighted by
the samples that each has seen.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plait.core.errors import PeerError
from plait.data.calling import forward
from plait.data.loader import Batch, cut, seed_all, to_device
from plait.launch.worker import Worker
from plait.pipeline.frozen import FrozenAtStart
from plait.pipeline.named_state import is_known
from plait.schema.settings import TrainSettings
from plait.schema.topology_spec import read_topology_spec
from plait.sync.allreduce.autotune import TopologyChosen, resolve_topology
from plait.sync.allreduce.buckets import AllReduce
from plait.sync.allreduce.sums import whole_world
from plait.sync.buffers import average
from plait.sync.carried_rows import merge_rows
from plait.training.checks.replicas import FirstStep
from plait.training.components import Components
from plait.training.engines.stragglers import StragglerInjector
from plait.training.monitoring.own_pace import ShareMonitor
from plait.training.monitoring.whole_model import StepMonitor, notes_of
from plait.training.optimizers.lr_schedule import set_lr
from plait.training.optimizers.traits import check_gradients_left, find_traits
from plait.verification.replay import Part


@dataclass(frozen=True)
class StepRequests:
    """Requests of any worker, read after a step: to stop the run, or to change its members."""

    stop: bool
    change: bool


class TrainStep:
    """Takes steps on `parts` together with the other workers, or, with `alone`, on its own gradients."""

    def __init__(
        self,
        worker: Worker,
        settings: TrainSettings,
        parts: Components,
        alone: bool = False,
        monitor: StepMonitor | None = None,
        own_monitor: ShareMonitor | None = None,
    ) -> None:
        self._worker = worker
        self._settings = settings
        self._parts = parts
        together = worker.world_size > 1 and not alone
        self._members = whole_world(worker.rendezvous) if together else None
        self._sync = self._make_sync() if together else None
        self._monitor: StepMonitor | None = None
        # Of a worker alone, or at its own pace.
        self._alone: StepMonitor | ShareMonitor | None = None
        self.watch(monitor)
        self._alone = own_monitor or monitor
        self.chosen = self._start_topology()
        self._slow = StragglerInjector(settings.slow, worker.rank, settings.seed)
        self._frozen = FrozenAtStart(parts.model.named_parameters())
        self._flags = _Flags(parts.device)
        # Where a step is audited: what it is taken on.
        self.recorded: list[Part] | None = None
        # Before the first update workers see whether they hold the same.
        self._is_first = True
        self._last_inputs: Any = None
        # Samples of this worker since all agreed on running statistics.
        self._seen = 0
        # What comes between the gradients of a worker alone and its update.
        self.before_update: Callable[[], None] | None = None
        # Where the random numbers of the next update start, for an optimizer that draws some.
        self.update_seed: int | None = None

    def _make_sync(self) -> AllReduce:
        settings, named = self._settings.optimizer, dict(self._parts.model.named_parameters())
        check_gradients_left(settings.kind, find_traits(settings, named))
        parameters, notes = list(self._parts.model.parameters()), 3 + notes_of(self._worker.world_size)
        may_fail = self._worker.memberships.can_change
        # Some optimizers keep the gradients.
        own_memory = not is_known(self._parts.optimizer)
        return AllReduce(
            parameters, members=self._members, most_notes=notes, may_fail=may_fail, own_memory=own_memory
        )

    def watch(self, monitor: StepMonitor | None) -> None:
        """Let `monitor` measure the steps from the next one on, or none; all workers call it together."""
        self._monitor = self._alone = monitor
        if self._sync is not None and monitor is not None:
            monitor.watch(self._sync)
        elif self._sync is not None:
            self._sync.measure_norms(False)

    def _start_topology(self) -> TopologyChosen | None:
        """Sum as the settings ask; what was measured for it, if anything was."""
        if self._sync is None or self._members is None:
            return None
        topology, chosen = resolve_topology(
            self._settings.topology, self._members, self._sync.gradient_bytes, self._parts.device
        )
        if topology is not None:
            self._sync.switch(topology)
        return chosen

    def switch(self, topology: str) -> None:
        """Sum over the topology of that name from the next step on; all workers call it between two steps."""
        if self._sync is not None and self._members is not None:
            spec, size = read_topology_spec(topology), self._sync.gradient_bytes
            self._sync.switch(resolve_topology(spec, self._members, size, self._parts.device)[0])
            if self._monitor is not None:
                self._monitor.topology = topology

    def fail(self, failure: PeerError) -> None:
        """Make threads that wait for gradients of other workers fail; may be called from any thread."""
        if self._sync is not None:
            self._sync.fail(failure)

    def close(self) -> None:
        """End the threads that overlap with steps; called after the last one."""
        if self._sync is not None:
            self._sync.close()

    def step(self, batch: Batch, lr_factor: float) -> tuple[Tensor, StepRequests]:
        """Forward, backward, agree, update; the global batch's mean loss, and the workers' requests.

        PeerError where another worker is lost: then nothing was updated.
        """
        self._frozen.check()
        optimizer = self._parts.optimizer
        set_lr(optimizer, self._parts.base_lrs, lr_factor)
        if self._sync is None:
            optimizer.zero_grad(set_to_none=True)
            loss, requests = self._backward(batch), self._own_requests()
            if self._alone is not None:
                self._alone.end_alone(loss, self._parts.model.parameters(), batch.total)
        else:
            self._sync.begin()
            first = FirstStep(self._parts.model) if self._is_first else None
            loss, requests = self._agree(self._sync, self._backward(batch), batch)
            if first is not None:
                self._is_first = False
                first.check(self._last_inputs)
                self._last_inputs = None
        if self.before_update is not None:
            self.before_update()
        self._update()
        return loss, requests

    def _own_requests(self) -> StepRequests:
        return StepRequests(self._worker.stop_requested(), self._worker.memberships.is_asked)

    def _agree(self, sync: AllReduce, loss: Tensor, batch: Batch) -> tuple[Tensor, StepRequests]:
        """Sum gradients, the loss, the workers' requests, and the monitor's measurements."""
        own, share = self._own_requests(), self._share(batch)
        notes = torch.stack([loss, *(torch.full_like(loss, float(flag)) for flag in (own.stop, own.change))])
        if self._monitor is None:
            notes = sync.agree(notes, share)
        else:
            measured = self._monitor.begin_sum(share)
            notes = sync.agree(torch.cat([notes, measured]), share, weigh_norm=1 / share if share else 0.0)
            self._monitor.end_sum(sync, notes[0], notes[3:], batch.total)
        requests = self._flags.before()
        self._flags.note(notes[1:3])
        return notes[0], requests

    def _backward(self, batch: Batch) -> Tensor:
        with self._slow.slowed():
            return self._backward_at_full_speed(batch)

    def _backward_at_full_speed(self, batch: Batch) -> Tensor:
        parts = self._parts
        total = torch.zeros((), dtype=torch.float64, device=parts.device)
        # What hooks see is the gradient of this worker's mean, as under DistributedDataParallel; its share of
        # the batch comes in when gradients are summed.
        share = self._share(batch)
        whole = batch.total if self._sync is None else batch.count
        if batch.count == 0:
            # The scaler makes its scale on first use; the other workers have one by now.
            parts.scaler.scale(total)
            return total
        self._seen += batch.count
        pieces = list(cut(batch.content, batch.count, self._settings.accumulate))
        for i, (content, count) in enumerate(pieces):
            inputs, target = to_device(content, parts.device, parts.dtype)
            if self.recorded is not None:
                self.recorded.append(Part(inputs, target, count / whole, share=share).own())
            self._last_inputs = inputs if self._is_first else None
            with parts.autocast():
                loss = parts.loss(forward(parts.model, inputs), target)
            weighted = loss * (count / whole)
            if self._sync is not None:
                self._sync.before_backward(last=i == len(pieces) - 1, factor=share)
            parts.scaler.scale(weighted).backward()
            total += weighted.detach().double() * share
            if self._alone is not None and i < len(pieces) - 1:
                self._alone.after_microbatch(parts.model.parameters(), count / batch.total)
        return total

    def _share(self, batch: Batch) -> float:
        return 1.0 if self._sync is None else batch.count / batch.total

    def time_backward(self, batch: Batch) -> float:
        """Seconds that forward and backward of `batch` take on this worker; the gradients are dropped."""
        started = time.perf_counter()
        self._backward(batch)
        if self._parts.device.type == "cuda":
            torch.cuda.synchronize()
        self._parts.optimizer.zero_grad(set_to_none=True)
        return time.perf_counter() - started

    def _update(self) -> None:
        parts = self._parts
        if self._settings.clip_norm is not None:
            parts.scaler.unscale_(parts.optimizer)
            torch.nn.utils.clip_grad_norm_(parts.model.parameters(), self._settings.clip_norm)
        if self.update_seed is not None and not is_known(parts.optimizer):
            seed_all(self.update_seed)
        parts.scaler.step(parts.optimizer)
        parts.scaler.update()

    def average_buffers(self) -> None:
        """Give all workers the mean of their running statistics; all ranks call it together."""
        if self._worker.world_size > 1:
            merge_rows(self._parts.model)
            average(list(self._parts.model.buffers()), samples=self._seen)
            self._seen = 0


class _Flags:
    """The workers' requests, read one step after they were summed to avoid waiting for the GPU."""

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._values = torch.zeros(2, dtype=torch.float64, pin_memory=on_gpu)
        self._arrived = torch.cuda.Event() if on_gpu else None

    def note(self, requests: Tensor) -> None:
        self._values.copy_(requests, non_blocking=True)
        if self._arrived is not None:
            self._arrived.record()

    def before(self) -> StepRequests:
        if self._arrived is not None:
            self._arrived.synchronize()
        stop, change = self._values.tolist()
        return StepRequests(stop > 0, change > 0)
