"""Members of decentralized training: each takes shares of batches when ready, and averages with others."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from plait.adapt.members import ProgressMark, most_advanced
from plait.adapt.monitors.squared_norms import trial_squared_norms
from plait.data import loader
from plait.launcher.worker_process import Worker
from plait.pipeline.named_state import Tensors
from plait.schema.sync_options import options_among
from plait.sync.averaging.base import WeightAveraging
from plait.sync.make_averaging import PREFIX, averages_gradients, make_averaging, sources_from, workers_of
from plait.training.batch_streams import with_replacements
from plait.training.checkpoint import Checkpoint, EngineState
from plait.training.components import TrialInit
from plait.training.engines.train_step import AnyComponents, TrainStep
from plait.training.engines.whole_model import StepAudit
from plait.training.evaluate import Totals
from plait.training.fused.trial_norms import TrialNorms
from plait.training.monitoring.share_monitor import ShareMonitor
from plait.training.trial import Trial
from plait.training.worker_group import WorkerGroup


@dataclass(frozen=True)
class MemberInit:
    """What a member is made from: the trials, and the workers that train them.

    `name` is that of its keys in the store.
    """

    trials: Sequence[Trial]
    group: WorkerGroup
    name: str


class Member(Protocol):
    """Takes shares of batches, updates alone and averages with others: a worker, or a pipeline of workers.

    It is linked with the other members when it is made. Members are numbered by their places; `workers` are
    the workers that this one averages with, including itself, by place. A worker whose place is none of
    these takes no work. `position` is this worker's number among those of its member.
    """

    place: int
    position: int
    workers: tuple[int, ...]
    averaging: WeightAveraging
    # What measures its updates, where the job asks for signals.
    monitor: ShareMonitor | None

    @property
    def is_first(self) -> bool:
        """Whether this worker is the member's first, which claims work for all of its workers."""

    def from_first(self, find: Callable[[], Any]) -> Any:
        """Call `find` on the member's first worker and return its result, plain values, on all of them."""

    def update(
        self, steps: Sequence[int], share: int, batches: Sequence[loader.Batch], factors: Sequence[float]
    ) -> Tensor:
        """Update each trial on its share of a step's batch and average with others; the shares' losses.

        The learning rates are those of the job times `factors`.
        """

    def weight_sums(self) -> list[float]:
        """The sum of the elements of each weight; empty for a pipeline."""

    def synchronize(self) -> None:
        """Give all members the same state; PeerError if one is lost."""

    def totals_over(self, slots: Sequence[int], share: int, shares: int) -> list[Totals]:
        """This worker's part of the sums of loss and metric of trials over a share of the test split."""

    def state(self, slot: int) -> EngineState | None:
        """The whole state of a trial, on the worker that writes checkpoints; all workers call it."""

    def leave_to(self, staying: Sequence[int]) -> None:
        """Send the ranks in `staying` the layers that only leaving ranks hold."""

    def close(self) -> None:
        """End the links to the other members; the next member has what the sync keeps of each trial."""


# Makes this worker's member of those there are now.
MakeMember = Callable[[MemberInit], Member]


class MemberState(Protocol):
    """What this worker's members train, from one to the next; see `Engine` for its methods.

    `sync` is what the sync keeps of each trial besides the state of workers, by the names of the weights.
    """

    sync: Sequence[Tensors]

    @property
    def components(self) -> AnyComponents: ...

    def load(self, state: Checkpoint) -> None: ...

    def find_source(self, marks: Sequence[ProgressMark]) -> tuple[int, EngineState] | None: ...

    def check_entering(self, entering: Sequence[TrialInit]) -> None: ...

    def change(self, leaving: Sequence[int], entering: Sequence[TrialInit]) -> None: ...


class WholeModelState:
    """The components of members that each hold the whole model."""

    def __init__(self, components: AnyComponents, sync: Sequence[Tensors] = ({},)) -> None:
        self.components = components
        self.sync = sync

    def load(self, state: Checkpoint) -> None:
        self.components.load(state)
        self.sync = [dict(state.sync)]

    def find_source(self, marks: Sequence[ProgressMark]) -> tuple[int, EngineState] | None:
        return most_advanced(marks), replace(self.components.state(), sync=self.sync[0])

    def check_entering(self, entering: Sequence[TrialInit]) -> None:
        self.components.check_entering(entering)

    def change(self, leaving: Sequence[int], entering: Sequence[TrialInit]) -> None:
        self.components = self.components.change(leaving, entering)
        self.sync = with_replacements(self.sync, leaving, [dict(entry.sync) for entry in entering])


class ShareAudit(StepAudit, Protocol):
    """Repeats some of a worker's updates on its shares, without other workers, and compares."""

    def averaging_before_update(self) -> contextlib.AbstractContextManager[None]:
        """A context in which the gradients of the step being audited are averaged over a group."""


