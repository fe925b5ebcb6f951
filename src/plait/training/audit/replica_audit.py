"""The audit of a worker that holds the whole model: its share of a step, and the sum over workers, once more.

Each worker takes its own share of the batch again, and torch sums the gradients, so an audit takes about as
long as a step on any number of workers.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from plait.comm.collectives import all_gather_values
from plait.data.loader import Batch
from plait.data.seeding import mix
from plait.launcher.worker_process import Worker
from plait.pipeline.verify.row_buffers import describe_rows, own_buffers, rows_in
from plait.training.audit.record import AuditRecord, findings
from plait.training.audit.reference import make_twin, take_reference, unscale_and_clip
from plait.training.audit.schedule import is_audited
from plait.training.components import Components
from plait.training.trial import Trial
from plait.verification.attributes import load_attributes
from plait.verification.audit import (
    Replay,
    changed_tensors,
    observe_live,
    sum_over_workers,
)
from plait.verification.compare import Difference
from plait.verification.observe import unchanged_random_numbers
from plait.verification.python_state import unchanged_state
from plait.verification.reference_optimizer import OptimizerTwin
from plait.verification.replay import Part, PlainModel

if TYPE_CHECKING:
    from plait.training.engines.train_step import TrainStep

ADVICE = (
    "what forward, hooks or the optimizer go by besides weights, buffers and the batch belongs into buffers; "
    "one worker trains any model as plain PyTorch does; verify: {on_difference: warn} goes on regardless"
)


class AuditedStep:
    """One step of a trial that is taken a second time: made before the step, and ended after it.

    With `together` all workers do so, whose gradients the step sums; else one worker by itself. Random
    numbers of the step start from `seed`.
    """

    def __init__(
        self, trial: Trial, components: Components, record: AuditRecord, step: int, seed: int, together: bool
    ) -> None:
        started = time.perf_counter()
        self._trial = trial
        self._components = components
        self._record = record
        self._step = step
        self._seed = seed
        self._together = together
        self._live = PlainModel(components.model, components.loss)
        self._before = self._live.state().copied()
        self._scale = components.scaler.get_scale() if components.scaler.is_enabled() else 1.0
        # What the step is taken on, and its gradients, where those of others are averaged into them.
        self.parts: list[Part] = []
        self._noted: dict[str, Tensor | None] | None = None
        self._twin = self._make_twin()
        self._seconds = time.perf_counter() - started
        record.metrics.leave_out(self._seconds)

    def _make_twin(self) -> OptimizerTwin:
        each = self._components
        return make_twin(each.optimizer, each.names, each.base_lrs, self._trial, self._step)

    @contextlib.contextmanager
    def averaging_before_update(self) -> Iterator[None]:
        """Within, gradients and weights become the mean over a group: those of before it are compared."""
        named = self._live.parameters().items()
        self._noted = {n: None if p.grad is None else p.grad.clone() for n, p in named if p.requires_grad}
        self._twin.close()
        yield
        self._twin = self._make_twin()

    def end(self, loss: Tensor) -> None:
        """Take the step again and compare; `loss` is what the step returned."""
        started, record = time.perf_counter(), self._record
        self._twin.close()
        if self._twin.updates == 0:  # left out by the loss scale
            return
        observed = observe_live(self._live, self._before, self._twin, loss.detach().cpu())
        if self._noted is not None:
            observed = replace(observed, gradients=self._noted)
        update = list(self._twin.differences())
        del self._twin
        with unchanged_random_numbers(), unchanged_state(self._live.objects):
            if self._step == 0:
                # What a model made anew has in common with this one is as it was when this one was made.
                load_attributes(self._live.objects, self._before.attributes.values)
            fresh = take_reference(record, self._components, self._trial.settings, self._step)
            plain = replace(fresh, scale=lambda loss: loss * self._scale)
            parts = [replace(part, seed=self._seed if i == 0 else None) for i, part in enumerate(self.parts)]
            replay = Replay(plain, self._before, parts, self._finish, is_first=self._step == 0)
            checksums: set[str] = set()

            def any_differs(differs: bool) -> bool:
                workers = self._gather((differs, self._checksum()))
                checksums.update(checksum for _, checksum in workers)
                return any(each for each, _ in workers)

            largest, differences = replay.compare(observed, record.rounding, record.harmless, any_differs)
            differences += [*update, *self._rows(plain)]
        if len(checksums) > 1:
            differences += unlike_replicas(self._live.parameters())
        after = time.perf_counter() - started
        record.metrics.leave_out(after)
        self._seconds += after
        local = findings(largest, differences, self._before.attributes.unseen)
        record.add(self._step + 1, self._seconds, self._gather(local), ADVICE)

    def _checksum(self) -> str:
        sums = [_sum(parameter).hex() for parameter in self._live.parameters().values()]
        return hashlib.sha256(repr(sums).encode()).hexdigest()

    def _rows(self, plain: PlainModel) -> list[Difference]:
        """The buffers that forward writes for single samples, and that workers would therefore not share."""
        before, known = self._before.tensors, self._record.shared_buffers
        own = {n: b for n, b in own_buffers(self._live.model).items() if n in before and n not in known}
        inputs = self.parts[-1].inputs if self.parts else None
        workers = self._gather([sorted(changed_tensors(before, own)), rows_in(inputs)])
        names = sorted({name for written, _ in workers for name in written})
        # All workers look or none, since a forward may itself gather from all of them.
        if not names or not all(can_look for _, can_look in workers):
            return []
        known.update(names)
        plain.load(self._before)
        description = describe_rows(plain.model, inputs, names)
        return [Difference("model", description)] if description else []

    def _finish(self, loss: Tensor, parameters: Sequence[Parameter]) -> Tensor:
        """Sum over the workers, take the loss scale out and clip, as was done to the gradients compared."""
        if self._together:
            loss = sum_over_workers(loss, parameters)
        if self._noted is None:
            unscale_and_clip(parameters, self._scale, self._trial.settings.clip_norm)
        return loss

    def _gather(self, value: Any) -> list[Any]:
        return all_gather_values(value) if self._together else [value]


@dataclass
class ReplicaAudit:
    """Audits steps of a trial's replicas, all workers' `together`, or those of one worker by itself."""

    worker: Worker
    trials: Sequence[Trial]
    components: Components
    record: AuditRecord
    together: bool = True
    _audited: AuditedStep | None = field(default=None, init=False)

    def begin(
        self, step: TrainStep, done: int, share: int, batches: Sequence[Batch], factors: Sequence[float]
    ) -> None:
        self._audited, trial = None, self.trials[0]
        together = self.together and self.worker.world_size > 1
        is_plain = self.together and not together and not trial.settings.compile
        if not is_plain and is_audited(trial.settings, number := trial.step + done):
            seed = mix(trial.settings.seed, number, share)
            self._audited = AuditedStep(trial, self.components, self.record, number, seed, together)
            step.recorded = self._audited.parts

    def averaging_before_update(self) -> contextlib.AbstractContextManager[None]:
        """Within, what a step has computed and not updated yet becomes the mean over a group."""
        audited = self._audited
        return contextlib.nullcontext() if audited is None else audited.averaging_before_update()

    def end(self, step: TrainStep, losses: Tensor) -> bool:
        step.recorded = None
        audited, self._audited = self._audited, None
        if audited is not None:
            step.pause_monitor()
            audited.end(losses[0])
        return self.record.difference is not None


def unlike_replicas(tensors: Mapping[str, Tensor], rounded: Container[str] = ()) -> list[Difference]:
    """The tensors that workers hold under one name with unlike values, told by their sum; all call it.

    Those that are `rounded` are updated with others beside them, which may round them otherwise.
    """
    sums = {name: _sum(tensor) for name, tensor in tensors.items()}
    allowed = {name: _rounding(tensor) if name in rounded else 0.0 for name, tensor in tensors.items()}
    workers, rank, found = all_gather_values(sums), dist.get_rank(), []
    for name in sums:
        others = [
            i
            for i, held in enumerate(workers)
            if name in held and not _alike(held[name], sums[name], allowed[name])
        ]
        if others and rank < others[0]:
            why = f"not the same on workers {rank} and {others[0]}, which train together"
            found.append(Difference(f"the parameter {name}", why))
    return found


def _sum(tensor: Tensor) -> float:
    """The sum of all values, in their order, whatever their places in memory."""
    return float(tensor.detach().contiguous().double().sum())


def _rounding(tensor: Tensor) -> float:
    """How far rounding at each of many steps may take a sum."""
    return 64 * torch.finfo(tensor.dtype).eps * float(tensor.detach().double().abs().sum())


def _alike(one: float, other: float, allowed: float) -> bool:
    return one == other or (one != one and other != other) or abs(one - other) <= allowed
