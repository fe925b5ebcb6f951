"""hdf5 files, read whole or row by row, with errors that name the file and the key."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from plait.core.errors import DataError

if TYPE_CHECKING:
    import h5py

Array = np.ndarray[Any, np.dtype[Any]]


@contextmanager
def open_hdf5(path: Path, expected: str, remedy: str) -> Iterator[h5py.File]:
    """Context with the file open for reading; raises DataError if it is not a complete hdf5 file."""
    try:
        import h5py
    except ImportError:
        raise DataError(f"{path}: hdf5 files need h5py, which is missing; pip install h5py") from None
    if not path.is_file():
        problem = "a folder" if path.is_dir() else "no such file"
        raise DataError(f"{path}: {problem}; expected {expected}; {remedy}")
    try:
        with h5py.File(path, "r") as file:
            yield file
    except (OSError, RuntimeError) as failure:
        raise DataError(
            f"{path}: not a whole hdf5 file ({failure}); expected {expected}; {remedy}"
        ) from failure


def check_keys(path: Path, file: h5py.File, keys: Sequence[str], remedy: str) -> None:
    """Raise DataError if the file lacks one of the arrays `keys`."""
    import h5py

    for key in keys:
        if not isinstance(file.get(key), h5py.Dataset):
            present = ", ".join(sorted(file)) or "nothing"
            raise DataError(
                f"{path}: no array {key!r} in it, found {present}; expected {', '.join(keys)}; {remedy}"
            )
