"""What the error that ended a worker means: its own fault, or the loss of another worker."""

from __future__ import annotations

import errno
import traceback

import torch

from plait.core.errors import LostPeer, PeerError, PlaitError
from plait.launcher.messages import Failure

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
# Torch has no exception class for a lost peer; only the message tells.
_TORCH_LOSSES = (
    (
        LostPeer.GONE,
        ("Connection closed by peer", "Connection reset", "Broken pipe", "NCCL error"),
        "another worker has closed the connection",
    ),
    (
        LostPeer.SILENT,
        ("Timed out waiting", "timed out", "Timeout"),
        "timed out waiting for another worker: it hangs, or the network between them is cut",
    ),
)
OUT_OF_MEMORY = (
    "out of memory; try a smaller data.batch_size, the same batch in parts (accumulate, or in a pipeline "
    "parallel.microbatches), precision: bf16, or layers spread over several workers (parallel.plan: auto)"
)


def describe_failure(rank: int, host: str, failure: BaseException) -> Failure:
    """The report of a worker that `failure` ended."""
    loss, known = as_loss(failure), isinstance(failure, PlaitError)
    # These messages need no traceback.
    is_clear = known or loss is not None
    summary = str(loss or failure) if is_clear else f"{type(failure).__name__}: {failure}"
    if known:  # otherwise the traceback has the notes
        summary = "\n".join([summary, *getattr(failure, "__notes__", ())])
    if is_out_of_memory(failure):
        summary = f"{summary}\n{OUT_OF_MEMORY}"
    is_disk_error = isinstance(failure, OSError) and failure.errno in DISK_ERRORS
    return Failure(
        rank=rank,
        host=host,
        summary=summary,
        traceback="" if is_clear else "".join(traceback.format_exception(failure)),
        exit_status=failure.exit_status if isinstance(failure, PlaitError) else 1,
        lost=None if loss is None else loss.kind,
        peer=None if loss is None else loss.peer,
        everywhere=failure.everywhere if isinstance(failure, PlaitError) else is_disk_error,
    )


def is_out_of_memory(failure: BaseException) -> bool:
    """Whether a device or the host ran out of memory."""
    kinds = (torch.OutOfMemoryError, MemoryError)
    return isinstance(failure, kinds) or "DefaultCPUAllocator" in str(failure)


def as_loss(failure: BaseException) -> PeerError | None:
    """A PeerError without traceback if `failure` only says that a peer was lost, else None.

    A traceback would keep the broken process group alive.
    """
    if isinstance(failure, PeerError):
        return PeerError(str(failure), failure.kind, failure.peer)
    if isinstance(failure, RuntimeError) and not isinstance(failure, PlaitError):
        message = str(failure)
        for kind, signs, meaning in _TORCH_LOSSES:
            if any(sign in message for sign in signs):
                return PeerError(f"{meaning} ({message.strip().splitlines()[0]})", kind)
    return None
