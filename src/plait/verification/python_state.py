"""State that Python code keeps between calls: attributes, containers, objects, globals.

A module's forward may count, cache or draw from its own generator. Such state is found by following
references from the modules: their attributes, those of their classes, and the globals and closures that the
code of their classes and hooks refers to. It can be captured, compared deeply, and restored.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import functools
import itertools
import os
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer

from plait.verification.python_values import (
    FOREIGN,
    MISSING,
    PLAIN,
    Tokens,
    generator_of,
    is_followed,
    is_foreign,
    keyed,
    reached,
    restoring,
)

# Attributes of modules that belong to torch: tensors, submodules and the mode are handled elsewhere.
TORCHS = frozenset([*nn.Module().__dict__, "_flat_weights", "_flat_weight_refs", "_flat_weights_names"])
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
# Packages whose globals and classes have no state of a model, though their objects may.
_LIBRARIES = FOREIGN | {
    "accelerate", "diffusers", "huggingface_hub", "peft", "timm", "tokenizers", "torchaudio", "torchvision",
    "transformers",
}  # fmt: skip
# The path of a module, and a readable name of its state.
Name = tuple[str, str]


@dataclass(frozen=True)
class Root:
    """A name in `holder` that refers to state of the module at `path`; `label` is the name for messages."""

    path: str
    label: str
    holder: Any
    name: Any

    def get(self) -> Any:
        """The current value of the name."""
        if isinstance(self.holder, types.CellType):
            return cell_content(self.holder)
        held = self.holder if isinstance(self.holder, dict) else vars(self.holder)
        return held.get(self.name, MISSING)

    def set(self, value: Any) -> None:
        """Assign `value` to the name, if it differs."""
        if self.get() is value:
            return
        if isinstance(self.holder, types.CellType):
            self.holder.cell_contents = value
        elif isinstance(self.holder, type):
            setattr(self.holder, self.name, value)
        else:
            held = self.holder if isinstance(self.holder, dict) else vars(self.holder)
            held[self.name] = value


class PythonState:
    """A snapshot of the Python state of modules, or of other objects and functions.

    `modules` are by path. `restore` restores all of it, deeply. `tokens` describe the current state.
    """

    def __init__(self, modules: Mapping[str, Any]) -> None:
        self._modules = dict(modules)
        self._of_code: dict[Any, list[Root]] = {}
        self._restores: list[Callable[[], object]] = []
        self._names = {path: set(_attributes(module)) for path, module in self._modules.items()}
        held = [(root, root.get()) for root in self.roots()]
        self._restores += [functools.partial(root.set, value) for root, value in held]
        # Kept alive so that ids are not reused.
        self._kept = list(reached(value for _, value in held))
        self._restores += [restore for value in self._kept if (restore := restoring(value)) is not None]

    def roots(self) -> Iterator[Root]:
        """All names that refer to state now."""
        for path, module in self._modules.items():
            for name in _attributes(module):
                yield Root(path, f"self.{name}", module, name)
            for held in _hooks(module):
                yield from (Root(path, "what a hook keeps", held, key) for key in held)
        yield from roots_of_code(self._modules, self._of_code)

    def restore(self) -> None:
        """Restore what has changed since."""
        for path, module in self._modules.items():
            for name in set(_attributes(module)) - self._names[path]:
                del vars(module)[name]
        for restore in self._restores:
            restore()

    def tokens(self, same_tensors: bool = False) -> dict[Name, Any]:
        """Deep descriptions of the current values; equal if the values are.

        Tensors are equal if shape and dtype are; with `same_tensors`, only if they are the same object.
        """
        tokens = Tokens(same_tensors)
        return {(root.path, root.label): tokens.of(root.get()) for root in self.roots()}


def roots_of_code(modules: Mapping[str, Any], known: dict[Any, list[Root]] | None = None) -> Iterator[Root]:
    """The globals, closures and class attributes that the code of modules and of their hooks refers to.

    `known` caches those of each class.
    """
    known = {} if known is None else known
    for path, module in modules.items():
        hooks = [hook for held in _hooks(module) for hook in held.values()]
        kind = type(module) if isinstance(module, nn.Module) else module
        key = (id(kind), *map(id, hooks))
        if key not in known:
            known[key] = list(_roots_of_code(module, hooks))
        yield from (Root(path, root.label, root.holder, root.name) for root in known[key])


def _hooks(module: Any) -> list[dict[int, Any]]:
    return [getattr(module, "__dict__", {}).get(name, {}) for name in _HOOKS]


def state_of(model: nn.Module) -> PythonState:
    """The Python state of a model and all its submodules."""
    return PythonState(dict(model.named_modules()))


@contextlib.contextmanager
def unchanged_state(items: Mapping[str, Any]) -> Iterator[PythonState]:
    """Context after which the Python state of models, objects and functions, and globals, is restored.

    Buffers of modules are restored too; parameters are not.
    """
    objects: dict[str, Any] = {}
    for name, item in items.items():
        if objects.get(name) is not item:  # else it is part of an item before
            parts = item.named_modules(prefix=name) if isinstance(item, nn.Module) else [(name, item)]
            objects |= dict(parts)
    state = PythonState(objects)
    modules = [part for part in objects.values() if isinstance(part, nn.Module)]
    # Scripted modules register their buffers elsewhere.
    registered = [(m._buffers, dict(m._buffers)) for m in modules if isinstance(m._buffers, dict)]
    buffers = {id(buffer): buffer for module in modules for buffer in module.buffers(recurse=False)}
    values = [(b, b.detach().clone()) for b in buffers.values() if not isinstance(b, UninitializedBuffer)]
    try:
        yield state
    finally:
        state.restore()
        for now, held in registered:
            now.clear()
            now.update(held)
        with torch.no_grad():
            for buffer, before in values:
                if buffer.shape != before.shape:
                    buffer.data = before
                elif not torch.equal(buffer, before):
                    buffer.copy_(before)


def changed_by(call: Callable[[], object], items: Mapping[str, Any]) -> list[Name]:
    """The names of the Python state of `items` that a call changes; afterwards it is restored."""
    with unchanged_state(items) as state:
        before = state.tokens()
        call()
        return changed(before, state.tokens())


def changed(before: Mapping[Name, Any], now: Mapping[Name, Any]) -> list[Name]:
    """The names whose values have changed."""
    names = dict.fromkeys([*before, *now])
    return [name for name in names if before.get(name, MISSING) != now.get(name, MISSING)]


def objects_behind(root: Root) -> set[Any]:
    """What identifies the state of a name: the ids of its objects, and for a global the name itself."""
    identity = {(id(root.holder), root.name)} if not isinstance(root.holder, nn.Module) else set[Any]()
    found = reached([root.get()])
    return identity | {id(v) for v in found if restoring(v) is not None or isinstance(v, itertools.count)}


def tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """The tensors that values refer to."""
    return [value for value in reached(values) if isinstance(value, Tensor)]


def tensor_slots(modules: Mapping[str, Any]) -> Iterator[tuple[Any, Any, Tensor]]:
    """The tensors that modules refer to in Python, each with its container and its key there.

    Registered parameters and buffers are not included.
    """
    roots = list(PythonState(modules).roots())
    holders = [vars(root.holder) for root in roots if isinstance(root.get(), Tensor)]
    for holder in [*holders, *reached(root.get() for root in roots)]:
        yield from ((holder, key, part) for key, part in keyed(holder) if isinstance(part, Tensor))


def _attributes(module: Any) -> list[str]:
    """The names of a module's Python attributes."""
    return [name for name in getattr(module, "__dict__", ()) if name not in TORCHS]


