"""Averages over all workers of a process group at once, by its collectives: SMA, local SGD or DiLoCo."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from plait.schema.sync_options import LocalSgdOptions
from plait.sync.averaging.base import AllOrNone, AveragedState
from plait.sync.averaging.flat_buffer import FlatBuffer, distance


class Collective(AllOrNone):
    """The mean of all workers, which take part in every average. Subclasses define what follows an update.

    They are those of `group`, by default the world.
    """

    def __init__(self, averaged: AveragedState, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(dist.get_world_size(group))
        self._group = group
        self._averaged = averaged
        self._vector = FlatBuffer(*averaged.sources)
        self._is_synchronizing = False
        self._updates = 0
        # At the last average: how many workers were synchronizing, and how many had updated since the one
        # before.
        self._synchronizing = self._updated = 0

    def synchronize(self) -> None:
        """Take the mean over all workers, which wait for each other here.

        A worker that is early takes part in the averages of those that still update.
        """
        with self._averaged.synchronizing():
            self._vector.gather()
            before = [flat.clone() for flat in self._vector.weights]
            self._is_synchronizing, self._synchronizing = True, 0
            while self._synchronizing < self._size:
                self._average_weights()
            self._is_synchronizing = False
            self.stats.distances.append(distance(self._vector.weights, before))
            # The sums above have waited for all workers, so the state of all is prepared.
            for source in self._averaged.when_synchronized:
                self._take_mean(FlatBuffer(source))

    def close(self) -> None:
        pass

    def _average_weights(self) -> None:
        self._take_mean(self._vector)

    def _take_mean(self, vector: FlatBuffer) -> None:
        for flat, mean in zip(vector.gather(), self._means(vector)):
            flat.copy_(mean)
        vector.scatter()

    def _means(self, vector: FlatBuffer) -> list[Tensor]:
        """The mean of each flat buffer over all workers."""
        means = [flat.clone() for flat in vector.flats]
        marks = torch.tensor([self._is_synchronizing, self._updates > 0], dtype=torch.float32)
        with self.stats.waiting():
            works = [dist.all_reduce(sum_, group=self._group, async_op=True) for sum_ in (*means, marks)]
            for work in works:
                work.wait()
        self._synchronizing, self._updated = map(int, marks.tolist())
        self._updates = 0
        for mean in means:
            mean.div_(self._size)
        self.stats.groups += 1
        self.stats.members += self._size
        self.stats.bytes_sent += sum(2 * m.numel() * m.element_size() for m in means)
        return means


class Sma(Collective):
    """Synchronous model averaging: after each update v <- (1 - alpha) v + alpha mean(v)."""

    def __init__(self, averaged: AveragedState, alpha: float, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(averaged, group)
        self._alpha = alpha

    def after_update(self) -> None:
        """Move the weights towards the mean over all workers."""
        for flat, mean in zip(self._vector.gather(), self._means(self._vector)):
            flat.lerp_(mean, self._alpha)
        self._vector.scatter()


class LocalSgd(Collective):
    """Averages over all workers every `every` updates, or takes a step of an outer optimizer (DiLoCo).

    The outer step uses the mean change of the weights since the last one as a gradient, with Nesterov
    momentum. Everything but the weights is averaged.
    """

    def __init__(
        self,
        averaged: AveragedState,
        options: LocalSgdOptions,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(averaged, group)
        self._every = options.every
        self._outer_lr = options.outer_lr if options.outer == "nesterov" else None
        self._momentum = options.outer_momentum
        # The weights after the last outer step, and its momentum.
        weights = averaged.sources[0]
        self._anchor, self._speed = FlatBuffer(weights), FlatBuffer(weights)
        self._anchor.gather()
        for flat in self._speed.gather():
            flat.zero_()

    def after_update(self) -> None:
        """Average if this is the last of `every` updates."""
        self._updates += 1
        if self._updates >= self._every:
            self._average_weights()

    def state(self) -> Mapping[str, Sequence[Tensor]]:
        """The outer optimizer's anchor and momentum."""
        if self._outer_lr is None:
            return {}
        return {"anchor": self._anchor.views, "momentum": self._speed.views}

    def _average_weights(self) -> None:
        self._vector.gather()
        for flat, mean in zip(self._vector.flats, self._means(self._vector)):
            flat.copy_(mean)
        if self._outer_lr is not None and self._updated:
            for flat, anchor, speed in zip(self._vector.weights, self._anchor.flats, self._speed.flats):
                moved = anchor - flat
                speed.mul_(self._momentum).add_(moved)
                anchor.sub_(moved.add_(speed, alpha=self._momentum), alpha=self._outer_lr)
                flat.copy_(anchor)
        self._vector.scatter()
