"""A model that one process trains, in the microbatches of a pipeline: plain gradient accumulation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from plait.data import loader
from plait.data.call_model import compile_in_place, evaluated_weights, evaluation_mode, forward
from plait.pipeline.named_state import Tensors, load_optimizer_state, optimizer_state
from plait.pipeline.pipeline_parts import PipelineParts


class WholeModel:
    """The same steps as those of `PipelineStages`, without stages and so without delays.

    With `updates_each` there is an update after each microbatch, as under stash.
    """

    reads_inputs = True

    def __init__(self, model: nn.Module, parts: PipelineParts, updates_each: bool) -> None:
        self._model, self._device, self._parts = model, parts.device, parts
        self._updates_each = updates_each
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = parts.optimizer(self._parameters)
        if parts.compile:
            compile_in_place(model, parts.device, "compile")

    def step(self, batch: tuple[Any, Any], samples: int, microbatches: int) -> Tensor:
        """Train on a batch; returns its mean loss."""
        total = torch.zeros((), dtype=torch.float64)
        for content, count in loader.cut(batch, samples, microbatches):
            inputs, target = loader.to_device(content, self._device, None)
            with self._parts.autocast():
                loss = self._parts.loss(forward(self._model, inputs), target)
            share = count / samples
            (loss if self._updates_each else loss * share).backward()
            total += loss.detach().double().cpu() * share
            if self._updates_each:
                self._update()
        if not self._updates_each:
            self._update()
        return total

    def _update(self) -> None:
        if self._parts.clip_norm is not None:
            nn.utils.clip_grad_norm_(self._parameters, self._parts.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def evaluate(self, inputs: Any, samples: int, microbatches: int) -> tuple[list[list[Any]], Any]:
        """For each microbatch the leaves of the outputs, and their form."""
        parts, spec = [], None
        with (
            torch.no_grad(),
            evaluated_weights(self.optimizer),
            evaluation_mode(self._model),
            self._parts.autocast(),
        ):
            for (part, _), _count in loader.cut((inputs, None), samples, microbatches):
                output = forward(self._model, loader.to_device(part, self._device, None))
                leaves, spec = pytree.tree_flatten(output)
                parts.append(leaves)
        return parts, spec

    def drain(self) -> None:
        """Nothing is in flight."""

    def state_dict(self) -> dict[str, Any]:
        return dict(self._model.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._model.load_state_dict(state)

    def optimizer_state(self) -> Tensors:
        return {name: value.cpu() for name, value in optimizer_state(self.optimizer, self._names).items()}

    def load_optimizer_state(self, state: Tensors) -> None:
        load_optimizer_state(self.optimizer, self._names, state)

    @property
    def _names(self) -> dict[Tensor, str]:
        return {parameter: name for name, parameter in self._model.named_parameters()}

    def close(self) -> None:
        """Nothing is open."""
