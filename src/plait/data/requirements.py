"""What a data set asks of the run that reads it and of the model that gets its samples."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from plait.core.errors import DataError, JobError
from plait.schema.settings import TrainSettings


def check_vocabulary(settings: TrainSettings, factory: Callable[..., Any], dataset: Any) -> None:
    """Refuse data with more tokens than the model knows, where both tell how many."""
    tokens = getattr(dataset, "vocabulary", None)
    parameter = inspect.signature(factory).parameters.get("vocabulary")
    known = settings.model.args.get("vocabulary", None if parameter is None else parameter.default)
    if isinstance(tokens, int) and isinstance(known, int) and known < tokens:
        raise JobError(
            f"model_args.vocabulary: found {known:,}, but the data of {settings.data.kind} has {tokens:,} "
            f"tokens; set model_args.vocabulary to {tokens}, or let data have fewer"
        )


def vocabulary_id(dataset: Any) -> str | None:
    """What tells one vocabulary from another, of a set that has one."""
    found = getattr(dataset, "vocabulary_id", None)
    return found if isinstance(found, str) else None


def check_same_vocabulary(progress: Mapping[str, Any], dataset: Any, kind: str) -> None:
    """Refuse a checkpoint whose model learnt other meanings of the numbers that tokens have."""
    before, now = progress.get("vocabulary"), vocabulary_id(dataset)
    if before is not None and now is not None and before != now:
        raise DataError(
            f"data.kind: the vocabulary of {kind} is not the one that the checkpoint was trained with (its "
            f"fingerprint is {now}, expected {before}): every token would mean another; put the text or "
            f"vocabulary file of that run back, or start a new run"
        )
