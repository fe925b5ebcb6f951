"""CIFAR-10 and CIFAR-100 (Krizhevsky, 2009) from their binary files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from plait.core.errors import DataError
from plait.workloads.data.files import read_bytes
from plait.workloads.data.stored import Images, ShiftedImages, Split

_PIXEL_BYTES = 3 * 32 * 32


@dataclass(frozen=True)
class _Layout:
    """The file layout of one of the two sets: records of labels, the last of which is used, and pixels."""

    classes: int
    archive: str
    label_bytes: int
    files: dict[Split, tuple[str, ...]]
    records: dict[Split, int]  # in each file
    mean: tuple[float, ...]
    std: tuple[float, ...]


_LAYOUTS = {
    10: _Layout(
        classes=10,
        archive="cifar-10-binary.tar.gz",
        label_bytes=1,
        files={
            "train": tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
            "test": ("test_batch.bin",),
        },
        records={"train": 10_000, "test": 10_000},
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
    ),
    100: _Layout(
        classes=100,
        archive="cifar-100-binary.tar.gz",
        label_bytes=2,
        files={"train": ("train.bin",), "test": ("test.bin",)},
        records={"train": 50_000, "test": 10_000},
        mean=(0.5071, 0.4865, 0.4409),
        std=(0.2673, 0.2564, 0.2762),
    ),
}


def cifar(
    split: Split, path: Path, classes: Literal[10, 100] = 10, augment: bool = False
) -> Images | ShiftedImages:
    """3x32x32 images in 10 or 100 classes: 50,000 to train with and 10,000 to test with.

    `path` is the folder with the binary files. `augment` pads training images by four pixels, crops
    and flips them at random, as He et al. (2015) do.
    """
    layout = _LAYOUTS[classes]
    files = [_records(path / name, layout, layout.records[split]) for name in layout.files[split]]
    records = torch.cat(files)
    labels = records[:, layout.label_bytes - 1]
    pixels = records[:, layout.label_bytes :].reshape(-1, 3, 32, 32)
    images = Images(pixels, labels, classes, layout.mean, layout.std)
    return ShiftedImages(images) if augment and split == "train" else images


def _records(path: Path, layout: _Layout, count: int) -> Tensor:
    record_bytes = layout.label_bytes + _PIXEL_BYTES
    expected = f"{count:,} records of {record_bytes:,} bytes = {count * record_bytes:,} bytes"
    remedy = f"unpack {layout.archive} and set data.path to its folder"
    data = read_bytes(path, expected, remedy)
    if len(data) != count * record_bytes:
        raise DataError(f"{path}: found {len(data):,} bytes, expected {expected}; {remedy}")
    records = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(count, record_bytes)
    labels = records[:, layout.label_bytes - 1]
    if int(labels.max()) >= layout.classes:
        raise DataError(
            f"{path}: found the label {int(labels.max())}, expected 0 to {layout.classes - 1}; {remedy}"
        )
    return records
