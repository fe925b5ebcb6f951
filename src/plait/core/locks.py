"""File locks that are released when their process ends, and that can be tested without acquiring them."""

from __future__ import annotations

import fcntl
import struct
from typing import IO

# struct flock of 64-bit Linux: type, from where, start, length, process.
_FLOCK = struct.Struct("hh4xqqi4x")
_QUERIES = hasattr(fcntl, "F_OFD_GETLK")


def acquire(file: IO[str]) -> bool:
    """Lock `file` as long as it is open; False if another process has locked it."""
    try:
        if _QUERIES:
            fcntl.fcntl(file, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, 0, 0, 0, 0))
        else:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def is_held(file: IO[str]) -> bool:
    """Whether `file` is locked."""
    if _QUERIES:
        lock = fcntl.fcntl(file, fcntl.F_OFD_GETLK, _FLOCK.pack(fcntl.F_WRLCK, 0, 0, 0, 0))
        return bool(_FLOCK.unpack(lock)[0] != fcntl.F_UNLCK)
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    return False
