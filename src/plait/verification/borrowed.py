"""A model that runs and is then as it was: its own code on its own modules, with nothing left of it.

A copy would do for most models. But functions that hold a part of the model, and objects that Python cannot
copy, make a copy do something else than the model, and then both sides of a comparison are wrong alike.
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

from plait.verification.python_state import restoring_numbers, slots_of_class

# A model that refers to more objects than this keeps those that are further away as they become.
_MOST = 200_000
_LEFT_ALONE = (type, types.ModuleType, logging.Logger, logging.Handler, str, bytes, int, float, complex)


@contextmanager
def borrowed(*items: Any) -> Iterator[None]:
    """Within, a model and its loss may run and change: their tensors are copies; afterwards all is as before.

    That is tensors, their gradients, and what attributes hold, as far as Python objects lead.
    """
    taken = _Taken()
    taken.take(items)
    try:
        yield
    finally:
        taken.put_back()


class _Taken:
    """What has to be put back, the last first."""

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
                # Kept, so that no other object gets its id.
                self._seen[id(value)] = value
                waiting += self._take(value)

    def _take(self, value: Any) -> list[Any]:
        """Note how `value` is put back; what it refers to."""
        if isinstance(value, Tensor):
            if type(value).__torch_dispatch__ is not Tensor.__torch_dispatch__:  # one around others
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
        if not tensor.is_leaf:  # left by an earlier forward: nobody writes into it
            return
        own, gradient, trained = tensor.data, tensor.grad, tensor.requires_grad
        try:
            tensor.data = own.clone()
        except RuntimeError:  # a kind of tensor that takes no other data
            return

        def back() -> None:
            tensor.data = own
            tensor.grad = gradient
            if tensor.requires_grad != trained:
                tensor.requires_grad_(trained)

        tensor.grad = None
        self._back.append(back)

    def _take_container(self, value: Any) -> list[Any] | None:
        """Note how a container is put back; what it holds, or None where it is none."""
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
        found: list[Any] = [function.__defaults__, function.__kwdefaults__, function.__dict__]
        for cell in function.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:  # nothing in it yet
                continue
            self._back.append(functools.partial(setattr, cell, "cell_contents", content))
            found.append(content)
        return found

    def _take_attributes(self, value: Any) -> list[Any]:
        found: list[Any] = []
        if hasattr(value, "__dict__") and isinstance(value.__dict__, dict):
            found.append(value.__dict__)
        for name in slots_of_class(type(value)):
            if hasattr(value, name):
                content = getattr(value, name)
                self._back.append(functools.partial(object.__setattr__, value, name, content))
                found.append(content)
        return found
