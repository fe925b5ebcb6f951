"""Finds state of a model that workers with the same layers would not share.

Workers see different samples. They average running statistics; but what forward writes for single samples
into a buffer, or keeps in Python, would be each worker's own.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from plait.core.errors import JobError
from plait.data.call_model import forward
from plait.pipeline.named_state import has_extra_state
from plait.schema.settings import TrainSettings
from plait.training.components import Components
from plait.training.run import Run
from plait.verification import same_random_numbers
from plait.verification.python_state import changed_by, unchanged_state
from plait.workloads.language.carried_state import CarriedState

# The fewest samples of a forward for changing two of them separately.
_FEWEST = 3


def own_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers of custom modules, except those that carry rows between batches (`CarriedState`)."""
    buffers: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        if not type(module).__module__.startswith("torch.nn.") and not isinstance(module, CarriedState):
            buffers |= {f"{path}.{n}" if path else n: b for n, b in module._buffers.items() if b is not None}
    return buffers


def check_no_rows(components: Components, settings: TrainSettings) -> None:
    """Refuse a model whose forward writes a buffer for single samples, of which a worker has only some."""
    if names := list(own_buffers(components.model)):
        inputs, _ = components.examples(_FEWEST + 1, settings.seed)
        if words := describe_rows(components.model, inputs, names):
            raise JobError(f"model: {words}")


def check_kept(run: Run) -> None:
    """Refuse a model with state that a worker which joins, or takes a layer over, would not have.

    That is what forwards keep in Python, and of layers that move also what `get_extra_state` gives.
    """
    components, settings = run.components, run.settings
    moves = settings.pipeline is not None and settings.pipeline.graph is not None
    if not run.worker.memberships.can_grow and not moves:
        return
    key = "parallel.elastic" if run.worker.memberships.can_grow else "adapt"
    if settings.pipeline is not None and has_extra_state(components.model):
        raise JobError(
            f"{key}: a module of {settings.model.factory} has get_extra_state, which does not move between "
            f"workers with its layer; leave {key} out, or keep that state in buffers"
        )
    if (
        components.local_tensors is None
        and not components.train_set.is_stream
        and settings.verify.start != "off"
    ):
        inputs, _ = components.examples(2, settings.seed)
        if shown := find_kept(components.model, inputs):
            raise JobError(
                f"{key}: forward of {settings.model.factory} changes {shown}, which a worker that joins, or "
                f"takes a layer over, would not have; keep it in a buffer, or leave {key} out"
            )


def find_kept(model: nn.Module, inputs: Any) -> str:
    """What two forwards in a row change in Python, one after the other, as people know it; else nothing."""
    try:
        with same_random_numbers(0), unchanged_state({"": model}), torch.no_grad():
            copied = copy.deepcopy(model)
            forward(copied, inputs)
            names = changed_by(lambda: forward(copied, inputs), {"": copied})
    except Exception:  # a model that cannot be copied, or takes no such batch
        return ""
    return next((f"{shown} of {path}" if path else shown for path, shown in names), "")


def describe_rows(model: nn.Module, inputs: Any, names: Sequence[str]) -> str:
    """What to say where forward writes a buffer for single samples, which workers do not share; else nothing.

    Found by changing one sample, then another: where they change different numbers of a buffer, it has a
    place for each. Nothing of the model changes.
    """
    count = rows_in(inputs)
    if not count:
        return ""
    try:
        start = _after(model, None, names)
        plain = _after(model, inputs, names)
        first = _after(model, _replaced(inputs, 0, 1), names)
        last = _after(model, _replaced(inputs, count - 1, count - 2), names)
    except Exception:  # a model that cannot be copied, or takes no such batch
        return ""
    for name in names:
        if len({tuple(each[name].shape) for each in (start, plain, first, last)}) > 1:
            continue
        one, other = (plain[name] != first[name], plain[name] != last[name])
        is_part = not bool((plain[name] != start[name]).all()) or plain[name].shape[:1] == (count,)
        if one.any() and other.any() and not (one & other).any() and is_part:
            return (
                f"forward writes buffer {name!r} for single samples (what each row carries over, or a memory "
                f"of samples), and each worker would only have those of its share; use one worker, or "
                f"gather what all workers write in forward"
            )
    return ""


def _after(model: nn.Module, inputs: Any, names: Sequence[str]) -> dict[str, Tensor]:
    """Buffers of a copy of the model after a forward on `inputs`, or before one (None)."""
    with same_random_numbers(0), unchanged_state({"": model}), torch.no_grad():
        copied = copy.deepcopy(model)
        if inputs is not None:
            forward(copied, inputs)
    return {name: own_buffers(copied)[name].detach() for name in names}


def rows_in(inputs: Any) -> int:
    """How many rows all tensors of the inputs have; 0 where they differ, or are too few to tell apart."""
    leaves = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
    sizes = {len(leaf) if leaf.dim() else 0 for leaf in leaves}
    return max(sizes) if len(sizes) == 1 and max(sizes) >= _FEWEST else 0


def _replaced(inputs: Any, row: int, by: int) -> Any:
    """The inputs with one sample in the place of another."""

    def replace(tensor: Tensor) -> Tensor:
        changed_tensor = tensor.clone()
        changed_tensor[row] = tensor[by]
        return changed_tensor

    return pytree.tree_map_only(Tensor, replace, inputs)
