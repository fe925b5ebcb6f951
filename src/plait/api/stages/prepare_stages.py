"""Traces, measures and verifies the stages of a user's model with example inputs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from plait.api.world import World
from plait.core.errors import InputError
from plait.core.shown import shown
from plait.data.call_model import Arguments, as_arguments
from plait.data.loader import to_device
from plait.pipeline.cutting.whole_modules import Stages
from plait.pipeline.layout import PipelineLayout
from plait.pipeline.stage import Autocast
from plait.pipeline.verify.in_process import Choices
from plait.pipeline.verify.prepare import prepare_layout, prepare_together
from plait.pipeline.verify.verify_stages import Example, VerifiedStages
from plait.planner.schedules.in_flight import Schedule
from plait.profiler.profile import Profile, profile_model
from plait.profiler.trace import trace
from plait.profiler.traced_model import TracedModel
from plait.verification import same_random_numbers

# Samples with which a model is traced and its stages are verified.
_FEW = 4


def samples_of(inputs: Any) -> int:
    """The number of samples of a batch: the first size of its first tensor."""
    for leaf in pytree.tree_leaves(inputs):
        if isinstance(leaf, Tensor) and leaf.dim():
            if not len(leaf):
                raise InputError(f"the inputs have shape {list(leaf.shape)}: a batch without samples")
            return len(leaf)
    raise InputError(f"the inputs are {shown(inputs)}, expected a tensor, or a tuple or dict of tensors")


def two_examples(inputs: Any, other: Any, device: torch.device) -> tuple[Arguments, Arguments]:
    """Two small batches of unlike sizes from the user's example, or one each from two examples."""
    count = samples_of(inputs)
    few = min(_FEW, count)
    first = _rows(inputs, count, few)
    if other is not None:
        many = samples_of(other)
        second = _rows(other, many, min(_FEW + 1, many))
    elif few > 1:
        second = _rows(inputs, count, few - 1)
    else:
        second = _map_rows(inputs, count, lambda leaf: torch.cat([leaf, leaf]))
    return to_device(as_arguments(first), device, None), to_device(as_arguments(second), device, None)


def _rows(inputs: Any, count: int, few: int) -> Any:
    return _map_rows(inputs, count, lambda leaf: leaf[:few])


def _map_rows(inputs: Any, count: int, change: Any) -> Any:
    def changed(leaf: Any) -> Any:
        return change(leaf) if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == count else leaf

    return pytree.tree_map(changed, inputs)


def mixed_loss(output: Any, _target: Any) -> Tensor:
    """A scalar whose gradient differs between all numbers of the output, as a stand-in for the loss."""
    tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
    parts = []
    for leaf in tensors:
        if leaf.is_floating_point():
            waves = torch.arange(leaf.numel(), device=leaf.device, dtype=torch.float64).cos()
            parts.append((leaf.double() * waves.view(leaf.shape)).mean())
    return torch.stack(parts).sum() if parts else torch.zeros((), requires_grad=True)


@dataclass(frozen=True)
class StagePreparation:
    """Prepares the stages of `model` on the workers of `world`, with two example batches."""

    world: World
    model: nn.Module
    examples: tuple[Arguments, Arguments]
    autocast: Autocast

    def trace(self, whole: Collection[str] = (), evaluation: bool = False) -> TracedModel:
        """The layers of the model; modules in `whole` are one layer each."""
        first, second = self.examples
        with same_random_numbers(0), self.autocast():
            return trace(self.model, first, others=[second], whole=whole, evaluation=evaluation)

    def profile(self, inputs: Any) -> Profile:
        """The layers as measured now on this worker, for a batch of `inputs`."""
        with self.autocast():
            return profile_model(self.model, as_arguments(inputs), warmup=1, repeats=3)

    def prepare(self, layout: PipelineLayout, verify: bool) -> VerifiedStages:
        """The stages, compared with the model by rank 0 if `verify`; all workers call it together."""
        choices = Choices(self.autocast, layout.recompute, layout.schedule is Schedule.ZERO_BUBBLE)
        batches: Sequence[tuple[Any, Any]] = [(example, None) for example in self.examples]
        example = Example(batches, mixed_loss, choices) if verify else None
        name = type(self.model).__name__

        def first() -> VerifiedStages:
            return prepare_layout(self._trace_both, layout, example, name)

        def again(stages: Stages | None) -> VerifiedStages:
            wanted = layout if stages is None else replace(layout, stages=stages)
            return prepare_layout(self._trace_both, wanted, None, name)

        try:
            return prepare_together(self.world.rank, self.world.world_size, first, again)
        except InputError as failure:
            message = str(failure).replace("verify: off trains", "verify=False trains")
            raise InputError(f"Pipeline: {message}") from None

    def _trace_both(self, whole: Collection[str] = (), evaluation: bool = True) -> TracedModel:
        return self.trace(whole, evaluation)
