"""What the system refuses, in one message: full disks, folders that nobody may write to, names too long."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from plait.core.errors import NAMED_WRONGLY, InputError, PlaitError
from plait.core.shown import shortened


@contextlib.contextmanager
def os_errors_as_messages() -> Iterator[None]:
    """Turn an OSError within into a message; for code that runs nothing of the user's in this process."""
    try:
        yield
    except BrokenPipeError:
        raise  # the reader of our output has gone; the command line's own library knows what to do
    except OSError as failure:
        raise _told(failure) from failure


def _told(failure: OSError) -> PlaitError:
    paths = [shortened(str(path), 200) for path in (failure.filename, failure.filename2) if path is not None]
    reason = failure.strerror or f"{type(failure).__name__}: {shortened(str(failure), 300)}"
    message = f"{' to '.join(paths)}: {reason}" if paths else reason
    if failure.errno in NAMED_WRONGLY:
        return InputError(f"{message}; name another place")
    if failure.errno in (errno.ENOSPC, errno.EDQUOT):
        message += "; make room, then go on with --resume"
    return PlaitError(message)
