"""MNIST's IDX files: a magic number, the sizes of the axes, then bytes."""

from __future__ import annotations

import gzip
import io
import math
import struct
import zlib
from pathlib import Path

import torch
from torch import Tensor

from plait.core.errors import DataError
from plait.workloads.data.files import read_bytes

_UNSIGNED_BYTE = 0x08
# More than any data set in this format.
MOST_BYTES = 2 << 30


def read_idx(path: Path, axes: int, remedy: str) -> Tensor:
    """The bytes in `path`, gzipped or plain, as a tensor with this many `axes`."""
    expected = f"an IDX file of bytes with {axes} axes"
    data = read_bytes(path, expected, remedy)
    file: io.BufferedIOBase = io.BytesIO(data)
    if path.suffix == ".gz":
        file = gzip.GzipFile(fileobj=file)
    try:
        shape = _read_shape(file, path, axes, expected, remedy)
        promised = math.prod(shape)
        if promised > MOST_BYTES:
            raise DataError(
                f"{path}: its header promises {_times(shape)} = {promised:,} bytes, expected "
                f"{MOST_BYTES:,} at most; {remedy}"
            )
        # Do not unpack more, as a small file could expand to any size.
        content = file.read(promised + 1)
    except (OSError, EOFError, zlib.error) as failure:
        raise DataError(f"{path}: not a whole gzip file ({failure}); {remedy}") from None
    if len(content) != promised:
        found = f"{len(content):,} bytes" if len(content) < promised else "more bytes"
        raise DataError(
            f"{path}: found {found} after the header, which promises {_times(shape)} = {promised:,}; {remedy}"
        )
    # Copied, as tensors need writable memory; one byte more, as an empty buffer cannot be shared.
    return torch.frombuffer(bytearray(content + b"."), dtype=torch.uint8)[:promised].view(shape)


def _read_shape(
    file: io.BufferedIOBase, path: Path, axes: int, expected: str, remedy: str
) -> tuple[int, ...]:
    magic, header_bytes = _UNSIGNED_BYTE << 8 | axes, 4 + 4 * axes
    header = file.read(header_bytes)
    if len(header) < header_bytes:
        raise DataError(
            f"{path}: found {len(header)} bytes, expected {expected}, whose header alone has {header_bytes}; "
            f"{remedy}"
        )
    found = int.from_bytes(header[:4], "big")
    if found != magic:
        raise DataError(
            f"{path}: found the magic number 0x{found:08x}, expected 0x{magic:08x} ({expected}); {remedy}"
        )
    return struct.unpack_from(f">{axes}I", header, 4)


def _times(shape: tuple[int, ...]) -> str:
    return " x ".join(str(size) for size in shape)
