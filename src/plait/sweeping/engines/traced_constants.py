"""What the traced code of an array in stages holds of its first trial, so that all trials must share it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from plait.fusion.errors import FusionError
from plait.profiler.traced_model import TracedModel

# Where a module keeps what each trial has its own of.
_OWN = frozenset(("_parameters", "_buffers", "_modules"))
_PLAIN = (Tensor, bool, int, float, str, torch.dtype)

# The plain values among a module's attributes, by the module's path and the attribute's name.
Values = Mapping[tuple[str, str], Any]


def plain_values(model: nn.Module) -> Values:
    """The tensors, numbers and words that code of the model may use, but for parameters and buffers."""
    tensors = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    constants = {}
    for path, part in model.named_modules():
        for name, value in vars(part).items():
            leaves = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, _PLAIN)]
            leaves = [leaf for leaf in leaves if id(leaf) not in tensors]
            if name not in _OWN and leaves:
                # One that is a list is another object, lest the model change it.
                constants[path, name] = leaves[0] if leaves[0] is value else tuple(leaves)
    return constants


def check_values(traced: TracedModel, first: Values, other: Values) -> None:
    """Refuse a trial whose code would use other values than the first trial's, which was traced.

    Modules that are called belong to each trial, and so do their values.
    """
    called = {str(node.target) for layer in traced.layers for node in layer.nodes if node.op == "call_module"}
    for path, name in {**first, **other}:
        if any(path == module or path.startswith(f"{module}.") for module in called):
            continue
        known, value = first.get((path, name)), other.get((path, name))
        if not _equal(known, value):
            raise FusionError(
                f"{path or 'the model'}.{name} is {value} in one trial, {known} in another, and belongs to "
                f"none of torch's own modules; in stages trials share the code between those: sweep it "
                f"without a plan, or, if it is a tensor, register it as a buffer"
            )


def _equal(first: Any, other: Any) -> bool:
    if isinstance(first, tuple) and isinstance(other, tuple):
        return len(first) == len(other) and all(map(_equal, first, other))
    if isinstance(first, Tensor) and isinstance(other, Tensor):
        return first.dtype == other.dtype and torch.equal(first, other)
    return not isinstance(first, Tensor) and not isinstance(other, Tensor) and bool(first == other)
