"""Finds buffers that forward writes for single samples, which replicas would not share."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from plait.data.call_model import forward
from plait.verification import same_random_numbers
from plait.verification.python_state import unchanged_state
from plait.workloads.language.carried_state import CarriedState

# The fewest samples of a forward for changing two of them separately.
FEWEST = 3


def own_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers of custom modules, except those that carry rows between batches (`CarriedState`)."""
    buffers: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        if not type(module).__module__.startswith("torch.nn.") and not isinstance(module, CarriedState):
            buffers |= {f"{path}.{n}" if path else n: b for n, b in module._buffers.items() if b is not None}
    return buffers


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
    return max(sizes) if len(sizes) == 1 and max(sizes) >= FEWEST else 0


def _replaced(inputs: Any, row: int, by: int) -> Any:
    """The inputs with one sample in the place of another."""

    def replace(tensor: Tensor) -> Tensor:
        changed_tensor = tensor.clone()
        changed_tensor[row] = tensor[by]
        return changed_tensor

    return pytree.tree_map_only(Tensor, replace, inputs)
