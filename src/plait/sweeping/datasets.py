"""The data sets of a sweep, each read once a worker."""

from __future__ import annotations

import json

from plait.core.codec import encode
from plait.core.errors import JobError
from plait.schema.settings import DataSettings, TrainSettings
from plait.training import components
from plait.training.components import DataPair
from plait.workloads.losses import MODEL_LOSS


class DataSets:
    """Training and test split for settings; trials that differ in how they draw batches share them."""

    def __init__(self) -> None:
        self._read: dict[str, DataPair] = {}

    def of(self, settings: TrainSettings) -> DataPair:
        data = settings.data
        own_loss = settings.loss == MODEL_LOSS
        key = json.dumps([data.kind, encode(data.options), data.collate_fn, own_loss], sort_keys=True)
        if key not in self._read:
            sets = components.build_train_data(settings), components.build_data(settings, "test")
            if any(source is not None and source.is_stream for source in sets):
                raise JobError(_refusal(data.kind))
            self._read[key] = sets
        return self._read[key]


def check_data(settings: DataSettings) -> None:
    """Refuse a class of streams, before anything starts; others are found out when they are built."""
    if components.makes_stream(settings):
        raise JobError(_refusal(settings.kind))


def _refusal(kind: str) -> str:
    return (
        f"data.kind: {kind} is a stream, and the trials of a sweep read samples by index, each from where it "
        f"is; use a map-style data set (__len__ and __getitem__), or plait train for one run at a time"
    )