def cell_content(cell: types.CellType) -> Any:
    """The value of a closure's variable; `MISSING` if it has none yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


# References in the code of classes and functions.


def _roots_of_code(item: Any, hooks: Sequence[Any]) -> Iterator[Root]:
    """Attributes of the classes of `item`, and globals and closures of their code and of its hooks.

    For an object, also those of what it refers to, as a wrapper may call it.
    """
    seen: set[int] = set()
    is_object = not isinstance(item, (nn.Module, types.FunctionType))
    items = [item, *(getattr(item, "__dict__", {}).values() if is_object else ())]
    functions = [_function(each) for each in (*items, *hooks)]
    for kind in dict.fromkeys(kind for each in items for kind in type(each).__mro__):
        if not is_foreign(kind, _LIBRARIES):
            yield from _roots_of_class(kind, seen)
            functions += _functions_of(kind)
    for function in functions:
        yield from _roots_of_function(function, seen)


def _roots_of_class(kind: type, seen: set[int]) -> Iterator[Root]:
    if id(kind) in seen:
        return
    seen.add(id(kind))
    for name, value in list(kind.__dict__.items()):
        if not name.startswith("__") and _may_be_state(value):
            yield Root("", f"{kind.__name__}.{name}", kind, name)


def _functions_of(kind: type) -> list[Any]:
    return [_function(value) for value in list(kind.__dict__.values())]


def _function(value: Any) -> Any:
    """The function of a method, property, partial or hook; otherwise the value itself."""
    for name in ("fget", "__func__", "func"):
        inner = getattr(value, name, None)
        if isinstance(inner, types.FunctionType):
            return inner
    return value


def _roots_of_function(function: Any, seen: set[int]) -> Iterator[Root]:
    if (
        not isinstance(function, types.FunctionType)
        or id(function) in seen
        or is_foreign(function, _LIBRARIES)
    ):
        return
    seen.add(id(function))
    for name, value in list(function.__dict__.items()):
        if not name.startswith("__") and _may_be_state(value):
            yield Root("", f"{function.__qualname__}.{name}", function.__dict__, name)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        root = Root("", f"the variable {name}", cell, name)
        value = root.get()
        if isinstance(value, types.FunctionType):
            yield from _roots_of_function(value, seen)
        elif _may_be_state(value) and name != "__class__":
            yield root
    yield from _roots_of_names(function.__globals__, _names(function.__code__), seen)


def _names(code: types.CodeType) -> set[str]:
    """The names that a function's code looks up, including nested functions."""
    inner = (part for part in code.co_consts if isinstance(part, types.CodeType))
    return set(code.co_names).union(*(_names(part) for part in inner))


