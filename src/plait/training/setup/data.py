"""The data set that the settings of a run name, and what settings it does not support."""

from __future__ import annotations

from typing import Any, cast

from plait.core.errors import DataError, JobError
from plait.core.names import resolve
from plait.data.batches import Collate, DataSource, as_arguments, as_pair
from plait.data.seeding import seed_factory
from plait.schema.settings import DataSettings, TrainSettings
from plait.workloads import data
from plait.workloads.losses import MODEL_LOSS

# The training and the test split.
DataPair = tuple[DataSource, DataSource | None]


def build_data(settings: TrainSettings, split: data.Split) -> DataSource | None:
    """The data set's `train` or `test` split; None where there is no test split."""
    seed_factory(settings.seed)
    data.check(settings.data.kind, settings.data.options)
    seed_factory(settings.seed)
    dataset = data.build(settings.data.kind, split, **settings.data.options)
    return None if dataset is None else as_source(dataset, settings)


def as_source(dataset: Any, settings: TrainSettings) -> DataSource:
    """`dataset` as a split of the job's data."""
    arrange = as_arguments if settings.loss == MODEL_LOSS else as_pair
    return DataSource(dataset, find_collate_fn(settings.data), arrange)


def build_train_data(settings: TrainSettings) -> DataSource:
    """The data set's training split."""
    return cast("DataSource", build_data(settings, "train"))


def find_collate_fn(settings: DataSettings) -> Collate | None:
    """The function that the job names to make batches of lists of samples."""
    if settings.collate_fn is None:
        return None
    collate: Collate = resolve(settings.collate_fn, "data.collate_fn", DataError)
    if not callable(collate):
        raise DataError(
            f"data.collate_fn: {settings.collate_fn} is {collate!r}, expected a function that takes a list "
            f"of samples and returns a batch"
        )
    return collate


def check_stream(settings: TrainSettings, source: DataSource | None = None) -> None:
    """Refuse settings that a stream of samples does not support; `source` is the stream, if already built."""
    kind = settings.data.kind
    if settings.sync.kind != "all-reduce":
        raise JobError(
            f"parallel.sync: found {settings.sync.kind!r}, but {kind} is a stream, and workers that claim "
            f"shares of batches need samples by index; use sync: all-reduce, or a map-style data set"
        )
    if settings.data.loaders > 1:
        raise JobError(
            f"data.loaders: found {settings.data.loaders}, but {kind} is a stream, which several loader "
            f"processes would each read from its beginning; use loaders: 1 or 0"
        )
    if source is None or settings.epochs is None or source.length is not None:
        return
    unknown = f"but {kind} is a stream without __len__, so the number of steps is unknown"
    if settings.in_stages:
        raise JobError(
            f"epochs: found {settings.epochs}, {unknown}, which the stages of a pipeline need; give "
            f"steps instead, or the data set a __len__"
        )
    if settings.lr_schedule.kind not in ("constant", "step"):
        raise JobError(
            f"lr_schedule.kind: found {settings.lr_schedule.kind!r}, {unknown}; give steps instead of "
            f"epochs, or the data set a __len__"
        )


def check_test_split(settings: TrainSettings) -> None:
    """Refuse settings that need a test split, for data without one."""
    for key, wanted in (
        ("evaluate.every_steps", settings.evaluate.every_steps),
        ("checkpoint.keep_best", settings.checkpoint.keep_best),
        ("early_stop.patience", settings.early_stop and settings.early_stop.patience),
    ):
        if wanted is not None:
            raise JobError(
                f"{key}: found {wanted}, but {settings.data.kind} has no test split (it returned None for "
                f"'test'); leave the key out, or return a data set to evaluate on"
            )
