"""The errors that a person sees. Each says what was found, what was expected and what to try."""

from __future__ import annotations

import enum
import errno
from pathlib import Path


class PlaitError(Exception):
    """Plait cannot go on, and the message says why in the user's words.

    `exit_status` is what the command line ends with: 1 for a run that failed. `everywhere` says that the
    cause holds for every worker of the run, such as wrong input or a full disk, and not for one alone.
    """

    exit_status = 1
    everywhere = True


class InputError(PlaitError):
    """What the user gave cannot be used as it is; nothing was started."""

    exit_status = 2


class PlanError(InputError):
    """No plan can be made of what was given; the message says what would have to change."""


class JobError(InputError):
    """A job file, or a value set over it, is wrong."""


class DataError(InputError):
    """A data set's file is missing, broken or of another format."""


class ArtefactError(InputError):
    """A saved profile, plan or other artefact cannot be read."""


class CheckpointError(InputError):
    """A checkpoint is incomplete, damaged, or belongs to another model."""


class LaunchError(PlaitError):
    """The workers could not be started, or ended before the job did."""


# The path that was named cannot be used, whatever a run would do.
NAMED_WRONGLY = (
    errno.EACCES,
    errno.EEXIST,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EPERM,
    errno.EROFS,
)


class DiskError(PlaitError):
    """A file could not be written: the disk is full, or its folder may not be written to."""

    def __init__(self, path: Path, reason: OSError) -> None:
        self.errno = reason.errno
        if reason.errno in NAMED_WRONGLY:
            self.exit_status = InputError.exit_status
        remedy = _REMEDY.get(reason.errno or 0, "")
        super().__init__(f"{path}: cannot be written: {reason.strerror or reason}{remedy}")


_REMEDY = {
    errno.ENOSPC: "; free some space and go on with --resume",
    errno.EDQUOT: "; free some of your quota and go on with --resume",
    **dict.fromkeys(NAMED_WRONGLY, "; name another place"),
}


class LostPeer(enum.Enum):
    """How another worker is missed."""

    GONE = "gone"
    SILENT = "silent"


class PeerError(PlaitError, RuntimeError):
    """Another worker is missed: how, and its rank where that is known.

    The worker that raises it has not failed itself: the cause lies with the other one.
    """

    everywhere = False

    def __init__(self, message: str, kind: LostPeer, peer: int | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.peer = peer
