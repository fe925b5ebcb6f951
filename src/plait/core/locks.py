"""Locks on files that end with their process, and that others can look at without taking them."""

from __future__ import annotations

import fcntl
import struct
from typing import IO

# struct flock of 64-bit Linux: type, from where, start, length, process.
_FLOCK = struct.Struct("hh4xqqi4x")
_QUERIES = hasattr(fcntl, "F_OFD_GETLK")


def acquire(file: IO[str]) -> bool:
    """Hold `file` as long as it is open; False where someone else does."""
    try:
        if _QUERIES:
            fcntl.fcntl(file, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, 0, 0, 0, 0))
        else:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def is_held(file: IO[str]) -> bool:
    """Whether someone holds `file`."""
    if _QUERIES:
        found = fcntl.fcntl(file, fcntl.F_OFD_GETLK, _FLOCK.pack(fcntl.F_WRLCK, 0, 0, 0, 0))
        return bool(_FLOCK.unpack(found)[0] != fcntl.F_UNLCK)
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    return False
