"""The errors that users see. Each says what was found, what was expected and what to try."""

from __future__ import annotations

import enum
import errno
from pathlib import Path


class PlaitError(Exception):
    """Base of all errors with a message for the user.

    `exit_status` is that of the command line: 1 for a run that failed. `everywhere` says that the cause holds
    for every worker of the run, such as wrong input or a full disk.
    """

    exit_status = 1
    everywhere = True


class InputError(PlaitError):
    """The user's input is wrong; nothing was started."""

    exit_status = 2


class PlanError(InputError):
    """There is no plan for the given model and devices; the message says what to change."""


class JobError(InputError):
    """A job file, or an override of it, is wrong."""


class DataError(InputError):
    """A file of a data set is missing, damaged or of another format."""


class ChangedDataError(DataError, JobError):
    """The data is not what a checkpoint was trained with."""


class ArtefactError(InputError):
    """A saved profile, plan or other artefact cannot be read."""


class CheckpointError(InputError):
    """A checkpoint is incomplete, damaged, or belongs to another model."""


class LaunchError(PlaitError):
    """The workers could not be started, or ended before the job did."""


# Errors of a wrong path rather than of a full or failing disk.
WRONG_PATH_ERRNOS = (
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
        if reason.errno in WRONG_PATH_ERRNOS:
            self.exit_status = InputError.exit_status
        remedy = _REMEDY.get(reason.errno or 0, "")
        super().__init__(f"{path}: cannot be written: {reason.strerror or reason}{remedy}")


_REMEDY = {
    errno.ENOSPC: "; free some space and go on with --resume",
    errno.EDQUOT: "; free some of your quota and go on with --resume",
    **dict.fromkeys(WRONG_PATH_ERRNOS, "; name another place"),
}


class LostPeer(enum.Enum):
    """How another worker was lost: its connection is closed, or it does not answer."""

    GONE = "gone"
    SILENT = "silent"


class PeerError(PlaitError, RuntimeError):
    """Another worker was lost: how, and its rank if known.

    The worker that raises it has not failed itself; the other one is the cause.
    """

    everywhere = False

    def __init__(self, message: str, kind: LostPeer, peer: int | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.peer = peer
