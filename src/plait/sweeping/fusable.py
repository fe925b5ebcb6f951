"""Errors and reasons for trials that cannot be trained fused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import nn

from plait.core.errors import ChangedDataError, DiskError, LaunchError, PeerError, PlaitError
from plait.data.loader_processes import LoaderError
from plait.fusion.check import check_models
from plait.fusion.errors import FusionError
from plait.fusion.optim.optimizer_kinds import KINDS
from plait.launcher.workers.worker_failure import is_out_of_memory
from plait.schema.settings import TrainSettings

# A sentence in a table or on a terminal.
LONGEST = 500


class NotFusedError(Exception):
    """Trials that were to train fused cannot; `str` says why."""


class TooWideError(NotFusedError):
    """There is not enough memory for an array of this width."""


class TrialsFailedError(Exception):
    """Some trials fail even alone: `reasons` by trial number. The others can continue."""

    def __init__(self, reasons: Mapping[int, str]) -> None:
        super().__init__(", ".join(f"trial {number} failed: {why}" for number, why in reasons.items()))
        self.reasons = reasons


@contextmanager
def fused_work() -> Iterator[None]:
    """Turn failures in the body into NotFusedError, after which trials can be trained one by one.

    An error that is no refusal of fusion's may be the model's own: trained alone, it is raised again.
    """
    try:
        yield
    except (NotFusedError, TrialsFailedError):
        raise
    except PlaitError as failure:
        if not isinstance(failure, FusionError):
            raise
        raise NotFusedError(short(str(failure))) from failure
    except Exception as failure:
        message = short(f"a fused step failed with {type(failure).__name__}: {failure}")
        raise (TooWideError if is_out_of_memory(failure) else NotFusedError)(message) from failure


# What is no fault of a trial: another worker, the disk, a process that loads data, files that have changed
# since it began, the end of the sweep.
_NOT_OF_A_TRIAL = (PeerError, DiskError, LoaderError, ChangedDataError, LaunchError)


def why_failed(failure: Exception) -> str | None:
    """Why a trial that was by itself cannot go on; None where that is not the trial's own failure."""
    if isinstance(failure, _NOT_OF_A_TRIAL):
        return None
    message = str(failure) if isinstance(failure, PlaitError) else f"{type(failure).__name__}: {failure}"
    return short(message)


def short(text: str) -> str:
    """`text` on one line."""
    line = " ".join(text.split())
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 3]}..."


def why_optimizer(settings: TrainSettings) -> str | None:
    """What of the optimizer has no fused form; None where all of it has."""
    kind = KINDS.get(settings.optimizer.kind)
    if kind is None:
        return f"optimizer.kind {settings.optimizer.kind!r} has no fused form"
    # How torch computes a step, not what.
    known = {*kind.torch_names(), *kind.common, "foreach", "fused", "capturable"}
    every = [settings.optimizer.options, *(group.options for group in settings.optimizer.groups)]
    unknown = next((name for options in every for name in options if name not in known), None)
    return None if unknown is None else f"optimizer.{unknown} has no fused form"


def split_by_kind(models: Sequence[nn.Module]) -> tuple[list[int], str]:
    """The numbers of the models that cannot be fused with the first, and why the first of them cannot."""
    others, why = [], ""
    for number, model in enumerate(models[1:], 1):
        try:
            check_models([models[0], model])
        except FusionError as failure:
            others.append(number)
            why = why or short(str(failure))
    return others, why
