"""What a data set asks of the run that reads it and of the model that gets its samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from plait.core.errors import DataError, JobError
from plait.core.names import parameters_of
from plait.schema.settings import DataSettings, TrainSettings
from plait.workloads.language.carried_state import CarriedState


def streams_of(dataset: Any) -> int | None:
    """How many streams a set holds whose samples continue each other from batch to batch; else None."""
    found = getattr(dataset, "streams", None)
    return found if isinstance(found, int) else None


def check_continued(settings: TrainSettings, dataset: Any, model: nn.Module) -> None:
    """Refuse settings under which a batch would not continue the one before, where model or data want it."""
    streams = streams_of(dataset)
    carried = [module.streams for module in model.modules() if isinstance(module, CarriedState)]
    if streams is None:
        if carried:
            raise JobError(
                f"data.kind: found {settings.data.kind}, but {settings.model.factory} carries its state from "
                f"batch to batch; use kind: continued-text, whose batches continue each other"
            )
        return
    _check_batches(settings, streams)
    _check_workers(settings)
    if carried and carried[0] != streams:
        raise JobError(
            f"model_args.streams: found {carried[0]}, but data.streams is {streams}; set both, and "
            f"data.batch_size, to the same number"
        )


def check_unchanged(settings: TrainSettings, dataset: Any, elastic: bool) -> None:
    """Refuse what would change the batches or the workers of a run whose samples continue each other."""
    policies = [policy.kind for policy in settings.adapt if policy.kind != "topology"]
    if streams_of(dataset) is None or not (elastic or policies):
        return
    key = "parallel.elastic: found true" if elastic else f"adapt: found {', '.join(policies)}"
    raise JobError(
        f"{key}, but the samples of {settings.data.kind} continue those of the batch before, so its batches "
        f"and workers stay as they are; leave it out"
    )


def _check_batches(settings: TrainSettings, streams: int) -> None:
    data = settings.data
    if data.shuffle:
        raise JobError(
            f"data.shuffle: found true, but the samples of {data.kind} continue those of the batch before; "
            f"set shuffle: false"
        )
    sizes = {"data.batch_size": data.batch_size, "evaluate.batch_size": settings.evaluate.batch_size}
    for key, size in sizes.items():
        if size is not None and size != streams:
            raise JobError(
                f"{key}: found {size}, but {data.kind} has {streams} streams, each of which every batch "
                f"continues; set both to the same number"
            )


def _check_workers(settings: TrainSettings) -> None:
    kind = settings.data.kind
    if settings.sync.kind != "all-reduce":
        raise JobError(
            f"parallel.sync: found {settings.sync.kind!r}, but the samples of {kind} continue those of the "
            f"batch before, which the same worker must have had; use sync: all-reduce"
        )
    if not settings.in_stages:
        return
    replicas = max(stage.replicas for stage in settings.stages.plan.stages)
    if replicas > 1:
        raise JobError(
            f"parallel.plan: found a stage with {replicas} replicas, but the samples of {kind} continue "
            f"those of the batch before, which the same worker must have had; plan one worker a stage "
            f"(plait plan --straight), or use plan: data-parallel"
        )


def check_vocabulary(
    settings: TrainSettings, factory: Callable[..., Any], model: nn.Module, dataset: Any
) -> None:
    """Refuse data with more tokens than the model knows, if both say how many.

    A set that reads its tokens later (`limit_tokens`) gets the number that the model knows.
    """
    tokens = getattr(dataset, "vocabulary", None)
    key, known = _known_tokens(settings, factory, model)
    limit = getattr(dataset, "limit_tokens", None)
    if limit is not None and isinstance(known, int):
        limit(known)
    if isinstance(tokens, int) and isinstance(known, int) and known < tokens:
        raise JobError(
            f"{key}: found {known:,}, but the data of {settings.data.kind} has {tokens:,} tokens; set {key} "
            f"to {tokens}, or let the data have fewer"
        )


def check_length(
    settings: TrainSettings, factory: Callable[..., Any], model: nn.Module, dataset: Any
) -> None:
    """Refuse samples of more tokens than a model of transformers has embeddings of places for."""
    config = getattr(model, "config", None)
    places = getattr(config, "max_position_embeddings", None)
    shape: tuple[int, ...] = getattr(dataset, "input_shape", ())
    if not hasattr(dataset, "vocabulary") or len(shape) != 1 or not isinstance(places, int):
        return
    # Rotary and relative places have no weights, and take any length.
    tables = {m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)}
    if shape[0] > places and places in tables - {getattr(config, "vocab_size", None)}:
        names = parameters_of(factory)
        key = "model_args.context" if "context" in names else "model_args.config.max_position_embeddings"
        raise JobError(
            f"data.length: found samples of {shape[0]:,} tokens in {settings.data.kind}, but the model has "
            f"{places:,} places; shorten data.length, or raise {key}"
        )


def _known_tokens(settings: TrainSettings, factory: Callable[..., Any], model: nn.Module) -> tuple[str, Any]:
    """Where the model says how many tokens it knows, and how many: its arguments, or its configuration."""
    parameter = parameters_of(factory).get("vocabulary")
    if parameter is not None:
        return "model_args.vocabulary", settings.model.args.get("vocabulary", parameter.default)
    own = getattr(getattr(model, "config", None), "vocab_size", None)
    return "model_args.config.vocab_size", own


def order_id(dataset: Any, settings: TrainSettings) -> str | None:
    """What the shuffled order of a set that has its own depends on besides the seed; else None."""
    lanes = getattr(dataset, "lanes", None)
    if not settings.data.shuffle or not hasattr(dataset, "epoch_order"):
        return None
    return f"data.batch_size {settings.data.batch_size}, data.lanes {lanes}"


def check_same_order(progress: Mapping[str, Any], dataset: Any, settings: TrainSettings) -> None:
    """Refuse to go on in the middle of an epoch whose own order would be another."""
    before, now = progress.get("order"), order_id(dataset, settings)
    if before is not None and now is not None and before != now:
        raise JobError(
            f"data: found {now}, but the run was trained with {before}, by which {settings.data.kind} orders "
            f"its samples, and it is in the middle of an epoch; resume with these, or start a new run"
        )


def fingerprint_of(dataset: Any) -> str | None:
    """What a data set says identifies it, by its `fingerprint()`; None where it has none."""
    own = getattr(dataset, "fingerprint", None)
    found = own() if callable(own) else None
    if found is not None and not isinstance(found, str):
        raise DataError(f"data.kind: fingerprint() returned {found!r}, expected text, or None")
    return found


def check_same_data(progress: Mapping[str, Any], dataset: Any, data: DataSettings) -> None:
    """Refuse a checkpoint whose model learnt from data in which the same numbers mean something else."""
    # Checkpoints had the fingerprint of a vocabulary under that name before.
    before, now = progress.get("fingerprint", progress.get("vocabulary")), fingerprint_of(dataset)
    if before is not None and now is not None and before != now:
        where, kind = data.options.get("path", "data.kind"), data.kind
        raise DataError(
            f"{where}: the data of {kind} is not what the checkpoint was trained with (its fingerprint is "
            f"{now}, expected {before}): tokens, say, would have other meanings; put the files of that run "
            f"back, such as its text or vocabulary, or start a new run"
        )
