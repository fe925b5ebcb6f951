"""The audit of a pipeline: the first worker repeats a step with the whole model.

It receives the weights before the step, and the gradients and buffers after it. Each worker repeats the
updates of its stages.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from plait.comm.collectives import all_gather_values, broadcast_value, gather_named
from plait.launcher.worker_process import Worker
from plait.pipeline.executor import PipelineExecutor
from plait.pipeline.named_state import load_optimizer_state, optimizer_state, tensors_of
from plait.pipeline.transfers import pack_tree, unpack_tree
from plait.training.audit.record import AuditRecord, findings
from plait.training.audit.reference import make_twin, take_reference, unscale_and_clip
from plait.training.audit.replica_audit import unlike_replicas
from plait.training.audit.stage_models import DelayedModel, ReplicatedModel
from plait.training.components import Components
from plait.training.optimizers.build import build_optimizer
from plait.training.optimizers.lr_schedule import set_lr
from plait.training.setup.memory import has_room_for_whole
from plait.training.trial import Trial
from plait.verification.attributes import Attributes, load_attributes, read_attributes
from plait.verification.audit import ObservedStep, Replay
from plait.verification.compare import Difference, Noise, find_differences
from plait.verification.observe import unchanged_random_numbers
from plait.verification.python_state import unchanged_state
from plait.verification.reference_optimizer import is_torchs
from plait.verification.replay import LOSS, Named, Part, State, keeping_attributes

FIRST = 0
_ADVICE = (
    "state that forward, a hook or the optimizer uses must be in weights, buffers or the batch; "
    "cut elsewhere, or train without a plan (data parallel), which keeps the model in one "
    "piece; verify: {on_difference: warn} goes on regardless"
)
# Microbatches by their numbers, each with its samples.
Contents = dict[int, tuple[Part, int]]


class AuditedStages:
    """One audited step of a trial in stages: all workers create it before the step and end it afterwards.

    `stages` are the stages that use each parameter and buffer of the model.
    """

    def __init__(
        self,
        worker: Worker,
        trial: Trial,
        components: Components,
        pipeline: PipelineExecutor,
        stages: Mapping[str, tuple[int, ...]],
        record: AuditRecord,
    ) -> None:
        started = time.perf_counter()
        self._worker = worker
        self._rank = worker.rank
        self._trial = trial
        self._components = components
        self._pipeline = pipeline
        self._layout = pipeline.pipeline_layout
        self._record = record
        self._stages = stages
        self._names: dict[Tensor, str] = {p: name for name, p in pipeline.parameters.items()}
        self._contents: Contents = {}
        self._frozen = {n: _checksum(p) for n, p in pipeline.parameters.items() if not p.requires_grad}
        self._blind = self._why_blind()
        # Separate updates of stages do not show what an optimizer of the whole model does.
        self._needs_optimizer = not self._layout.schedule.synchronous or not is_torchs(pipeline.optimizer)
        if not self._blind:
            self._gather_before()
            pipeline.on_content, pipeline.carries_random_state = self._note_content, True
        self._twin = make_twin(pipeline.optimizer, self._names, pipeline.base_lrs, trial, trial.step)
        self._ready = time.perf_counter()
        self._seconds = self._ready - started
        record.metrics.leave_out(self._seconds)

    def _why_blind(self) -> str:
        """Why no worker can take the step of the whole model, the same on all workers; "" where one can."""
        components = self._components
        if not broadcast_value(has_room_for_whole(components.model, components.device), FIRST):
            return "no worker has memory for the whole model"
        tied = any(len(self._stages.get(name, ())) > 1 for name, _ in components.model.named_parameters())
        if tied and not self._layout.schedule.synchronous:
            return f"under schedule {self._layout.schedule.value} stages share parameters"
        return ""

    def _note_content(self, part: Part, samples: int) -> None:
        layout = self._layout
        number = part.number * layout.pipelines + layout.pipeline_of(self._rank)
        self._contents[number] = replace(part, number=number), samples

    # Before the step.

    def _gather_before(self) -> None:
        """Bring what all stages hold to the first worker."""
        pipeline, components = self._pipeline, self._components
        weights = {n: p for n, p in pipeline.parameters.items() if self._is_first(n)}
        state = optimizer_state(pipeline.optimizer, self._names) if self._needs_optimizer else {}
        state = {path: t for path, t in state.items() if self._is_first(path.rpartition("/")[0])}
        gathered = gather_named(_prefixed("weights", weights) | _prefixed("optimizer", state), FIRST)
        # What is this worker's own is not copied on the way.
        self._optimizer_before = {n: t.clone() for n, t in _below("optimizer", gathered).items()}
        self._buffers = self._gather_buffers()
        attributes = self._gather_attributes()
        if self._rank == FIRST:
            known = {name: tensor.detach() for name, tensor in tensors_of(components.model).items()}
            known |= _below("weights", gathered)
            known |= {name: next(iter(copies.values())) for name, copies in self._buffers.items()}
            # Those of other workers arrive on the CPU.
            known = {name: tensor.to(components.device) for name, tensor in known.items()}
            self._before = State(known, attributes).copied()

    def _is_first(self, name: str) -> bool:
        """Whether this worker is the first of those that hold a tensor."""
        return self._layout.holders(*self._stages[name])[0] == self._rank

    def _gather_buffers(self) -> dict[str, dict[int, Tensor]]:
        """Copies of the buffers of all stages on the first worker, by name and worker."""
        known = {name for name, _ in self._components.model.named_buffers()}
        local = {
            f"{self._rank}/{name}": buffer
            for module in self._pipeline.modules.values()
            for name, buffer in module.named_buffers()
            if name in known and name in self._stages
        }
        copies: dict[str, dict[int, Tensor]] = {}
        for path, buffer in gather_named(local, FIRST).items():
            rank, _, name = path.partition("/")
            copies.setdefault(name, {})[int(rank)] = buffer.clone()
        return copies

    def _gather_attributes(self) -> Attributes:
        """What modules keep in Python, each where it runs; of those in no stage what the first worker has."""
        local = read_attributes(self._held_objects())
        workers = all_gather_values([dict(local.values), local.unseen, sorted(self._held_objects())])
        held = {path for _, _, paths in workers for path in paths}
        rest = read_attributes({p: m for p, m in self._modules().items() if p not in held})
        values = dict(rest.values)
        for theirs, _, _ in reversed(workers):
            values |= theirs
        return Attributes(values, (*rest.unseen, *(name for _, unseen, _ in workers for name in unseen)))

    def _held_objects(self) -> dict[str, Any]:
        """The modules of the model that this worker's stages call, and the loss of the last stage."""
        modules = self._modules()
        objects = {
            path: module
            for stage in self._pipeline.modules.values()
            for path, module in stage.named_modules()
            if modules.get(path) is module
        }
        loss = self._components.loss
        if self._layout.last in self._pipeline.modules and hasattr(loss, "__dict__"):
            objects[LOSS] = loss
        return objects

    def _modules(self) -> dict[str, Any]:
        return dict(keeping_attributes(self._components.model))

    # After the step.

    def end(self, losses: Tensor) -> None:
        """Take the step again and compare; `losses` has the step's. All workers call it together."""
        started, record, loss = time.perf_counter(), self._record, float(losses[0])
        self._pipeline.on_content, self._pipeline.carries_random_state = None, False
        self._twin.close()
        largest, differences = 0.0, list[Difference]()
        if self._blind:
            record.say(f"audit: {self._blind}, so that only updates are audited")
        elif self._is_too_slow(started):
            record.say(
                "audit: one worker alone may take longer for a step than parallel.timeout_s allows, so that "
                "only updates are audited; make it longer"
            )
        elif all_gather_values(self._twin.updates) != [0] * self._worker.world_size:
            observed, contents, after = self._observe(loss), self._gather_contents(), self._gather_after()
            if self._rank == FIRST:
                largest, differences = self._replay(observed, contents, after)
        holders = {name: self._layout.holders(*self._stages[name]) for name in self._pipeline.parameters}
        replicated = {n: p.detach() for n, p in self._pipeline.parameters.items() if len(holders[n]) > 1}
        tied = {name for name in self._pipeline.parameters if len(self._stages[name]) > 1}
        differences += [*self._twin.differences(), *unlike_replicas(replicated, tied)]
        unseen = self._before.attributes.unseen if not self._blind and self._rank == FIRST else ()
        # The state of one that is inside of another is in no name of the whole model's.
        attributes = vars(self._pipeline.optimizer).items() if self._needs_optimizer else ()
        unseen += tuple(
            f"optimizer.{name}" for name, each in attributes if isinstance(each, torch.optim.Optimizer)
        )
        seconds = time.perf_counter() - started
        record.metrics.leave_out(seconds)
        self._seconds += seconds
        workers = all_gather_values(findings(largest, differences, unseen))
        record.add(self._trial.step + 1, self._seconds, workers, _ADVICE)

    def _is_too_slow(self, ended: float) -> bool:
        """Whether the others might give the first worker up while it takes the step alone."""
        predicted_s = (ended - self._ready) * self._worker.world_size
        return bool(broadcast_value(predicted_s > self._worker.timeout_s / 2, FIRST))

    def _observe(self, loss: float) -> ObservedStep:
        """On the first worker what the stages did in the step."""
        pipeline, twin = self._pipeline, self._twin
        gradients = {n: g for n, g in twin.gradients.items() if g is not None and self._is_first(n)}
        written = {n: t for n, t in twin.written.items() if self._is_first(n)}
        frozen = {n: pipeline.parameters[n] for n in self._frozen if self._is_first(n)}
        written |= {n: p for n, p in frozen.items() if _checksum(p) != self._frozen[n]}
        gathered = gather_named(_prefixed("gradients", gradients) | _prefixed("written", written), FIRST)
        buffers, attributes = self._gather_buffers(), self._gather_attributes()
        trained = [n for n, p in self._components.model.named_parameters() if p.requires_grad]
        gradients = _below("gradients", gathered)
        unused = {n: b.detach() for n, b in self._components.model.named_buffers() if n not in buffers}
        return ObservedStep(
            torch.tensor(loss, dtype=torch.float64),
            {name: gradients.get(name) for name in trained},
            {**unused, **_by_worker(buffers)},
            _below("written", gathered),
            attributes.values,
        )

    def _gather_after(self) -> Named:
        """On the first worker the weights after the step, where it takes the update of all of them."""
        if not self._needs_optimizer or not self._layout.schedule.synchronous:
            return {}
        local = {n: p for n, p in self._pipeline.parameters.items() if p.requires_grad and self._is_first(n)}
        return {name: tensor.clone() for name, tensor in gather_named(local, FIRST).items()}

    def _gather_contents(self) -> Contents:
        """On the first worker the microbatches of all pipelines."""
        if self._layout.holders(0) == (FIRST,):
            return self._contents
        tensors, specs = Named(), dict[str, Any]()
        for number, (part, samples) in self._contents.items():
            leaves, spec = pack_tree((part.inputs, part.target))
            tensors |= {f"{number}/{i}": leaf for i, leaf in enumerate(leaves) if leaf is not None}
            specs[str(number)] = [spec, len(leaves), part.weight, part.seed, samples]
        gathered, merged = gather_named(tensors, FIRST), Contents()
        everywhere = dict(ChainMap(*all_gather_values(specs)))
        for key, (spec, count, weight, seed, samples) in everywhere.items():
            if self._rank == FIRST:
                device, number = self._components.device, int(key)
                leaves = [gathered.get(f"{number}/{i}") for i in range(count)]
                inputs, target = unpack_tree([x if x is None else x.to(device) for x in leaves], spec)
                merged[number] = Part(inputs, target, weight, seed, number), samples
        return merged

    def _replay(
        self, observed: ObservedStep, contents: Contents, after: Named
    ) -> tuple[float, list[Difference]]:
        """The largest difference, and those beyond rounding, which the first worker finds."""
        layout, step, settings, record = self._layout, self._trial.step, self._trial.settings, self._record
        kept = {**self._modules(), LOSS: self._components.loss}
        parts = [part for _, (part, _) in sorted(contents.items())]
        with unchanged_random_numbers(), unchanged_state(kept), _all_cores(self._components.device):
            if step == 0:
                load_attributes(kept, self._before.attributes.values)
            fresh = take_reference(record, self._components, settings, step)
            replicated = {name: copies for name, copies in self._buffers.items() if len(copies) > 1}
            scale = self._pipeline.loss_scale
            made = (fresh.model, fresh.loss, fresh.autocast, lambda loss: loss * scale)
            placed: dict[str, Any] = {"layout": layout, "stages": self._stages, "copies": replicated}
            if layout.schedule.synchronous:
                plain = ReplicatedModel(*made, **placed)
            else:
                samples = [count for _, (_, count) in sorted(contents.items())]
                placed |= {"samples": samples, "clip_norm": settings.clip_norm}
                plain = DelayedModel(*made, **placed, make_optimizer=self._make_optimizer)
            replay = Replay(plain, self._before, parts, self._finish, is_first=step == 0)
            largest, differences = replay.compare(observed, record.rounding, record.harmless)
            differences += self._update_differences(plain, observed, after)
        return largest, differences

    def _finish(self, loss: Tensor, parameters: Sequence[torch.nn.Parameter]) -> Tensor:
        """Take the loss scale out and clip, unless each update has."""
        clip_norm = self._trial.settings.clip_norm if self._layout.schedule.synchronous else None
        unscale_and_clip(parameters, self._pipeline.loss_scale, clip_norm)
        return loss

    def _make_optimizer(self, parameters: Mapping[str, torch.nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer of the whole model, as it was before the step."""
        trial = self._trial
        names: dict[Tensor, str] = {p: name for name, p in parameters.items()}
        trained = [p for p in parameters.values() if p.requires_grad]
        optimizer = build_optimizer(trial.settings.optimizer, trained, names, plain=True)
        state = {name: tensor.clone() for name, tensor in self._optimizer_before.items()}
        load_optimizer_state(optimizer, names, state)
        set_lr(optimizer, self._components.base_lrs, trial.lr_factor(trial.step))
        return optimizer

    def _update_differences(
        self, plain: ReplicatedModel, observed: ObservedStep, after: Named
    ) -> list[Difference]:
        """Where an optimizer of the whole model writes something else than those of the stages."""
        if not after:
            return []
        plain.load(self._before)
        parameters = plain.parameters()
        for name, grad in observed.gradients.items():
            parameters[name].grad = None if grad is None else grad.to(parameters[name].device)
        self._make_optimizer(parameters).step()
        expected = {f"the parameter {name}": parameters[name].detach() for name in after}
        return list(find_differences(expected, _prefixed("the parameter", after, " "), Noise({})))


def _prefixed(prefix: str, tensors: Mapping[str, Tensor], between: str = "/") -> dict[str, Tensor]:
    return {f"{prefix}{between}{name}": tensor.detach() for name, tensor in tensors.items()}


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> Named:
    return {n.removeprefix(f"{prefix}/"): t for n, t in tensors.items() if n.startswith(f"{prefix}/")}


def _by_worker(buffers: Mapping[str, Mapping[int, Tensor]]) -> Named:
    """The names under which buffers are compared: those of replicas by worker."""
    return {
        name if len(copies) == 1 else f"{name} of worker {worker}": buffer
        for name, copies in buffers.items()
        for worker, buffer in copies.items()
    }


def _checksum(tensor: Tensor) -> tuple[float, float]:
    wide = tensor.detach().double()
    return float(wide.sum()), float(wide.abs().sum())


@contextlib.contextmanager
def _all_cores(device: torch.device) -> Iterator[None]:
    """Compute on all cores of the host within: the workers that share it wait."""
    threads = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(len(os.sched_getaffinity(0)))
    try:
        yield
    finally:
        torch.set_num_threads(threads)
