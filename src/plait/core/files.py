"""Files that are whole or absent: write aside, flush to disk, rename; and reading what people hand us."""

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
    """`text` with the home folder in place of `~` and the values of `$VARIABLES`; others are refused.

    `key` is where the path was written, so that the message can name it.
    """
    where = f"{key}: found {shortened(text)!r}" if key else f"found {shortened(text)!r}"
    for braced, plain in _VARIABLE.findall(text):
        if (braced or plain) not in os.environ:
            raise error(f"{where}, but the variable {braced or plain} is not set")
    found = os.path.expanduser(_VARIABLE.sub(lambda match: os.environ[match[1] or match[2]], text))
    if found.startswith("~") and text.startswith("~"):
        raise error(f"{where}, but there is no user {shortened(found[1:].partition('/')[0])!r}")
    return found


def write_atomic(path: Path, data: bytes | str, private: bool = False) -> None:
    """Put `data` at `path` so that a reader, or a crash, never meets half of it.

    For files of Plait's own: a link at `path` is replaced, not followed. With `private` nobody but its owner
    can ever read it. DiskError where the disk does not take it.
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f".{path.name}.{os.getpid()}.{uuid.uuid4().hex[:8]}")
        try:
            descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o666)
            with os.fdopen(descriptor, "wb") as file:
                file.write(_as_bytes(data))
                file.flush()
                os.fsync(file.fileno())
            aside.replace(path)
        finally:
            with contextlib.suppress(OSError):
                aside.unlink(missing_ok=True)
        sync_folder(path.parent)


def write_output(path: Path, data: bytes | str) -> None:
    """Put `data` where a person asked for it; a link is followed.

    A file is replaced whole. What is no file cannot be replaced and is written to: a device, a pipe, or this
    process's own standard output under whatever name.
    """
    with writing(path):
        there = path.stat() if path.exists() else None
        own = None if there is None else _own_stream(there)
        if own is None and (there is None or stat.S_ISREG(there.st_mode)):
            write_atomic(Path(os.path.realpath(path)), data)
            return
        if own is not None:
            own.flush()
        descriptor = os.open(path, os.O_WRONLY) if own is None else os.dup(own.fileno())
        with os.fdopen(descriptor, "wb") as file:
            file.write(_as_bytes(data))


def write_picture(path: Path, figure: Any, **options: Any) -> None:
    """Put a figure of matplotlib's, as a PNG, where a person asked for it."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png", **options)
    write_output(path, picture.getvalue())


def _own_stream(there: os.stat_result) -> IO[str] | None:
    """Standard output or error, where it is the file that `there` describes."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # it is closed, or no file
            if os.path.samestat(os.fstat(stream.fileno()), there):
                return stream
    return None


def _as_bytes(data: bytes | str) -> bytes:
    return data.encode() if isinstance(data, str) else data


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an error of writing to `path` within into a message of one sentence."""
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


def read_text(path: Path, expected: str, most_bytes: int, error: type[InputError] = InputError) -> str:
    """The text in `path`, which was given by a person; `expected` says what it should be, in messages.

    At most `most_bytes` are read, so that a device or another kind of file takes neither memory nor time.
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
