"""Python state of objects: read as plain values, compared, and loaded into a copy of the object.

This covers their attributes, and the globals and class attributes that their code refers to. Parameters,
buffers and submodules are torch's state and are skipped. Attributes without a plain form are listed by name,
so that they are not assumed to be equal.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import math
import random
import threading
import types
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from plait.verification.python_state import TORCHS, Root, cell_content, roots_of_code
from plait.verification.python_values import MISSING

# Larger containers and tensors (masks, tables, caches) are not read.
MOST_ITEMS = 4096
_DEEPEST = 8
_ROUNDING = 1e-4
_SCALARS = (bool, int, float, str, type(None))
# They refer to code, which copies share.
_CODE = (type, types.ModuleType, types.BuiltinFunctionType, types.MethodType, torch.dtype, torch.device)
# Attributes that torch sets on optimizers.
_OF_OPTIMIZERS = frozenset(
    [
        "defaults", "state", "param_groups", "_zero_grad_profile_name", "_step_count", "_opt_called",
        "_warned_capturable_if_run_uncaptured",
    ]
)  # fmt: skip


class UnseenError(Exception):
    """A value that cannot be read as plain values."""


@dataclass(frozen=True)
class Attributes:
    """The attributes of objects in plain form, by path and name; `unseen` lists those without one."""

    values: Mapping[str, Any]
    unseen: tuple[str, ...] = ()


def read_attributes(objects: Mapping[str, Any]) -> Attributes:
    """Read the attributes of `objects` by path: the modules of a model, a loss, an optimizer."""
    values, unseen = dict[str, Any](), list[str]()
    for path, each in objects.items():
        for name, value in sorted(getattr(each, "__dict__", {}).items()):
            if _is_own(each, name, value):
                try:
                    values[_joined(path, name)] = to_plain(value)
                except UnseenError:
                    unseen.append(_joined(path, name))
    for key, root in _named_by_code(objects).items():
        with contextlib.suppress(UnseenError):
            values[key] = to_plain(root.get())
    return Attributes(values, tuple(unseen))


def load_attributes(objects: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Load attributes into `objects`, copies of those that were read."""
    shared = _named_by_code(objects)
    for key in shared.keys() & values.keys():
        root, plain = shared[key], values[key]
        with contextlib.suppress(UnseenError):
            if to_plain(now := root.get()) != plain:
                root.set(from_plain(plain, now))
    for key, plain in values.items():
        if key in shared:
            continue
        owner, _, name = key.rpartition(".")
        held = getattr(objects.get(owner), "__dict__", {})
        # Keep the copy's own code and objects, if it has them.
        is_held = name in held or not isinstance(plain, list) or plain[0] not in ("code", "object")
        if owner in objects and is_held and _is_own(objects[owner], name, held.get(name)):
            held[name] = from_plain(plain, held.get(name))


def _named_by_code(objects: Mapping[str, Any]) -> dict[str, Root]:
    """Globals, closures and class attributes, under names that cannot clash with attributes."""
    return {f"{root.label} in {root.path or 'the model'}": root for root in roots_of_code(objects)}


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _is_own(owner: Any, name: str, value: Any) -> bool:
    if isinstance(value, (nn.Module, nn.Parameter, torch.optim.Optimizer)):
        return False
    if isinstance(owner, torch.optim.Optimizer):
        hooks = name.startswith("_optimizer_") and name.endswith("_hooks")
        return name not in _OF_OPTIMIZERS and not hooks
    return name not in TORCHS


def to_plain(value: Any, depth: int = 0) -> Any:
    """Numbers and text unchanged, anything else as a pair of its kind and its content.

    Raises UnseenError for a value without a plain form.
    """
    if isinstance(value, _SCALARS):
        return value
    size = value.numel() if isinstance(value, Tensor) else getattr(value, "size", 0)
    items = value if isinstance(value, (list, tuple, set, frozenset, collections.deque, Mapping)) else ()
    if depth > _DEEPEST or max(len(items), size if isinstance(size, int) else 0) > MOST_ITEMS:
        raise UnseenError

    def inner(parts: Iterable[Any]) -> list[Any]:
        return [to_plain(part, depth + 1) for part in parts]

    match value:
        case nn.Parameter():
            # Also within lists: the values of parameters are compared elsewhere.
            return ["code", "parameter"]
        case Tensor() if not (value.is_sparse or value.is_quantized or value.is_complex()):
            dtype = str(value.dtype).removeprefix("torch.")
            return ["tensor", [dtype, list(value.shape), value.detach().flatten().tolist()]]
        case numpy.ndarray() | numpy.generic() if not value.dtype.hasobject:
            return ["array", [str(value.dtype), list(value.shape), value.ravel().tolist()]]
        case Mapping():
            return ["mapping", [inner(pair) for pair in value.items()]]
        case set() | frozenset():
            return ["set", sorted(inner(value), key=repr)]
        case list() | tuple() | collections.deque():
            kind = "list" if isinstance(value, list) else "tuple" if isinstance(value, tuple) else "deque"
            return [kind, inner(value)]
        case torch.Generator():
            return ["generator", value.get_state().tolist()]
        case random.Random():
            return ["random", to_plain(value.getstate(), -_DEEPEST)]
        case types.FunctionType() if _closes_over_code(value):
            return ["code", value.__qualname__]
        case _ if isinstance(value, _CODE):
            return ["code", getattr(value, "__qualname__", str(value))]
        case contextvars.ContextVar():
            return ["variable", to_plain(value.get(None), depth + 1)]
        case _ if _is_plain_object(value) or isinstance(value, threading.local):
            attributes = {name: each for name, each in vars(value).items() if not isinstance(each, nn.Module)}
            return ["object", [type(value).__qualname__, to_plain(attributes, depth + 1)]]
    raise UnseenError


