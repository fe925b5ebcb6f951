"""Plain models that do what a pipeline promises: buffers by replica, weights as old as its schedule says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from plait.pipeline.gradient_sync import clip_stage
from plait.pipeline.layout import PipelineLayout, microbatches_per_update, version_of
from plait.verification.replay import Part, PlainModel, State


@dataclass(kw_only=True)
class ReplicatedModel(PlainModel):
    """A model whose stages have replicas; each has separate buffers, which see only its microbatches.

    `stages` are the stages that use each parameter and buffer, and `copies` each worker's buffers by name.
    """

    layout: PipelineLayout
    stages: Mapping[str, tuple[int, ...]]
    copies: Mapping[str, Mapping[int, Tensor]]

    def load(self, state: State) -> None:
        super().load(state)
        self._now = {
            name: {worker: buffer.clone() for worker, buffer in by_worker.items()}
            for name, by_worker in self.copies.items()
        }

    def backward(self, part: Part) -> Tensor:
        buffers = self.buffers()
        used = {name: by_worker[self._worker(name, part)] for name, by_worker in self._now.items()}
        for name, buffer in used.items():
            buffers[name].copy_(buffer)
        loss = super().backward(part)
        for name, buffer in used.items():
            buffer.copy_(self.buffers()[name])
        return loss

    def _worker(self, name: str, part: Part) -> int:
        """The worker that runs a part in the stage of a buffer."""
        index, pipeline = divmod(part.number, self.layout.pipelines)
        return self.layout.layouts[pipeline].worker(self.stages[name][0], index)

    def buffers_left(self) -> dict[str, Tensor]:
        replicated = {
            f"{name} of worker {worker}": buffer
            for name, by_worker in self._now.items()
            for worker, buffer in by_worker.items()
        }
        return {name: b for name, b in self.buffers().items() if name not in self._now} | replicated


@dataclass(kw_only=True)
class DelayedModel(ReplicatedModel):
    """A model that is updated as an asynchronous schedule promises, without a pipeline.

    Microbatch by microbatch, each stage computes with the version of its weights that the schedule gives
    it, and writes the next one once a round of gradients is complete. `make_optimizer` makes the optimizer of
    all parameters, with its state before the step; `samples` are those of each microbatch.
    """

    make_optimizer: Callable[[Mapping[str, torch.nn.Parameter]], torch.optim.Optimizer]
    samples: Sequence[int]
    clip_norm: float | None

    def step(self, parts: Sequence[Part]) -> Tensor:
        """The loss; the sum of the gradients of all updates is left on the parameters."""
        layout, parameters = self.layout, self.parameters()
        self._optimizer = self.make_optimizer(parameters)
        # What is not trained has one version, into which forward may write.
        trained = [name for name, parameter in parameters.items() if parameter.requires_grad]
        held = [[n for n in trained if self.stages.get(n, ()) == (s,)] for s in range(len(layout.stages))]
        versions = [[_values(parameters, names)] for names in held]
        rounds: list[list[tuple[int, dict[str, Tensor | None]]]] = [[] for _ in held]
        sums: dict[str, Tensor | None] = dict.fromkeys(parameters)
        total = torch.zeros((), dtype=torch.float64)
        for part in parts:
            index = part.number // layout.pipelines
            for stage, known in enumerate(versions):
                _put(parameters, known[version_of(layout, stage, index)])
            self.zero_grad()
            loss = self.backward(replace(part, weight=1.0))
            grads = {name: parameter.grad for name, parameter in parameters.items()}
            total += loss * self.samples[part.number] / sum(self.samples)
            for stage, names in enumerate(held):
                rounds[stage].append((self.samples[part.number], grads))
                size = microbatches_per_update(layout, stage) * layout.pipelines
                if len(rounds[stage]) == size or part is parts[-1]:
                    versions[stage].append(self._update(names, versions[stage][-1], rounds[stage], sums))
                    rounds[stage] = []
        for first, *_ in versions:
            _put(parameters, first)
        for name, parameter in parameters.items():
            parameter.grad = sums[name]
        return total

    def _update(
        self,
        names: Sequence[str],
        newest: Mapping[str, Tensor],
        gradients: Sequence[tuple[int, Mapping[str, Tensor | None]]],
        sums: dict[str, Tensor | None],
    ) -> dict[str, Tensor]:
        """The next version of a stage's weights, by the mean gradient of a round, weighted by samples."""
        parameters = self.parameters()
        self.zero_grad()
        _put(parameters, newest)
        whole = sum(count for count, _ in gradients)
        for name in names:
            weighted = [(count, grads[name]) for count, grads in gradients]
            means = [grad * (count / whole) for count, grad in weighted if grad is not None]
            if means:
                parameters[name].grad = torch.stack(means).sum(0)
        if self.clip_norm is not None:
            clip_stage([parameters[name] for name in names], self.clip_norm)
        for name in names:
            grad, before = parameters[name].grad, sums[name]
            if grad is not None:
                sums[name] = grad.clone() if before is None else before + grad
        self._optimizer.step()
        return _values(parameters, names)


def _values(parameters: Mapping[str, Tensor], names: Sequence[str]) -> dict[str, Tensor]:
    return {name: parameters[name].detach().clone() for name in names}


def _put(parameters: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, value in values.items():
            parameters[name].copy_(value)
