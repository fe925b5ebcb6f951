"""The data sets of a sweep, each read once a worker."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass

from plait.core.codec import encode
from plait.core.errors import JobError
from plait.data.batches import DataSource
from plait.data.generators import looks
from plait.data.sampler import Position
from plait.data.seeding import seed_factory
from plait.schema.settings import TrainSettings
from plait.training.setup.data import DataPair, build_data, build_train_data
from plait.training.trial import total_steps
from plait.workloads.losses import MODEL_LOSS

# An array has trials of one seed; another one may be about to begin.
SEEDS_KEPT = 2


@dataclass(frozen=True)
class DataDescription:
    """What the coordinator needs to know of a data set; `seed` is that of data drawn at random, else None."""

    key: str
    seed: int | None
    # None: a stream without length.
    samples: int | None
    has_test_split: bool


@dataclass(eq=False)
class UnknownDataError(Exception):
    """Raised for the data set of `settings` that no worker has described yet."""

    settings: TrainSettings


class DescribedData:
    """What the coordinator knows of the data sets, which workers describe."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int | None], DataDescription] = {}

    def add(self, data: DataDescription) -> None:
        self._known[data.key, data.seed] = data

    def of(self, settings: TrainSettings) -> DataDescription:
        key = data_key(settings)
        description = self._known.get((key, None)) or self._known.get((key, settings.seed))
        if description is None:
            raise UnknownDataError(settings)
        return description

    def steps_of(self, settings: TrainSettings) -> int:
        """After how many steps a trial with these settings ends."""
        samples = self.of(settings).samples
        if samples is None and settings.steps is None:
            raise JobError(
                f"epochs: found {settings.epochs}, but {settings.data.kind} is a stream without __len__, and "
                f"trials are compared after known numbers of steps; give steps instead, or the data set a "
                f"__len__"
            )
        return total_steps(settings, samples, 0, Position())


class DataSets:
    """Training and test split for settings; trials that differ in how they draw batches share them.

    So do trials of unlike seeds, unless what makes the data set draws at random: then there is one for each
    seed, of which the latest few are kept.
    """

    def __init__(self, check: Callable[[DataPair, int, str], None] = lambda sets, seed, name: None) -> None:
        """`check` is called with the splits when they have been read, the seed, and a name for them."""
        self._check = check
        self._read: dict[str, DataPair] = {}
        self._drawn: dict[str, dict[int, DataPair]] = {}

    def of(self, settings: TrainSettings) -> DataPair:
        key = data_key(settings)
        if key not in self._read and settings.seed not in self._drawn.get(key, {}):
            sets, draws = _build(settings)
            self._check(sets, settings.seed, f"{zlib.crc32(key.encode())}/{settings.seed if draws else None}")
            if not draws:
                self._read[key] = sets
            else:
                of_seeds = self._drawn.setdefault(key, {})
                of_seeds[settings.seed] = sets
                for seed in list(of_seeds)[:-SEEDS_KEPT]:
                    del of_seeds[seed]
        return self._read[key] if key in self._read else self._drawn[key][settings.seed]

    def seed_of(self, settings: TrainSettings) -> int | None:
        """The seed that the data of a trial depends on; None where it depends on none."""
        if data_key(settings) not in self._drawn:
            self.of(settings)
        return settings.seed if data_key(settings) in self._drawn else None

    def describe(self, settings: TrainSettings) -> DataDescription:
        train, test = self.of(settings)
        return DataDescription(data_key(settings), self.seed_of(settings), train.length, test is not None)

    def for_pass(self, settings: TrainSettings) -> DataSource:
        """The training split for one pass over it: a stream holds its position, so each pass has another."""
        train_set, _ = self.of(settings)
        if not train_set.is_stream:
            return train_set
        return build_train_data(settings)


def data_key(settings: TrainSettings) -> str:
    """Names the data set of `settings`, whatever their seed."""
    data, own_loss = settings.data, settings.loss == MODEL_LOSS
    return json.dumps([data.kind, encode(data.options), data.collate_fn, own_loss], sort_keys=True)


def _build(settings: TrainSettings) -> tuple[DataPair, bool]:
    """The two splits, and whether anything was drawn at random to make them."""
    seed_factory(settings.seed)
    before = looks()
    train_set = build_train_data(settings)
    draws = looks() != before
    test_set = build_data(settings, "test")
    return (train_set, test_set), draws or looks() != before
