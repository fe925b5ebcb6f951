"""The data sets of a sweep, each read once a worker."""

from __future__ import annotations

import json
from typing import Any

from plait.core.codec import encode
from plait.runtime import build
from plait.runtime.settings import TrainSettings


class DataSets:
    """Training and test split for settings; trials that differ in how they draw batches share them."""

    def __init__(self) -> None:
        self._read: dict[str, tuple[Any, Any]] = {}

    def of(self, settings: TrainSettings) -> tuple[Any, Any]:
        key = json.dumps([settings.data.kind, encode(settings.data.options)], sort_keys=True)
        if key not in self._read:
            self._read[key] = (
                build.build_data(settings.data, "train"),
                build.build_data(settings.data, "test"),
            )
        return self._read[key]
