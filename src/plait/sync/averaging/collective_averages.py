"""Averages over all workers of a process group at once, by its collectives: SMA, local SGD or DiLoCo."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch.distributed as dist
from torch import Tensor

from plait.schema.sync_options import LocalSgdOptions
from plait.sync.averaging.base import AllOrNone, WhenSynchronized
from plait.sync.averaging.flat_buffer import FlatBuffer, Source, distance


class Collective(AllOrNone):
    """The mean of all workers; all call each method together. Subclasses define what follows an update.

    They are those of `group`, by default the world.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        when_synchronized: Sequence[WhenSynchronized] = (),
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(dist.get_world_size(group))
        self._group = group
        self._vector = FlatBuffer(*sources)
        self._when_synchronized = when_synchronized

    def synchronize(self) -> None:
        """Take the mean over all workers."""
        for source in self._when_synchronized:
            source.prepare()
        self._vector.gather()
        before = [flat.clone() for flat in self._vector.weights]
        self._synchronize_weights()
        self.stats.distances.append(distance(self._vector.weights, before))
        # The sums above have waited for all workers, so all have called `prepare`.
        for source in self._when_synchronized:
            self._take_mean(FlatBuffer(source))
            source.finish()

    def close(self) -> None:
        pass

    def _synchronize_weights(self) -> None:
        self._take_mean(self._vector)

    def _take_mean(self, vector: FlatBuffer) -> None:
        for flat, mean in zip(vector.gather(), self._means(vector)):
            flat.copy_(mean)
        vector.scatter()

    def _means(self, vector: FlatBuffer) -> list[Tensor]:
        """The mean of each flat buffer over all workers."""
        means = [flat.clone() for flat in vector.flats]
        with self.stats.waiting():
            works = [dist.all_reduce(mean, group=self._group, async_op=True) for mean in means]
            for work in works:
                work.wait()
        for mean in means:
            mean.div_(self._size)
        self.stats.groups += 1
        self.stats.members += self._size
        self.stats.bytes_sent += sum(2 * m.numel() * m.element_size() for m in means)
        return means


class Sma(Collective):
    """Synchronous model averaging: after each update v <- (1 - alpha) v + alpha mean(v)."""

    def __init__(
        self,
        sources: Sequence[Source],
        alpha: float,
        when_synchronized: Sequence[WhenSynchronized] = (),
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(sources, when_synchronized, group)
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
        sources: Sequence[Source],
        every: int,
        outer_lr: float | None = None,
        momentum: float = LocalSgdOptions.outer_momentum,
        when_synchronized: Sequence[WhenSynchronized] = (),
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(sources, when_synchronized, group)
        self._every = every
        self._outer_lr = outer_lr
        self._momentum = momentum
        self._since = 0
        # The weights after the last outer step, and its momentum.
        self._anchor, self._speed = FlatBuffer(sources[0]), FlatBuffer(sources[0])
        self._anchor.gather()
        for flat in self._speed.gather():
            flat.zero_()

    def after_update(self) -> None:
        """Average if this is the last of `every` updates."""
        self._since += 1
        if self._since >= self._every:
            self._average()

    def state(self) -> Mapping[str, Sequence[Tensor]]:
        """The outer optimizer's anchor and momentum."""
        if self._outer_lr is None:
            return {}
        return {"anchor": self._anchor.views, "momentum": self._speed.views}

    def _synchronize_weights(self) -> None:
        if self._since or self._outer_lr is None:
            self._average()
        else:
            super()._synchronize_weights()

    def _average(self) -> None:
        self._vector.gather()
        for flat, mean in zip(self._vector.flats, self._means(self._vector)):
            flat.copy_(mean)
        if self._outer_lr is not None:
            for flat, anchor, speed in zip(self._vector.weights, self._anchor.flats, self._speed.flats):
                moved = anchor - flat
                speed.mul_(self._momentum).add_(moved)
                anchor.sub_(moved.add_(speed, alpha=self._momentum), alpha=self._outer_lr)
                flat.copy_(anchor)
        self._vector.scatter()
        self._since = 0
