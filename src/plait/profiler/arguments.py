"""Arguments of recorded calls, with placeholders for tensors, sizes, devices and input values."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from sympy import Expr  # type: ignore[import-untyped]
from torch import Tensor, fx

from plait.profiler.trace_errors import current_line, refusal
from plait.profiler.watched_values import is_watched

PLAIN = (
    int,
    float,
    complex,
    bool,
    str,
    bytes,
    type(None),
    type(Ellipsis),
    torch.dtype,
    torch.layout,
    torch.memory_format,
)


@dataclass(frozen=True)
class SizeArgument:
    """Placeholder for a size that depends on the inputs."""

    expression: Expr


@dataclass(frozen=True)
class DeviceArgument:
    """Placeholder for the device that the layer runs on."""


class InputValue(NamedTuple):
    """Placeholder for a number or text among the model's inputs, which each batch provides."""

    node: fx.Node


def packed_value(value: float | str) -> Tensor:
    """A number or text as a tensor, to be sent between stages."""
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def read_value(packed: Tensor) -> Any:
    """The inverse of `packed_value`."""
    return json.loads(packed.cpu().numpy().tobytes())


def can_be_lowered(item: Any) -> bool:
    """Whether `lower` supports `item`: tensors and plain values in tuples, lists and dicts."""
    if type(item) in (tuple, list, torch.Size):
        return all(can_be_lowered(part) for part in item)
    if type(item) is dict:
        return all(can_be_lowered(part) for part in item.values())
    if isinstance(item, slice):
        return all(can_be_lowered(part) for part in (item.start, item.stop, item.step))
    symbols = (torch.SymInt, torch.SymFloat, torch.SymBool, torch.device, np.generic)
    return isinstance(item, (Tensor, *PLAIN, *symbols))


def lower(item: Any, node_of: Callable[[Tensor], fx.Node], meta: dict[str, Any]) -> Any:
    """`item` with nodes for tensors and placeholders for what is known only when the layer runs.

    Records in `meta` the `symbols` of its sizes, and whether it uses a `device`.
    """
    if isinstance(item, Tensor):
        return node_of(item)
    if is_watched(item) and hasattr(item, "node"):
        return InputValue(item.node)
    if isinstance(item, (torch.SymInt, torch.SymFloat)):
        return _lower_size(item, meta)
    if isinstance(item, torch.SymBool):
        return bool(item)
    if isinstance(item, torch.device):
        meta["device"] = True
        return DeviceArgument()
    if isinstance(item, (tuple, list)) and not hasattr(item, "_fields"):
        parts = [lower(part, node_of, meta) for part in item]
        return parts if isinstance(item, list) else tuple(parts)
    if isinstance(item, dict):
        return {key: lower(part, node_of, meta) for key, part in item.items()}
    if isinstance(item, slice):
        return slice(*(lower(part, node_of, meta) for part in (item.start, item.stop, item.step)))
    if isinstance(item, np.generic):
        return item.item()
    if isinstance(item, PLAIN):
        return item
    raise refusal(
        f"this passes a {type(item).__name__} to a torch call",
        "pass tensors, numbers, strings, and tuples, lists or dicts of them",
        current_line(),
    )


def _lower_size(size: torch.SymInt | torch.SymFloat, meta: dict[str, Any]) -> Any:
    expression = size.node.expr
    if expression.is_number:
        return int(expression) if isinstance(size, torch.SymInt) else float(expression)
    meta["symbols"] = meta.get("symbols", frozenset()) | expression.free_symbols
    return SizeArgument(expression)


def leaves(item: Any) -> Iterator[Any]:
    """The leaves of `item`, within tuples, lists and dicts."""
    if isinstance(item, (tuple, list)):
        for part in item:
            yield from leaves(part)
    elif isinstance(item, dict):
        yield from leaves(list(item.values()))
    else:
        yield item