def _roots_of_names(namespace: dict[str, Any], names: Iterable[str], seen: set[int]) -> Iterator[Root]:
    for name in names:
        value = namespace.get(name, MISSING)
        if isinstance(value, types.FunctionType):
            yield from _roots_of_function(value, seen)
        elif isinstance(value, type):
            if not is_foreign(value, _LIBRARIES) and not issubclass(value, nn.Module):
                yield from _roots_of_class(value, seen)
                for function in _functions_of(value):
                    yield from _roots_of_function(function, seen)
        elif value is os:
            if "environ" in names:
                yield Root("", "os.environ", vars(os), "environ")
        elif isinstance(value, types.ModuleType):
            if value.__name__.partition(".")[0] not in _LIBRARIES and id(value) not in seen:
                seen.add(id(value))
                yield from _roots_of_names(value.__dict__, names, seen)
        elif _may_be_state(value):
            yield Root("", f"the global {name}", namespace, name)


def _may_be_state(value: Any) -> bool:
    """Whether a value is something that code may use to count or collect."""
    if value is MISSING or isinstance(value, (types.FunctionType, type, types.ModuleType, nn.Module)):
        return False
    if isinstance(value, (*PLAIN, numpy.ndarray, itertools.count, contextvars.ContextVar)):
        return True
    kinds = (Mapping, list, tuple, set, collections.deque)
    return isinstance(value, kinds) or generator_of(value) is not None or is_followed(value)
