"""Traces the job's model with samples of its data, and checks that its targets can be sent between stages."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from plait.core.errors import DataError
from plait.data.call_model import Arguments, explaining_type_errors
from plait.profiler.trace import trace
from plait.profiler.traced_model import TracedModel
from plait.workloads.losses import describe


def trace_inputs(model: torch.nn.Module, inputs: Arguments, evaluation: bool = True) -> TracedModel:
    """Trace the model; an error due to inputs of another dtype than the weights says so."""
    with explaining_type_errors(model, inputs):
        return trace(model, inputs, evaluation=evaluation)


def check_target(target: Any) -> None:
    """Raise JobError for targets that cannot be sent between workers; registers named tuples with pytree."""
    _register_named_tuples(target)
    leaves, spec = pytree.tree_flatten(target)
    strange = [leaf for leaf in leaves if not isinstance(leaf, (Tensor, str, int, float, bool, type(None)))]
    if strange:
        raise DataError(
            f"data.kind: the target holds {describe(strange[0])}, which the workers of a pipeline cannot "
            f"send each other; expected tensors, numbers and text, in tuples, lists and dicts"
        )
    try:
        pytree.treespec_dumps(spec)
    except NotImplementedError as failure:
        raise DataError(
            f"data.kind: the target is {describe(target)}, which the workers of a pipeline cannot send each "
            f"other ({failure}); use tuples, lists and dicts"
        ) from failure


def _register_named_tuples(target: Any) -> None:
    """Register the target's named tuples, so that torch can serialize their tree structure."""
    if isinstance(target, tuple) and hasattr(target, "_fields"):
        kind = type(target)
        # Not every version of torch has it; registering twice is a ValueError.
        register = getattr(pytree, "_register_namedtuple", None)
        with contextlib.suppress(ValueError):
            if register is not None:
                register(kind, serialized_type_name=f"{kind.__module__}.{kind.__qualname__}")
    if isinstance(target, (tuple, list)):
        for part in target:
            _register_named_tuples(part)
    elif isinstance(target, dict):
        for part in target.values():
            _register_named_tuples(part)