class WholeModelMember:
    """A member that is one worker with the whole model of a trial, or of fused trials.

    `audit` repeats some of its updates and `monitor` measures them, if given.
    """

    is_first, position = True, 0

    def __init__(
        self,
        worker: Worker,
        init: MemberInit,
        state: MemberState,
        audit: ShareAudit | None = None,
        monitor: ShareMonitor | None = None,
    ) -> None:
        self._trials = init.trials
        self._settings = init.trials[0].settings
        self._state, self._components = state, state.components
        self._audit = audit
        self.monitor = monitor
        group, sync = init.group, self._settings.sync
        self.place = group.place
        self.workers = tuple(worker.memberships.current.members[rank] for rank in group.ranks)
        self._options = options_among(sync.kind, sync.options, group.size)
        self._samples: Sequence[int] = ()
        norms = TrialNorms(monitor.moments) if monitor is not None and monitor.moments else None
        self._step = TrainStep(self._components, self._settings, rank=group.place, norms=norms)
        self.averaging = self._open_averaging(worker, group, f"{PREFIX}/{init.name}")
        if averages_gradients(self._options):
            self._step.before_update = self._average_gradients
        if monitor is not None:
            microbatches, averages = self._settings.accumulate, averages_gradients(self._options)
            monitor.warn_without_parts(microbatches, "accumulate: 2", averages)
        load_sync(self._sync_states(), state.sync)

    def _open_averaging(self, worker: Worker, group: WorkerGroup, prefix: str) -> WeightAveraging:
        components = self._components
        weights, buffers = list(components.model.parameters()), list(components.model.buffers())
        return make_averaging(
            workers_of(worker, group.ranks, group.place, prefix, group.sums),
            sources_from(weights, buffers, components.optimizer, self._options),
            self._options,
            self._settings.seed,
            step=self._trials[0].step,
            when_synchronized=components.rest_of_state(worker.store, prefix, weights, buffers),
        )

    def from_first(self, find: Callable[[], Any]) -> Any:
        return find()

    def _average_gradients(self) -> None:
        with contextlib.ExitStack() as around:
            if self._audit is not None:
                around.enter_context(self._audit.averaging_before_update())
            if self.monitor is not None:
                measured = self.monitor.averaging_gradients(self._squares, self._samples, self.averaging)
                around.enter_context(measured)
            self.averaging.after_update()

    def _squares(self) -> Tensor:
        """The squared norm of each trial's present gradient."""
        return trial_squared_norms(self._components.trial_gradients, self._components.trials)

    def update(
        self, steps: Sequence[int], share: int, batches: Sequence[loader.Batch], factors: Sequence[float]
    ) -> Tensor:
        # Random numbers depend on the seed, the step and the share alone, whichever worker takes it.
        self._components.seed_share(self._settings.seed, steps, share)
        losses = torch.zeros(len(batches), dtype=torch.float64)
        self._samples = [batch.count for batch in batches]
        if any(batch.count for batch in batches):
            if self._audit is not None:
                done = steps[0] - self._trials[0].step
                self._audit.begin(self._step, done, share, batches, factors)
            losses, _ = self._step.step(batches, factors)
            if self._audit is not None:
                self._audit.end(self._step, losses)
        if not averages_gradients(self._options):
            self.averaging.after_update()
        return losses

    def weight_sums(self) -> list[float]:
        return [float(weight.detach().double().sum()) for weight in self._components.model.parameters()]

    def synchronize(self) -> None:
        self.averaging.synchronize()

    def totals_over(self, slots: Sequence[int], share: int, shares: int) -> list[Totals]:
        settings = [trial.settings for trial in self._trials]
        return self._components.totals(slots, settings, (share, shares))

    def state(self, slot: int) -> EngineState | None:
        if self.place != 0:
            return None
        return replace(self._components.state(slot), sync=self._sync_states()[slot])

    def leave_to(self, staying: Sequence[int]) -> None:
        """Nothing: each worker holds the whole model."""

    def close(self) -> None:
        self._state.sync = self._sync_states()
        self.averaging.close()

    def _sync_states(self) -> list[Tensors]:
        names = self._components.names
        weights = [names[weight] for weight in self._components.model.parameters()]
        return sync_states(self._components, weights, self.averaging)


def sync_states(
    components: AnyComponents, weights: Sequence[str], averaging: WeightAveraging
) -> list[Tensors]:
    """What an averaging of these weights keeps of each trial besides the state of workers, by their names."""
    kept = averaging.state()
    return [
        {
            f"{name}/{key}": components.of_slot(name, tensor, slot)
            for key, tensors in kept.items()
            for name, tensor in zip(weights, tensors)
        }
        for slot in range(components.trials)
    ]


def load_sync(states: Sequence[Tensors], kept: Sequence[Tensors]) -> None:
    """Load into the states of a new averaging what one before kept of each trial."""
    for state, before in zip(states, kept):
        for path, tensor in state.items():
            if path in before:
                tensor.copy_(before[path])
