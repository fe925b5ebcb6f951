"""MNIST's IDX files: a magic number, the sizes of the axes, then bytes."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import torch
from torch import Tensor

from plait.core.errors import DataError
from plait.workloads.data.files import read_bytes

_UNSIGNED_BYTE = 0x08


def read_idx(path: Path, axes: int, remedy: str) -> Tensor:
    """The bytes in `path`, gzipped or plain, as a tensor with this many `axes`."""
    expected = f"an IDX file of bytes with {axes} axes"
    data = read_bytes(path, expected, remedy)
    if path.suffix == ".gz":
        data = _unpacked(path, data, remedy)
    magic = _UNSIGNED_BYTE << 8 | axes
    header_bytes = 4 + 4 * axes
    found = int.from_bytes(data[:4], "big")
    if len(data) < header_bytes:
        raise DataError(
            f"{path}: found {len(data)} bytes, expected {expected}, whose header alone has {header_bytes}; "
            f"{remedy}"
        )
    if found != magic:
        raise DataError(
            f"{path}: found the magic number 0x{found:08x}, expected 0x{magic:08x} ({expected}); {remedy}"
        )
    shape = struct.unpack_from(f">{axes}I", data, 4)
    if len(data) - header_bytes != math.prod(shape):
        raise DataError(
            f"{path}: found {len(data) - header_bytes:,} bytes after the header, which promises "
            f"{' x '.join(str(size) for size in shape)} = {math.prod(shape):,}; {remedy}"
        )
    # A copy, because a tensor must be able to write to its memory.
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)[header_bytes:].view(shape)


def _unpacked(path: Path, data: bytes, remedy: str) -> bytes:
    try:
        return gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as failure:
        raise DataError(f"{path}: not a whole gzip file ({failure}); {remedy}") from None
