"""Batches as plain values and raw tensors, which a loader process sends to its worker without pickle.

Supports tensors, numpy arrays, numbers, text, bytes and None, in tuples, lists, dicts, sets, named tuples,
dataclasses and other mappings (such as transformers' BatchEncoding). Classes are sent by name, and only
constructed if they are one of these.
"""

from __future__ import annotations

import base64
import dataclasses
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

from plait.core.errors import DataError


class NotHandedOverError(DataError):
    """A batch contains something that a loader process cannot send to its worker."""


NextTensor = Callable[[torch.dtype, Sequence[int]], Tensor]
_PLAIN = (bool, int, float, str, type(None))


def take_apart(value: Any, tensors: list[Tensor]) -> Any:
    """`value` as JSON; its tensors are appended to `tensors`, in the order of `put_together`."""

    def down(item: Any) -> Any:
        return take_apart(item, tensors)

    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is Tensor:
        return _take_tensor(value, tensors)
    if kind is list:
        return ["list", [down(item) for item in value]]
    if kind is tuple:
        return ["tuple", [down(item) for item in value]]
    if kind is dict:
        return ["dict", [[down(key), down(item)] for key, item in value.items()]]
    if kind in (bytes, bytearray):
        return ["bytes", base64.b64encode(value).decode()]
    if kind in (set, frozenset):
        return [kind.__name__, [down(item) for item in value]]
    if isinstance(value, (numpy.ndarray, numpy.generic)):
        return _take_array(value, tensors)
    return _take_object(value, down)


def _take_tensor(value: Tensor, tensors: list[Tensor]) -> Any:
    if value.layout is not torch.strided or value.is_quantized or value.device.type != "cpu":
        raise _refused(f"a {value.layout} tensor on {value.device}")
    if value.requires_grad:
        raise _refused("a tensor that requires a gradient")
    tensors.append(value.resolve_conj().resolve_neg().contiguous())
    return ["tensor", str(value.dtype).removeprefix("torch."), list(value.shape)]


def _take_array(value: Any, tensors: list[Tensor]) -> Any:
    array = numpy.asarray(value)
    if array.dtype.hasobject or array.dtype.kind not in "biufcSUmM":
        raise _refused(f"a numpy array of {array.dtype}")
    raw = numpy.frombuffer(array.tobytes(), dtype=numpy.uint8)
    tensors.append(torch.from_numpy(raw.copy()))
    return ["array", array.dtype.str, list(array.shape), isinstance(value, numpy.generic), raw.size]


def _take_object(value: Any, down: Callable[[Any], Any]) -> Any:
    kind = type(value)
    name = [kind.__module__, kind.__qualname__]
    if _is_named_tuple(kind):
        return ["named", name, [down(item) for item in value]]
    if isinstance(value, Mapping):
        return ["mapping", name, [[down(key), down(item)] for key, item in value.items()]]
    if dataclasses.is_dataclass(value):
        fields = {f.name: down(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return ["dataclass", name, fields]
    if isinstance(value, int):
        return ["value", name, int.__int__(value)]
    if isinstance(value, float):
        values = values_of_trials(value)
        return ["value", name, float.__float__(value) if values is None else list(values)]
    if isinstance(value, str):
        return ["value", name, "".join(value)]
    raise _refused(f"a {kind.__module__}.{kind.__qualname__}")


def values_of_trials(number: Any) -> tuple[float, ...] | None:
    """The numbers of each fused trial, if this stands for them; None for other numbers."""
    values = getattr(number, "values", None)
    return values if isinstance(values, tuple) else None


def _refused(what: str) -> NotHandedOverError:
    return NotHandedOverError(
        f"data.loaders: a batch holds {what}, which a loader process cannot hand over; make tensors, numbers "
        f"or text of it (collate_fn), or use loaders: 0"
    )


def put_together(content: Any, tensor: NextTensor) -> Any:
    """The inverse of `take_apart`; `tensor` returns the tensors one after the other."""

    def up(item: Any) -> Any:
        return put_together(item, tensor)

    if not isinstance(content, list):
        return content
    match content:
        case ["tensor", dtype, shape]:
            return tensor(getattr(torch, dtype), shape)
        case ["list", items]:
            return [up(item) for item in items]
        case ["tuple", items]:
            return tuple(up(item) for item in items)
        case ["dict", pairs]:
            return {up(key): up(item) for key, item in pairs}
        case ["bytes", text]:
            return base64.b64decode(text)
        case [("set" | "frozenset") as kind, items]:
            return {"set": set, "frozenset": frozenset}[kind](up(item) for item in items)
        case ["array", dtype, shape, is_scalar, size]:
            raw = tensor(torch.uint8, [size]).numpy()
            array = raw.view(numpy.dtype(dtype)).reshape(shape)
            return array[()] if is_scalar else array
        case [kind, [module, name], items]:
            return _made(kind, find_class(module, name), items, up)
    raise ValueError(f"found {content!r}, expected what take_apart makes")


def find_class(module: str, name: str) -> Any:
    """The class of that qualified name."""
    value: Any = importlib.import_module(module)
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _made(kind: str, cls: Any, items: Any, up: Callable[[Any], Any]) -> Any:
    if kind == "named" and _is_named_tuple(cls):
        return cls(*(up(item) for item in items))
    if kind == "mapping" and issubclass(cls, Mapping):
        return cls({up(key): up(item) for key, item in items})
    if kind == "dataclass" and dataclasses.is_dataclass(cls):
        made: Any = cls.__new__(cls)  # type: ignore[arg-type]
        for name, item in items.items():
            object.__setattr__(made, name, up(item))
        return made
    if kind == "value" and issubclass(cls, (int, float, str)):
        return cls(items)
    raise ValueError(f"{cls!r} is no {kind}")


def _is_named_tuple(cls: Any) -> bool:
    return isinstance(cls, type) and issubclass(cls, tuple) and hasattr(cls, "_fields")
