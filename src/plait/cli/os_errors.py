"""Errors of the operating system as one message: full disks, folders without permission, long names."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from plait.core.errors import WRONG_PATH_ERRNOS, InputError, PlaitError
from plait.core.shown import shortened


@contextlib.contextmanager
def os_errors_as_messages() -> Iterator[None]:
    """Turn an OSError within the block into a PlaitError; for blocks that run no code of the user."""
    try:
        yield
    except BrokenPipeError:
        raise  # the reader of our output is gone; handled by `main`
    except OSError as failure:
        raise _as_plait_error(failure) from failure


def _as_plait_error(failure: OSError) -> PlaitError:
    paths = [shortened(str(path), 200) for path in (failure.filename, failure.filename2) if path is not None]
    reason = failure.strerror or f"{type(failure).__name__}: {shortened(str(failure), 300)}"
    message = f"{' to '.join(paths)}: {reason}" if paths else reason
    if failure.errno in WRONG_PATH_ERRNOS:
        return InputError(f"{message}; name another place")
    if failure.errno in (errno.ENOSPC, errno.EDQUOT):
        message += "; make room, then go on with --resume"
    return PlaitError(message)
