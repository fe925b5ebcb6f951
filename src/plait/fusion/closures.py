"""Deep copies of modules whose functions close over them: a wrapped forward, a hook that refers to its model.

Python does not copy functions, so a copied module would keep calling into the original.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from plait.verification.attributes import is_full


@contextmanager
def copied_closures(module: nn.Module) -> Iterator[None]:
    """Context in which deep copies of functions that refer to `module` or its parts refer to the copies."""
    parts = {id(part) for part in module.modules()}
    parts |= {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    dispatch: dict[type, Any] = copy._deepcopy_dispatch  # type: ignore[attr-defined]
    before = dispatch[types.FunctionType]

    def copied(function: types.FunctionType, memo: dict[int, Any]) -> types.FunctionType:
        return _copy(function, memo) if _leads_to(function, parts) else function

    dispatch[types.FunctionType] = copied
    try:
        yield
    finally:
        dispatch[types.FunctionType] = before


def _copy(function: types.FunctionType, memo: dict[int, Any]) -> types.FunctionType:
    cells = [memo.setdefault(id(cell), types.CellType()) for cell in function.__closure__ or ()]
    made = types.FunctionType(function.__code__, function.__globals__, function.__name__, None, tuple(cells))
    # Memoized before its contents are copied, as these may refer back to it.
    memo[id(function)] = made
    made.__defaults__ = copy.deepcopy(function.__defaults__, memo)
    made.__kwdefaults__ = copy.deepcopy(function.__kwdefaults__, memo)
    made.__qualname__, made.__module__ = function.__qualname__, function.__module__
    made.__dict__.update(copy.deepcopy(function.__dict__, memo))
    for cell, copied in zip(function.__closure__ or (), cells):
        if is_full(cell) and not is_full(copied):
            copied.cell_contents = copy.deepcopy(cell.cell_contents, memo)
    return made


def _leads_to(value: Any, parts: set[int]) -> bool:
    """Whether a function refers, directly or not, to an object whose id is in `parts`."""
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if id(one) in parts:
            return True
        if id(one) not in seen:
            seen.add(id(one))
            waiting += _referred(one)
    return False


def _referred(value: Any) -> list[Any]:
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if is_full(cell)]
        return [*cells, value.__defaults__, value.__kwdefaults__, value.__dict__]
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)
    if isinstance(value, (type, types.ModuleType, Tensor, torch.Generator)):
        return []
    return list(vars(value).values()) if hasattr(value, "__dict__") else []
