"""Atomic writes (temporary file, fsync, rename), and reading files that the user names."""

from __future__ import annotations

import contextlib
import io
import os
import re
import stat
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from plait.core.errors import DiskError, InputError
from plait.core.shown import shortened
from plait.core.units import show_bytes

_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)\}|([A-Za-z_]\w*))")


def expand_path(text: str, key: str = "", error: type[InputError] = InputError) -> str:
    """`text` with `~` and `$VARIABLES` expanded; `error` if a variable is not set.

    `key` is the key of the path in the job, for error messages.
    """
    where = f"{key}: found {shortened(text)!r}" if key else f"found {shortened(text)!r}"
    for braced, plain in _VARIABLE.findall(text):
        if (braced or plain) not in os.environ:
            raise error(f"{where}, but the variable {braced or plain} is not set")
    expanded = os.path.expanduser(_VARIABLE.sub(lambda match: os.environ[match[1] or match[2]], text))
    if expanded.startswith("~") and text.startswith("~"):
        raise error(f"{where}, but there is no user {shortened(expanded[1:].partition('/')[0])!r}")
    return expanded


def write_atomic(path: Path, data: bytes | str, private: bool = False) -> None:
    """Write `data` to `path` atomically: readers see all of it or the old file, also after a crash.

    For Plait's own files: a link at `path` is replaced, not followed. With `private` only the owner can read
    it. DiskError if it cannot be written.
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.{uuid.uuid4().hex[:8]}")
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o666)
            with os.fdopen(descriptor, "wb") as file:
                file.write(_as_bytes(data))
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
        sync_folder(path.parent)


def write_output(path: Path, data: bytes | str) -> None:
    """Write `data` to a path that the user named; a link is followed.

    A file is replaced atomically. A device, a pipe, or a path of this process's standard output is written to
    instead.
    """
    with writing(path):
        there = path.stat() if path.exists() else None
        stream = None if there is None else _standard_stream(there)
        if stream is None and (there is None or stat.S_ISREG(there.st_mode)):
            write_atomic(Path(os.path.realpath(path)), data)
            return
        if stream is not None:
            stream.flush()
        descriptor = os.open(path, os.O_WRONLY) if stream is None else os.dup(stream.fileno())
        with os.fdopen(descriptor, "wb") as file:
            file.write(_as_bytes(data))


def write_picture(path: Path, figure: Any, **options: Any) -> None:
    """Write a matplotlib figure as a PNG to a path that the user named."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png", **options)
    write_output(path, picture.getvalue())


def _standard_stream(there: os.stat_result) -> IO[str] | None:
    """Standard output or error, if it is the file that `there` describes; else None."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # it is closed, or no file
            if os.path.samestat(os.fstat(stream.fileno()), there):
                return stream
    return None


def _as_bytes(data: bytes | str) -> bytes:
    return data.encode() if isinstance(data, str) else data


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError within the block into a DiskError that names `path`."""
    try:
        yield
    except BrokenPipeError:
        raise  # the reader of a pipe has read enough
    except OSError as failure:
        raise DiskError(path, failure) from failure


def sync_folder(folder: Path) -> None:
    """Make renames inside `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_text(path: Path, expected: str, most_bytes: int, error: type[InputError] = InputError) -> str:
    """The text of a file that the user named; `expected` describes it in error messages.

    At most `most_bytes` are read, so that a device or a file of another kind takes neither memory nor time.
    """
    name = shortened(str(path), 300)
    try:
        with path.open("rb") as file:
            data = file.read(most_bytes + 1)
    except FileNotFoundError:
        raise error(f"{name}: no such file; expected {expected}") from None
    except OSError as failure:
        raise error(f"{name}: cannot be read: {failure.strerror or failure}; expected {expected}") from None
    except ValueError:  # a NUL in its name
        raise error(f"{name!r}: no file can have this name; expected {expected}") from None
    if len(data) > most_bytes:
        raise error(f"{name}: larger than {show_bytes(most_bytes)}; expected {expected}")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise error(f"{name}: not a text file; expected {expected}") from None
