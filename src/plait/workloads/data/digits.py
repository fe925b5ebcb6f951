"""The handwritten digits that come with scikit-learn: 1,797 images of 8x8."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from plait.core.errors import DataError
from plait.workloads.data.stored import Images, Split

# Relative to scikit-learn's package.
DIGITS_FILE = "datasets/data/digits.csv.gz"


def digits(split: Split) -> Images:
    """1x8x8 images in ten classes: 1,442 to train with and 355 to test with.

    Every fifth image of each class is a test image, so both splits are balanced and fixed.
    """
    rows = _rows()
    labels = rows[:, -1]
    by_class, sizes = np.argsort(labels, kind="stable"), np.bincount(labels)
    within = np.arange(len(labels)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    is_test = np.zeros(len(labels), dtype=bool)
    is_test[by_class[within % 5 == 4]] = True
    chosen = is_test if split == "test" else ~is_test
    pixels = torch.from_numpy(rows[chosen, :-1]).reshape(-1, 1, 8, 8)
    targets = torch.from_numpy(labels[chosen])
    return Images(pixels, targets, classes=10, mean=[0.3053], std=[0.3760], white=16)


def _rows() -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    """One row per image: 64 pixels, then the label."""
    spec = find_spec("sklearn")
    if spec is None or spec.origin is None:
        raise DataError(
            "data.kind: digits come with scikit-learn, which is missing; pip install scikit-learn"
        )
    # Reading the file takes milliseconds; importing scikit-learn would take each worker more than a second.
    file = Path(spec.origin).parent / DIGITS_FILE
    if file.exists():
        return _read(file)
    from sklearn.datasets import load_digits

    loaded = load_digits()
    return np.column_stack([loaded.data, loaded.target]).astype(np.uint8)


@cache
def _read(file: Path) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    """The rows of the file, for both splits."""
    return np.loadtxt(file, delimiter=",", dtype=np.uint8)
