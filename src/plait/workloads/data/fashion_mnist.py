"""Fashion-MNIST (Xiao et al., 2017), and other data in MNIST's four IDX files."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from plait.core.errors import DataError
from plait.workloads.data.idx import read_idx
from plait.workloads.data.stored import Images, Split

# Where Debian's package dataset-fashion-mnist puts the files.
DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")
_REMEDY = "install Debian's dataset-fashion-mnist, or set data.path to the folder with the four IDX files"
_CLASSES = 10


def fashion_mnist(split: Split, path: Path = DEBIAN_FOLDER) -> Images:
    """1x28x28 images of clothing in ten classes: 60,000 to train with and 10,000 to test with.

    `path` is the folder that holds train-images-idx3-ubyte and its three companions, gzipped or plain.
    """
    prefix = "train" if split == "train" else "t10k"
    image_file = _gzipped_or_plain(path / f"{prefix}-images-idx3-ubyte")
    label_file = _gzipped_or_plain(path / f"{prefix}-labels-idx1-ubyte")
    pixels = read_idx(image_file, axes=3, remedy=_REMEDY)
    labels = read_idx(label_file, axes=1, remedy=_REMEDY)
    _check(image_file, pixels, label_file, labels)
    return Images(pixels.unsqueeze(1), labels, _CLASSES, mean=[0.2860], std=[0.3530])


def _gzipped_or_plain(plain: Path) -> Path:
    return plain if plain.exists() else plain.with_name(plain.name + ".gz")


def _check(image_file: Path, pixels: Tensor, label_file: Path, labels: Tensor) -> None:
    if len(pixels) != len(labels):
        raise DataError(
            f"{label_file}: found {len(labels):,} labels, expected one for each of the {len(pixels):,} "
            f"images in {image_file.name}; {_REMEDY}"
        )
    if len(labels) == 0:
        raise DataError(f"{image_file}: found no images; {_REMEDY}")
    if int(labels.max()) >= _CLASSES:
        raise DataError(
            f"{label_file}: found the label {int(labels.max())}, expected 0 to {_CLASSES - 1}; {_REMEDY}"
        )
