"""A step on whole models: forward and backward on this worker's share of a batch, all-reduce, update.

N workers on a global batch take the same steps as one process on it. Each weights its loss by its share's
size, and gradients are summed. BatchNorm uses the statistics of each worker's share, as in
DistributedDataParallel; `average_buffers` gives all workers the mean of their running statistics, weighted by
the samples that each has seen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plait.core.errors import PeerError
from plait.data.loader import Batch
from plait.fusion.trials.partial_gradients import note_trials, trials_without_gradient
from plait.launcher.worker_process import Worker
from plait.pipeline.updates.frozen import FrozenAtStart
from plait.schema.settings import TrainSettings
from plait.schema.topology_spec import read_topology_spec
from plait.sync.allreduce.autotune import forget, resolve_topology
from plait.sync.allreduce.buckets import AllReduce
from plait.sync.buffers import average
from plait.sync.carried_rows import merge_rows
from plait.training.components import Components, TrialInit
from plait.training.engines.straggler_injection import StragglerInjector
from plait.training.fused.fused_components import FusedComponents
from plait.training.fused.rounds import Round
from plait.training.fused.step_graph import StepGraph
from plait.training.fused.trial_norms import TrialNorms
from plait.training.monitoring.step_monitor import StepMonitor, notes_of
from plait.training.worker_group import ALONE, WorkerGroup
from plait.verification.audit import sum_over_workers
from plait.verification.replay import Part

# The components of one trial, or of fused trials.
AnyComponents = Components | FusedComponents


@dataclass(frozen=True)
class StepRequests:
    """Requests of any worker, read after a step: to stop the run, or to change its members."""

    stop: bool
    change: bool


def requests_of(worker: Worker) -> StepRequests:
    """The present requests to this worker."""
    return StepRequests(worker.stop_requested(), worker.memberships.is_asked)


def no_requests() -> StepRequests:
    return StepRequests(False, False)


class TrainStep:
    """Takes steps on `components`, of one trial or of several, together with the workers of `group`.

    `requests` returns the requests to this worker, which are shared with the group. `rank` is its number for
    injected delays (`slow`). Gradient norms are measured by `norms`, unless given by those of the components.
    """

    def __init__(
        self,
        components: AnyComponents,
        settings: TrainSettings,
        group: WorkerGroup = ALONE,
        requests: Callable[[], StepRequests] = no_requests,
        rank: int = 0,
        may_fail: bool = False,
        monitor: StepMonitor | None = None,
        norms: TrialNorms[Any] | None = None,
    ) -> None:
        self._components = components
        self._settings = settings
        self._group = group
        self._requests = requests
        self._may_fail = may_fail
        self._sync = None if group.is_alone else self._make_sync()
        self._monitor: StepMonitor | None = None
        self.watch(monitor)
        self._norms: TrialNorms[Any] | None = components.norms if norms is None else norms
        self.chosen = self._start_topology()
        self._slow = StragglerInjector(settings.slow, rank, settings.seed)
        self._frozen = FrozenAtStart(components.model.named_parameters())
        self._flags = _Flags(components.device)
        # On a GPU, what replays steps; their trials' numbers are in the graph.
        self._graph: StepGraph | None = None
        if components.device.type == "cuda" and group.is_alone and components.can_be_captured:
            self._graph = StepGraph(self._whole_step, components.zero_grad)
        # The microbatches of an audited step.
        self.recorded: list[Part] | None = None
        # Samples of this worker since running statistics were last averaged.
        self._seen = 0
        # An earlier group may have taken steps.
        self._differs = True
        # Called between backward and the update.
        self.before_update: Callable[[], object] | None = None
        # The seed of the next update, for an optimizer that draws random numbers.
        self.update_seed: int | None = None

    def _make_sync(self) -> AllReduce:
        components, group = self._components, self._group
        assert group.members is not None
        extra_scalars = components.trials + 2 + notes_of(group.size)
        components.check_summed(self._settings.optimizer)
        if components.has_partial_gradients:
            extra_scalars += len(components.parameters) * components.trials
        return AllReduce(
            components.parameters,
            group.members,
            max_scalars=extra_scalars,
            may_fail=self._may_fail,
            copy_gradients=not components.is_optimizer_known,
        )

    def watch(self, monitor: StepMonitor | None) -> None:
        """Measure the next steps with `monitor` (None: with none); all workers call it together."""
        self._monitor = monitor
        if self._sync is not None and monitor is not None:
            monitor.watch(self._sync)
        elif self._sync is not None:
            self._sync.measure_norms(False)

    def _start_topology(self) -> str | None:
        """Set up the topology of the settings; returns its name if it was chosen by measuring."""
        members = self._group.members
        if self._sync is None or members is None:
            return None
        topology, chosen = resolve_topology(
            self._settings.topology, members, self._sync.gradient_bytes, self._components.device
        )
        if topology is not None:
            self._sync.switch(topology)
        return chosen

    def switch(self, topology: str) -> None:
        """Use the topology of that name from the next step on; all workers call it between two steps."""
        members = self._group.members
        if self._sync is not None and members is not None:
            forget(members)
            spec, size = read_topology_spec(topology), self._sync.gradient_bytes
            self._sync.switch(resolve_topology(spec, members, size, self._components.device)[0])
            if self._monitor is not None:
                self._monitor.topology = topology

    def pause_monitor(self) -> None:
        """Exclude the time until the next step from measurements."""
        if self._monitor is not None:
            self._monitor.pause()

    def fail(self, failure: PeerError) -> None:
        """Make threads that wait for gradients of other workers fail; may be called from any thread."""
        if self._sync is not None:
            self._sync.fail(failure)

    def close(self) -> None:
        """End the threads that overlap with steps; called after the last one."""
        if self._sync is not None:
            self._sync.close()

    def step(self, batches: Sequence[Batch], lr_factors: Sequence[float]) -> tuple[Tensor, StepRequests]:
        """Forward, backward, all-reduce, update; returns each trial's mean loss and the workers' requests.

        PeerError if another worker is lost; then nothing was updated.
        """
        self._frozen.check()
        components, accumulate = self._components, self._settings.accumulate
        components.set_lr(lr_factors)
        rounds = components.cut(batches, [accumulate] * len(batches), alone=self._sync is None)
        if self._graph is not None and len(rounds) == 1 and len({b.count for b in batches}) == 1:
            return self._graph(components.to_device(rounds[0][0])), self._requests()
        if self._sync is None:
            components.zero_grad()
            losses, requests = self._backward(rounds, batches), self._requests()
            if self._monitor is not None:
                self._monitor.end_alone(losses[0], components.model.parameters(), batches[0].total)
        else:
            self._sync.begin()
            with components.drawing_alike(batches, accumulate, self._group.size):
                losses, requests = self._agree(self._sync, self._backward(rounds, batches), batches)
            self._differs = True
        if self._norms is not None:
            samples = [batch.total for batch in batches]
            self._norms.before_update(components.trial_gradients, samples, components.loss_scales)
        if self.before_update is not None:
            self.before_update()
        components.update(self._settings.clip_norm, self.update_seed)
        return losses, requests

    def _whole_step(self, content: Any) -> Tensor:
        """A step of fused trials on whole batches of one size."""
        components = self._components
        components.zero_grad()
        losses = components.losses(content)
        components.backward(losses)
        components.update()
        return losses.detach().to(torch.float64)

    def _agree(
        self, sync: AllReduce, losses: Tensor, batches: Sequence[Batch]
    ) -> tuple[Tensor, StepRequests]:
        """Sum gradients, the losses, the workers' requests, and the monitor's measurements."""
        local, trials, share = self._requests(), len(losses), self._share(batches)
        numbers = [losses, losses.new_tensor([float(local.stop), float(local.change)])]
        if self._components.has_partial_gradients:
            numbers.append(self._gradient_presence().flatten())
        if self._monitor is None:
            sums = sync.sum_gradients(torch.cat(numbers), share)
        else:
            numbers.append(self._monitor.begin_sum(share))
            sums = sync.sum_gradients(torch.cat(numbers), share, weigh_norm=1 / share if share else 0.0)
            self._monitor.end_sum(sync, sums[0], sums[3:], batches[0].total)
        if self._components.has_partial_gradients:
            self._record_gradients(sums[trials + 2 :])
        requests = self._flags.before()
        self._flags.record(sums[trials : trials + 2])
        return sums[:trials], requests

    def _gradient_presence(self) -> Tensor:
        """Whether this worker has a gradient, by parameter and trial, as 0 or 1."""
        parameters, trials = self._components.parameters, self._components.trials
        rows = torch.zeros(len(parameters), trials, dtype=torch.float64, device=self._components.device)
        for row, parameter in zip(rows, parameters):
            if parameter.grad is not None:
                row += 1.0
                row[list(trials_without_gradient(parameter, trials))] = 0.0
        return rows

    def _record_gradients(self, counts: Tensor) -> None:
        """ProgressMark a trial as having a gradient if it has one on any worker."""
        parameters, trials = self._components.parameters, self._components.trials
        for parameter, row in zip(parameters, counts.view(-1, trials).tolist()):
            # Gradients that backward itself reduced, for all trials, are not counted.
            note_trials(parameter, [number for number, count in enumerate(row) if count])

    def _backward(self, rounds: Sequence[Round], batches: Sequence[Batch]) -> Tensor:
        """Forward and backward of all rounds; returns this worker's part of the trials' losses."""
        with self._slow.slowed():
            return self._backward_at_full_speed(rounds, batches)

    def _backward_at_full_speed(self, rounds: Sequence[Round], batches: Sequence[Batch]) -> Tensor:
        components, share = self._components, self._share(batches)
        total = torch.zeros(components.trials, dtype=torch.float64, device=components.device)
        if not rounds:
            # The scaler of the other workers is initialized by now.
            components.begin_scaling(total)
        self._seen += sum(batch.count for batch in batches)
        for number, (microbatches, weights) in enumerate(rounds):
            is_last = number == len(rounds) - 1
            content = components.to_device(microbatches)
            if self.recorded is not None:
                inputs, target = content
                self.recorded.append(Part(inputs, target, weights[0], share=share).copied())
            losses = components.losses(content, [count for _, count in microbatches], weights)
            weighted = losses if set(weights) == {1.0} else components.weighted(losses, weights)
            if self._sync is not None:
                self._sync.before_backward(last=is_last, factor=share)
            components.backward(weighted)
            total += weighted.detach().double() * share
            if not is_last:
                if self._norms is not None:
                    self._norms.after_microbatch(components.trial_gradients, weights)
                if self._monitor is not None:
                    self._monitor.after_microbatch(components.model.parameters(), weights[0])
        return total

    def _share(self, batches: Sequence[Batch]) -> float:
        return 1.0 if self._sync is None else self._components.share(batches)

    def time_backward(self, batch: Batch) -> float:
        """Seconds that forward and backward of `batch` take on this worker; the gradients are dropped."""
        started = time.perf_counter()
        batches = [batch] * self._components.trials
        microbatches = [self._settings.accumulate] * len(batches)
        rounds = self._components.cut(batches, microbatches, alone=self._sync is None)
        self._backward(rounds, batches)
        if self._components.device.type == "cuda":
            torch.cuda.synchronize()
        self._components.zero_grad()
        return time.perf_counter() - started

    def average_buffers(self) -> None:
        """Average running statistics over the workers, if they may differ; all workers call it."""
        if self._group.is_alone or not self._differs:
            return
        merge_rows(self._components.model, self._group.sums)
        average(list(self._components.model.buffers()), self._group.sums, samples=self._seen)
        self._seen, self._differs = 0, False


def step_alone(entry: TrialInit, batch: Batch, factor: float, group: WorkerGroup = ALONE) -> Tensor:
    """Take a step with one trial alone; returns its loss.

    The workers of `group` take it together, each on its share of the batch, and torch sums the gradients.
    """
    components = entry.components
    components.seed_step(entry.settings.seed, entry.age, 0)
    step = TrainStep(components, entry.settings)
    if not group.is_alone:
        none = torch.zeros(1, dtype=torch.float64)
        step.before_update = lambda: sum_over_workers(none, components.parameters, group.sums)
    return group.total(step.step([batch], [factor])[0][0], components.device)


class _Flags:
    """The workers' requests, read one step after they were summed to avoid waiting for the GPU."""

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._values = torch.zeros(2, dtype=torch.float64, pin_memory=on_gpu)
        self._arrived = torch.cuda.Event() if on_gpu else None

    def record(self, requests: Tensor) -> None:
        self._values.copy_(requests, non_blocking=True)
        if self._arrived is not None:
            self._arrived.record()

    def before(self) -> StepRequests:
        if self._arrived is not None:
            self._arrived.synchronize()
        stop, change = self._values.tolist()
        return StepRequests(stop > 0, change > 0)
