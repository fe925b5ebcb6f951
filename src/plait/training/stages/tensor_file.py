"""Tensors in safetensors files, written and read one at a time, and those that no file should hold."""

from __future__ import annotations

import json
import math
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from plait.comm.collectives import Specs
from plait.core.codec import decode
from plait.core.errors import ArtefactError, CheckpointError
from plait.core.files import writing
from plait.core.shown import shown

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_BY_NAME = {name: dtype for dtype, name in _DTYPES.items()}


def find_broken(tensors: Mapping[str, Tensor], weights: Container[str] | None = None) -> str | None:
    """The name of the first tensor with NaN or infinite values, or None.

    If `weights` is given, infinities are allowed in other tensors, such as masks. Values are reduced on their
    device, with one synchronization per device.
    """
    by_device: dict[torch.device, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if tensor.numel() and (tensor.is_floating_point() or tensor.is_complex()):
            values = tensor.detach() if tensor.element_size() > 1 else tensor.detach().float()
            largest = torch.linalg.vector_norm(values, math.inf).double()
            by_device.setdefault(tensor.device, {})[name] = largest
    for norms in by_device.values():
        for name, value in zip(norms, torch.stack(list(norms.values())).tolist()):
            if math.isnan(value) or (math.isinf(value) and (weights is None or name in weights)):
                return name
    return None


def write_in_turn(
    path: Path, specs: Specs, tensors: Iterable[tuple[str, Tensor]], weights: Container[str] | None = None
) -> str | None:
    """Write named tensors, in the order of `specs`, into one safetensors file as they arrive.

    Returns the name of the first that `find_broken` finds.
    """
    broken = None
    header, offset = {}, 0
    for name, (dtype, shape) in specs.items():
        size = torch.Size(shape).numel() * getattr(torch, dtype).itemsize
        kind = _DTYPES[getattr(torch, dtype)]
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.parent.mkdir(parents=True, exist_ok=True)
    with writing(path), path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in tensors:
            broken = broken or find_broken({name: tensor}, weights)
            if tensor.numel():
                content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
                file.write(content.numpy().data)
    return broken


class StoredTensors(Mapping[str, Tensor]):
    """The tensors of a safetensors file, read lazily.

    The file is not memory-mapped: a mapping of the whole file would count against memory limits.
    """

    def __init__(self, path: Path, tied: Mapping[str, str] | None = None) -> None:
        self._path = path
        header, self._start = _read_header(path)
        self._entries = dict(header)
        for alias, name in (tied or {}).items():
            if name not in header:
                raise CheckpointError(f"{path}: {alias!r} is tied to {name!r}, which is not there")
            self._entries[alias] = header[name]

    def __getitem__(self, name: str) -> Tensor:
        entry = self._entries[name]
        start, end = entry.data_offsets
        content = torch.empty(end - start, dtype=torch.uint8)
        with self._path.open("rb") as file:
            file.seek(self._start + start)
            file.readinto(content.numpy().data)
        return content.view(_BY_NAME[entry.dtype]).reshape(entry.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def dtype(self, name: str) -> torch.dtype:
        return _BY_NAME[self._entries[name].dtype]


@dataclass(frozen=True)
class _HeaderEntry:
    """A tensor in a safetensors file; offsets count from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def _read_header(path: Path) -> tuple[dict[str, _HeaderEntry], int]:
    """The checked header of a safetensors file, and the offset of its end."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if 8 + length > size:
            raise CheckpointError(
                f"{path}: its header has {length:,} bytes, the file {size:,}; it is damaged"
            )
        try:
            content = json.loads(file.read(length))
            content.pop("__metadata__", None)
            header = decode(dict[str, _HeaderEntry], content, str(path))
        except (ValueError, TypeError, AttributeError, RecursionError, ArtefactError) as failure:
            raise CheckpointError(f"{path}: its header cannot be read ({failure}); it is damaged") from None
    for name, entry in header.items():
        start, end = entry.data_offsets
        dtype = _BY_NAME.get(entry.dtype)
        expected = None if dtype is None else math.prod(entry.shape) * dtype.itemsize
        fits = 0 <= start <= end <= size - 8 - length and min(entry.shape, default=0) >= 0
        if not fits or end - start != expected:
            raise CheckpointError(
                f"{path}: {shown(name)} of type {shown(entry.dtype)} and shape {shown(entry.shape)} is at "
                f"bytes {start} to {end}; it is damaged"
            )
    return header, 8 + length
