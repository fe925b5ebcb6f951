"""Runs a model itself, not a copy, and restores all of its state afterwards.

For most models a copy would be enough. But functions that refer to a part of the model, and objects that
Python cannot copy, make a copy behave differently, and then both sides of a comparison would be equally
wrong.
"""

from __future__ import annotations

import functools
import logging
import types
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch import Tensor

from plait.verification.python_state import cell_content
from plait.verification.python_values import MISSING, restoring_numbers, slots_of_class

# If a model refers to more objects than this, the more distant ones are not restored.
_MOST = 200_000
_LEFT_ALONE = (type, types.ModuleType, logging.Logger, logging.Handler, str, bytes, int, float, complex)


@contextmanager
def borrowed(*items: Any) -> Iterator[None]:
    """Context in which a model and its loss may change: their tensors are copies; then all is restored.

    This covers tensors, gradients, and attributes, as far as Python objects refer to them.
    """
    snapshot = _Snapshot()
    snapshot.take(items)
    try:
        yield
    finally:
        snapshot.put_back()


class _Snapshot:
    """The actions that restore the state, last first."""

    def __init__(self) -> None:
        self._back: list[Callable[[], Any]] = []
        self._seen: dict[int, Any] = {}

    def put_back(self) -> None:
        with torch.no_grad():
            for back in reversed(self._back):
                back()

    @torch.no_grad()
    def take(self, items: tuple[Any, ...]) -> None:
        waiting: list[Any] = list(items)
        while waiting and len(self._seen) < _MOST:
            value = waiting.pop()
            if id(value) not in self._seen and not isinstance(value, _LEFT_ALONE):
                # Kept alive so that its id is not reused.
                self._seen[id(value)] = value
                waiting += self._take(value)

    def _take(self, value: Any) -> list[Any]:
        """Record how to restore `value`; returns what it refers to."""
        if isinstance(value, Tensor):
            if type(value).__torch_dispatch__ is not Tensor.__torch_dispatch__:  # a wrapper subclass
                return [held for held in vars(value).values() if isinstance(held, Tensor)]
            self._take_tensor(value)
            return []
        if (restore := restoring_numbers(value)) is not None:
            self._back.append(restore)
            return []
        if (held := self._take_container(value)) is not None:
            return held
        if isinstance(value, types.FunctionType):
            return self._take_function(value)
        if isinstance(value, types.MethodType):
            return [value.__self__, value.__func__]
        if isinstance(value, functools.partial):
            return [value.func, value.args, value.keywords]
        return self._take_attributes(value)

    def _take_tensor(self, tensor: Tensor) -> None:
        if not tensor.is_leaf:  # result of an earlier forward, which is not written
            return
        data, gradient, trained = tensor.data, tensor.grad, tensor.requires_grad
        try:
            tensor.data = data.clone()
        except RuntimeError:  # a tensor type whose data cannot be set
            return

        def back() -> None:
            tensor.data = data
            tensor.grad = gradient
            if tensor.requires_grad != trained:
                tensor.requires_grad_(trained)

        tensor.grad = None
        self._back.append(back)

    def _take_container(self, value: Any) -> list[Any] | None:
        """Record how to restore a container; returns its items, or None if it is not a container."""
        if isinstance(value, (tuple, frozenset)):
            return list(value)
        if isinstance(value, dict):
            items = dict(value)
            self._back += [functools.partial(value.update, items), value.clear]
            return [*items.values(), *(vars(value).values() if hasattr(value, "__dict__") else ())]
        if isinstance(value, (list, deque, set)):
            members = list(value)
            fill: Any = value.update if isinstance(value, set) else value.extend
            self._back += [functools.partial(fill, members), value.clear]
            return members
        if isinstance(value, bytearray):
            content = value.copy()
            self._back.append(lambda: value.__setitem__(slice(None), content))
            return []
        return [] if isinstance(value, numpy.ndarray) else None

    def _take_function(self, function: types.FunctionType) -> list[Any]:
        referents: list[Any] = [function.__defaults__, function.__kwdefaults__, function.__dict__]
        for cell in function.__closure__ or ():
            if (content := cell_content(cell)) is not MISSING:
                self._back.append(functools.partial(setattr, cell, "cell_contents", content))
                referents.append(content)
        return referents

    def _take_attributes(self, value: Any) -> list[Any]:
        referents: list[Any] = []
        if hasattr(value, "__dict__") and isinstance(value.__dict__, dict):
            referents.append(value.__dict__)
        for name in slots_of_class(type(value)):
            if hasattr(value, name):
                content = getattr(value, name)
                self._back.append(functools.partial(object.__setattr__, value, name, content))
                referents.append(content)
        return referents
