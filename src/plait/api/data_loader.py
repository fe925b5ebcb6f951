"""`DataLoader`: each worker's share of each batch, in an order that does not depend on the workers."""

from __future__ import annotations

import contextlib
import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, Never, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import Dataset

from plait.api.loader_checks import (
    check_counts,
    check_dataset,
    check_sampler,
    collate,
    in_words_of_a_loop,
    refuse,
)
from plait.api.step_rules import StepRules
from plait.api.world import World, init
from plait.comm.collectives import all_gather_values
from plait.core.errors import DataError, InputError
from plait.data.batches import DataSource
from plait.data.loader import Batch, load, without_rows
from plait.data.loader_processes import LoaderError
from plait.data.sampler import Position, batches, steps_per_epoch
from plait.data.seeding import keep_random_states, mix, seed_all
from plait.data.streams import StreamOrder, compared, stream_batches


class MapStyle(Protocol):
    """A data set whose samples have numbers."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


_STATE = ("epoch", "sample", "seed", "shuffle", "samples", "stream")


class DataLoader:
    """Iterates over this worker's share of each batch of a data set; each iteration is one epoch.

    It takes the place of torch's DataLoader with a DistributedSampler. The order of the samples depends on
    `seed` and the epoch alone. `batch_size` counts the samples of *all* workers, who share each batch: with 4
    workers and `batch_size=32` each gets 8. So a run trains on the same batches with any number of workers.
    Shares may differ by one sample; `plait.DataParallel` weighs them exactly.

    `state_dict` says how far the loop has come (batches it was given, not those prepared in advance), and
    after `load_state_dict` the next iteration yields the rest of that epoch, with the same or another number
    of workers. `len` counts the batches of a whole epoch.

    Every worker has the whole data set and iterates together with the others.

    Args:
        dataset: a map-style data set, or an iterable one (`shuffle=False`), which every worker reads whole.
        batch_size: samples of a batch over all workers.
        shuffle: draw another order for each epoch.
        seed: what the order, and random numbers that samples draw, depend on besides the epoch. The global
            random number generators of the loop are left as they are.
        drop_last: leave out the last batch of an epoch if it is smaller. Otherwise a worker may have no
            sample of it, and gets tensors of length 0.
        sampler: an order instead of `shuffle`, such as a WeightedRandomSampler; not one that divides samples
            among workers.
        num_workers: processes that load batches in advance; 0 loads them in the loop.
        collate_fn: makes a batch of a list of samples; torch's `default_collate` if None.
        pin_memory: put batches into pinned memory if there is a GPU.
        persistent_workers: keep the loader processes after an epoch, with their copy of the data set.
        world: the workers; those of `plait.init()` if None.

    Examples:
        ```python
        data = torch.utils.data.TensorDataset(torch.arange(10))
        loader = plait.DataLoader(data, batch_size=4)
        [len(numbers) for (numbers,) in loader]  # [4, 4, 2] in one process
        ```
    """

    def __init__(
        self,
        dataset: Dataset[Any] | MapStyle | Iterable[Any],
        batch_size: int,
        shuffle: bool = True,
        *,
        seed: int = 0,
        drop_last: bool = False,
        sampler: Iterable[int] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        persistent_workers: bool = False,
        world: World | None = None,
        **others: Never,
    ) -> None:
        for name in others:
            refuse(name)
        check_counts(batch_size, num_workers, seed)
        check_dataset(dataset)
        check_sampler(sampler)
        self.dataset, self.sampler = dataset, sampler
        self.batch_size, self.shuffle, self.drop_last = batch_size, shuffle, drop_last
        self.num_workers, self.persistent_workers = num_workers, persistent_workers
        self.pin_memory = pin_memory and torch.cuda.is_available()
        self.world = init() if world is None else world
        self._seed = seed
        self._source = DataSource(dataset, collate_fn or collate, lambda batch: batch)
        if self._source.is_stream and (shuffle or sampler is not None):
            given = "shuffle=True" if shuffle else "a sampler"
            raise InputError(
                f"DataLoader: found {given} for a data set that is only iterable, expected shuffle=False: it "
                "is read in its own order; shuffle within the data set"
            )
        if not self._source.is_stream:
            self._check_samples()
        # Where the next iteration begins, and how far the loop has come.
        self._next = self._position = Position()
        self._epoch = 0
        self._empty: Any = None
        self.rules = StepRules()

    @property
    def epoch(self) -> int:
        """The epoch that the loop is in; once its last batch is done, the next one."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Begin the next iteration at the start of `epoch`; a state of that epoch that was loaded is kept."""
        if epoch != self._next.epoch:
            self._go_to(Position(epoch))

    def __len__(self) -> int:
        """The batches of a whole epoch."""
        return steps_per_epoch(self._samples(), self.batch_size, not self.drop_last)

    def state_dict(self) -> dict[str, Any]:
        """How far the loop has come, the batch that it was given last included: the same on all workers."""
        at = self._position
        values = (at.epoch, at.sample, self._seed, self.shuffle, self._source.length, at.stream)
        return dict(zip(_STATE, values))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after the batch at which `state` was saved; all workers load it."""
        if set(state) != set(_STATE):
            raise InputError(
                f"DataLoader: found a state with {', '.join(map(str, state)) or 'nothing'}, expected what "
                f"state_dict of a plait.DataLoader returned: {', '.join(_STATE)}"
            )
        local = {"shuffle": self.shuffle, "samples": self._source.length}
        for name, here in local.items():
            if state["sample"] and state[name] != here:
                raise InputError(
                    f"DataLoader: the state was saved within an epoch with {name}={state[name]}, but here it "
                    f"is {here}: the order would be another; use the same data set and settings, or go on "
                    f"with the next epoch, set_epoch({state['epoch'] + 1})"
                )
        self._seed = state["seed"]
        self._go_to(Position(state["epoch"], state["sample"], state["stream"]))

    def __iter__(self) -> Iterator[Any]:
        start = self._next
        self._go_to(start)
        if self.world.world_size > 1 and self.rules.compares_loaders:
            self.check_alike()
        self._next = Position(start.epoch + 1)
        return self._batches(start)

    def _go_to(self, position: Position) -> None:
        self._next = self._position = position
        self._epoch = position.epoch

    def _batches(self, start: Position) -> Iterator[Any]:
        epoch, shares = start.epoch, self._shares(start)
        try:
            while True:
                if self.rules.change_if_due(at_end=self._position.epoch > epoch):
                    if self.rules.is_at_end:
                        return
                    shares.close()
                    # Workers that were behind may go on in the next epoch.
                    epoch, shares = self._position.epoch, self._shares(self._position)
                    self._next, self._epoch = Position(epoch + 1), epoch
                try:
                    batch = self._next_share(shares)
                except RuntimeError as failure:
                    if not self.rules.lose(failure):
                        raise
                    continue
                if batch is None:
                    break
                self.rules.begin()
                self._position = Position(batch.epoch + 1) if batch.last else batch.after
                self.world.batch = batch.count, batch.total
                yield self._content(batch)
        finally:
            shares.close()
            if not self.persistent_workers:
                self._source.idle_loaders.clear()
        if self._next.epoch == epoch + 1:
            self._epoch = epoch + 1

    def _next_share(self, shares: Iterator[Batch]) -> Batch | None:
        try:
            # The generators of the loop stay as they are; reading by number keeps those of the CPU itself.
            may_change = self._source.is_stream or torch.cuda.is_initialized()
            with keep_random_states() if may_change and self.num_workers == 0 else contextlib.nullcontext():
                return next(shares, None)
        except (DataError, LoaderError) as failure:
            raise type(failure)(in_words_of_a_loop(str(failure))) from failure

    def _shares(self, start: Position) -> Any:
        """This worker's share of each batch of the epoch from `start` on."""
        order = self._order(start.epoch)
        rank, size, keep_last = self.world.rank, self.world.world_size, not self.drop_last
        workers, pin = self.num_workers, self.pin_memory
        if self._source.is_stream:
            wanted = StreamOrder(start, self.batch_size, keep_last, start.epoch + 1, self._seed)
            read = stream_batches(self._source, wanted, rank, size, workers, pin)
            return compared(read) if size > 1 else read
        endless = batches(
            start,
            self._samples(),
            self.batch_size,
            seed=self._seed,
            shuffle=self.shuffle or order is not None,
            keep_last=keep_last,
            own_order=None if order is None else lambda _: order,
        )
        epoch = itertools.takewhile(lambda batch: batch.epoch == start.epoch, endless)
        return load(
            self._source, epoch, seed=self._seed, rank=rank, world_size=size, loaders=workers, pin=pin
        )

    def _content(self, batch: Batch) -> Any:
        content = self._without_samples() if batch.count == 0 else batch.content
        if self.pin_memory and self.num_workers == 0:
            return tree_map(lambda leaf: leaf.pin_memory() if isinstance(leaf, Tensor) else leaf, content)
        return content

    def _without_samples(self) -> Any:
        """A batch of this data set without samples, for a worker that has none of a small batch."""
        if self._empty is None:
            with keep_random_states():
                one = self._source.first_batch(1, self._seed)
            try:
                self._empty = without_rows(one)
            except DataError:
                raise DataError(
                    f"DataLoader: the last batch of an epoch has fewer samples than there are workers "
                    f"({self.world.world_size}), and collate_fn returns no tensors that can be cut to none; "
                    "use drop_last=True"
                ) from None
        return self._empty

    def _order(self, epoch: int) -> Sequence[int] | None:
        """The order of the sampler, if there is one, as a function of seed and epoch."""
        if self.sampler is None:
            return None
        with keep_random_states():
            seed_all(mix(self._seed, epoch))
            if hasattr(self.sampler, "set_epoch"):
                self.sampler.set_epoch(epoch)
            order = list(self.sampler)
        if not all(isinstance(number, int) for number in order):
            unlike = next(number for number in order if not isinstance(number, int))
            raise InputError(f"DataLoader: sampler gave {unlike!r}, expected the number of a sample")
        return order

    def _samples(self) -> int:
        """The samples of an epoch."""
        if self.sampler is None:
            return len(self._source)
        if not isinstance(self.sampler, Sized):
            raise InputError("DataLoader: sampler has no __len__, expected one: the samples of an epoch")
        return len(self.sampler)

    def _check_samples(self) -> None:
        samples = self._samples()
        if samples == 0:
            raise InputError("DataLoader: the data set is empty, expected at least one sample")
        if self.drop_last and samples < self.batch_size:
            raise InputError(
                f"DataLoader: batch_size is {self.batch_size}, but an epoch has {samples} samples, and with "
                "drop_last=True no batch; use a smaller batch_size or drop_last=False"
            )

    def check_alike(self) -> None:
        """Refuse workers that would take shares of different batches; all call it before an epoch."""
        start, order = self._position, self._order(self._position.epoch)
        local = {
            "the length of the data set": (self._source.length, "give every worker the whole data set"),
            "batch_size": (self.batch_size, "it counts the samples of all workers"),
            "seed": (self._seed, "use the same one"),
            "shuffle": (self.shuffle, "use the same"),
            "drop_last": (self.drop_last, "use the same"),
            "epoch": (start.epoch, "load the same state on all of them"),
            "the position in the epoch": (start.sample, "load the same state on all of them"),
            "the order of the sampler": (
                None if order is None else zlib.crc32(repr(order).encode()),
                "let it draw from torch's global generator",
            ),
        }
        gathered = all_gather_values([value for value, _ in local.values()])
        for rank, values in enumerate(gathered):
            for (name, (_, hint)), there, first in zip(local.items(), values, gathered[0]):
                if there != first:
                    raise InputError(
                        f"DataLoader: {name} is {there} on rank {rank}, but {first} on rank 0: workers take "
                        f"shares of the same batches; {hint}"
                    )
