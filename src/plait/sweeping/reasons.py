"""Why trials of a sweep do not train fused, in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from plait.core.errors import PlaitError
from plait.fusion.check import check_models
from plait.fusion.errors import FusionError
from plait.fusion.optim.updates import KINDS
from plait.schema.settings import TrainSettings

# A sentence in a table or on a terminal.
LONGEST = 500


class NotFusedError(Exception):
    """Trials that were to train fused cannot; `str` says why."""


@contextmanager
def fused_work() -> Iterator[None]:
    """Within, what stops fused trials raises NotFusedError, after which they can be trained one by one.

    An error that is no refusal of fusion's may be the model's own: trained alone, it is raised again.
    """
    try:
        yield
    except (NotFusedError, torch.OutOfMemoryError):
        raise
    except PlaitError as failure:
        if not isinstance(failure, FusionError):
            raise
        raise NotFusedError(short(str(failure))) from failure
    except Exception as failure:
        words = f"a fused step failed with {type(failure).__name__}: {failure}"
        raise NotFusedError(short(words)) from failure


def short(text: str) -> str:
    """`text` on one line."""
    line = " ".join(text.split())
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 3]}..."


def why_optimizer(settings: TrainSettings) -> str | None:
    """What of the optimizer has no fused form; None where all of it has."""
    kind = KINDS.get(settings.optimizer.kind)
    if kind is None:
        return f"optimizer.kind {settings.optimizer.kind!r} has no fused form"
    known = {*kind.hyperparameters, *kind.common, "betas"}
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
