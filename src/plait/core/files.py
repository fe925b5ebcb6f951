"""Files that are whole or absent: write aside, flush to disk, rename."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

from plait.core.errors import DiskError


def write_atomic(path: Path, data: bytes | str, private: bool = False) -> None:
    """Put `data` at `path` so that a reader, or a crash, never meets half of it.

    With `private` only its owner may read it. DiskError where the disk does not take it.
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f".{path.name}.{os.getpid()}.{uuid.uuid4().hex[:8]}")
        try:
            with aside.open("wb") as file:
                if private:
                    os.fchmod(file.fileno(), 0o600)
                file.write(data.encode() if isinstance(data, str) else data)
                file.flush()
                os.fsync(file.fileno())
            aside.replace(path)
        finally:
            with contextlib.suppress(OSError):
                aside.unlink(missing_ok=True)
        sync_folder(path.parent)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Whatever keeps what is done inside from being written to `path` is told in one sentence."""
    try:
        yield
    except OSError as failure:
        raise DiskError(path, failure) from failure


def sync_folder(folder: Path) -> None:
    """Make renames inside `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
