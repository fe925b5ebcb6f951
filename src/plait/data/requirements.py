"""Requirements of a data set on the run and on the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from plait.core.errors import ChangedDataError, DataError, JobError
from plait.core.names import parameters_of
from plait.data.batches import DataSource
from plait.schema.settings import DataSettings, TrainSettings
from plait.workloads.language.carried_state import CarriedState


def streams_of(dataset: Any) -> int | None:
    """The number of streams of a set whose samples continue from batch to batch; else None."""
    streams = getattr(dataset, "streams", None)
    return streams if isinstance(streams, int) else None


def check_continued(settings: TrainSettings, dataset: Any, model: nn.Module) -> None:
    """Raise if batches would not continue the previous ones although model or data require it."""
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
    """Raise for settings that change the batches or workers of a run whose samples continue each other."""
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
    """Raise if the data has more tokens than the model's vocabulary, if both are known.

    A set that reads its tokens later (`limit_tokens`) gets the model's number.
    """
    tokens = getattr(dataset, "vocabulary", None)
    key, known = _known_tokens(settings, factory, model)
    limit = getattr(dataset, "limit_tokens", None)
    if limit is not None and isinstance(known, int):
        limit(known)
    if isinstance(tokens, int) and isinstance(known, int) and known < tokens:
        found = f"{key}: found {known:,}, but the data of {settings.data.kind} has {tokens:,} tokens"
        if settings.model.args.get("path") is not None:
            raise JobError(f"{found}; the model in model_args.path has these sizes: use data of its tokens")
        raise JobError(f"{found}; set {key} to {tokens}, or let the data have fewer")


def check_length(
    settings: TrainSettings, factory: Callable[..., Any], model: nn.Module, dataset: Any
) -> None:
    """Raise for samples of more tokens than a transformers model has position embeddings."""
    config = getattr(model, "config", None)
    positions = getattr(config, "max_position_embeddings", None)
    shape: tuple[int, ...] = getattr(dataset, "input_shape", ())
    if not hasattr(dataset, "vocabulary") or len(shape) != 1 or not isinstance(positions, int):
        return
    # Rotary and relative positions have no weights, and support any length.
    tables = {m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)}
    if shape[0] > positions and positions in tables - {getattr(config, "vocab_size", None)}:
        names = parameters_of(factory)
        key = "model_args.context" if "context" in names else "model_args.config.max_position_embeddings"
        raise JobError(
            f"data.length: found samples of {shape[0]:,} tokens in {settings.data.kind}, but the model has "
            f"{positions:,} places; shorten data.length, or raise {key}"
        )


def _known_tokens(settings: TrainSettings, factory: Callable[..., Any], model: nn.Module) -> tuple[str, Any]:
    """The key with the model's vocabulary size, and the size: from its arguments, or its configuration."""
    parameter = parameters_of(factory).get("vocabulary")
    if parameter is not None:
        return "model_args.vocabulary", settings.model.args.get("vocabulary", parameter.default)
    vocab_size = getattr(getattr(model, "config", None), "vocab_size", None)
    return "model_args.config.vocab_size", vocab_size


def order_id(dataset: Any, settings: TrainSettings) -> str | None:
    """What the data set's own shuffled order depends on besides the seed; None without such an order."""
    if not settings.data.shuffle or not hasattr(dataset, "epoch_order"):
        return None
    options = {"batch_size": settings.data.batch_size, **getattr(dataset, "order_options", {})}
    return ", ".join(f"data.{name} {value}" for name, value in options.items())


def data_progress(source: DataSource, settings: TrainSettings) -> dict[str, Any]:
    """What a checkpoint says of the training split, for `check_continues`."""
    return {
        "shuffle": settings.data.shuffle,
        "samples": source.length,
        "order": order_id(source.dataset, settings),
        "fingerprint": fingerprint_of(source.dataset),
    }


def check_continues(
    progress: Mapping[str, Any], in_epoch: bool, source: DataSource, settings: TrainSettings
) -> None:
    """Refuse to go on from a checkpoint with other data; in the middle of an epoch, in another order too."""
    check_same_data(progress, source.dataset, settings.data)
    if not in_epoch:
        return
    now = {"seed": settings.seed, "data.shuffle": settings.data.shuffle, "samples": source.length}
    for key, value in now.items():
        before = progress.get(key.rpartition(".")[2], value)
        if before != value:
            raise ChangedDataError(
                f"{key}: found {value!r}{_of_file(settings.data)}, but the run was trained with {before!r}, "
                f"and it is in the middle of an epoch: samples would be repeated and left out; resume with "
                f"{before!r}, or start a new run"
            )
    order, other = progress.get("order"), order_id(source.dataset, settings)
    if order is not None and other is not None and order != other:
        raise ChangedDataError(
            f"data: found {other}, but the run was trained with {order}, by which {settings.data.kind} "
            f"orders its samples, and it is in the middle of an epoch; resume with these, or start a new run"
        )


def _of_file(data: DataSettings) -> str:
    return f" in {data.options['path']}" if "path" in data.options else ""


def fingerprint_of(dataset: Any) -> str | None:
    """The result of the data set's `fingerprint()`; None if it has none."""
    method = getattr(dataset, "fingerprint", None)
    fingerprint = method() if callable(method) else None
    if fingerprint is not None and not isinstance(fingerprint, str):
        raise DataError(f"data.kind: fingerprint() returned {fingerprint!r}, expected text, or None")
    return fingerprint


def check_same_data(progress: Mapping[str, Any], dataset: Any, data: DataSettings) -> None:
    """Raise for a checkpoint that was trained on data whose numbers have another meaning."""
    # Older checkpoints have the fingerprint of a vocabulary under that name.
    before, now = progress.get("fingerprint", progress.get("vocabulary")), fingerprint_of(dataset)
    if before is not None and now is not None and before != now:
        where, kind = data.options.get("path", "data.kind"), data.kind
        raise ChangedDataError(
            f"{where}: the data of {kind} is not what the checkpoint was trained with (its fingerprint is "
            f"{now}, expected {before}): tokens, say, would have other meanings; put the files of that run "
            f"back, such as its text or vocabulary, or start a new run"
        )