def from_plain(plain: Any, now: Any = None) -> Any:
    """The value of a plain form; `now` is the current value, whose class and code are kept."""
    if not isinstance(plain, list):
        return plain
    kind, content = plain
    match kind:
        case "tensor":
            device = now.device if isinstance(now, Tensor) else None
            dtype = getattr(torch, content[0])
            return torch.tensor(content[2], dtype=dtype, device=device).reshape(content[1])
        case "array":
            return numpy.array(content[2], dtype=content[0]).reshape(content[1])[()]
        case "mapping":
            return _mapping(content, now)
        case "set":
            items = {from_plain(each) for each in content}
            if isinstance(now, set):
                now.clear()
                now.update(items)
                return now
            return frozenset(items) if isinstance(now, frozenset) else items
        case "list" | "tuple" | "deque":
            return _sequence(kind, content, now)
        case "generator":
            generator = now if isinstance(now, torch.Generator) else torch.Generator()
            return generator.set_state(torch.tensor(content, dtype=torch.uint8))
        case "random":
            source = now if isinstance(now, random.Random) else random.Random()
            source.setstate(from_plain(content))
            return source
        case "variable":
            assert isinstance(now, contextvars.ContextVar)
            now.set(from_plain(content, now.get(None)))
        case "object":
            if type(now).__qualname__ == content[0]:
                vars(now).update(from_plain(content[1], vars(now)))
    return now


def same_plain(one: Any, other: Any) -> bool:
    """Whether two plain forms are equal, numbers up to rounding."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same_plain, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=_ROUNDING) or (one != one and other != other)
    return type(one) is type(other) and bool(one == other)


def shifted(plain: Any, offset: int) -> Any:
    """A plain form with `offset` added to all numbers in it."""
    match plain:
        case bool():
            return plain
        case int() | float():
            return type(plain)(plain + offset)
        case ["list" | "tuple" | "deque" as kind, content]:
            return [kind, [shifted(each, offset) for each in content]]
        case ["mapping", content]:
            return ["mapping", [[key, shifted(value, offset)] for key, value in content]]
        case ["variable", content]:
            return ["variable", shifted(content, offset)]
        case ["object", [kind, content]]:
            return ["object", [kind, shifted(content, offset)]]
    return plain


def _mapping(content: list[Any], now: Any) -> Any:
    before = now if isinstance(now, Mapping) else {}
    pairs = [(from_plain(key), value) for key, value in content]
    values = {key: from_plain(value, before.get(key)) for key, value in pairs}
    if isinstance(now, MutableMapping):  # keep the object: it may be a defaultdict, or be shared
        now.clear()
        now.update(values)
        return now
    return values


def _sequence(kind: str, content: list[Any], now: Any) -> Any:
    before = list(now) if isinstance(now, (list, tuple, collections.deque)) else []
    items = [from_plain(each, before[i] if i < len(before) else None) for i, each in enumerate(content)]
    if kind == "deque":
        return collections.deque(items, now.maxlen if isinstance(now, collections.deque) else None)
    if kind == "list" and isinstance(now, list):
        now[:] = items
        return now
    if hasattr(now, "_fields"):
        return type(now)(*items)
    return items if kind == "list" else tuple(items)


def _closes_over_code(function: types.FunctionType) -> bool:
    """Whether a function closes over nothing but code, modules and tensors."""
    held = [cell.cell_contents for cell in function.__closure__ or () if is_full(cell)]
    return all(callable(each) or isinstance(each, (*_CODE, nn.Module, Tensor)) for each in held)


def is_full(cell: types.CellType) -> bool:
    """Whether a closure cell has a value."""
    return cell_content(cell) is not MISSING


def _is_plain_object(value: Any) -> bool:
    """Whether a value is an instance of a Python class with no state beyond its attributes."""
    kinds = type(value).__mro__[:-1]
    in_python = all(kind.__flags__ & (1 << 9) for kind in kinds)  # Py_TPFLAGS_HEAPTYPE
    return in_python and hasattr(value, "__dict__") and not any("__slots__" in vars(kind) for kind in kinds)
