"""Averages over all workers at once, by the world's own collectives: SMA, and local SGD or DiLoCo."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from plait.sync.averaging import Tally
from plait.sync.vector import Source, Vector, distance


class Collective:
    """The mean of all workers; all call each method together. How they meet after an update, heirs say."""

    tolerant = False

    def __init__(self, sources: Sequence[Source]) -> None:
        self.tally = Tally()
        self._vector = Vector(*sources)
        self._size = dist.get_world_size()

    def settle(self) -> tuple[int, ...]:
        """The mean over all workers, whom it returns."""
        self._vector.gather()
        before = [flat.clone() for flat in self._vector.weights]
        for flat, mean in zip(self._vector.flats, self._means()):
            flat.copy_(mean)
        self._vector.scatter()
        self.tally.distances.append(distance(self._vector.weights, before))
        return self.living()

    def living(self) -> tuple[int, ...]:
        """All workers: the end of one is the end of the run."""
        return tuple(range(self._size))

    def close(self) -> None:
        pass

    def _means(self) -> list[Tensor]:
        """The means of all workers' flat memory."""
        means = [flat.clone() for flat in self._vector.flats]
        with self.tally.waiting():
            works = [dist.all_reduce(mean, async_op=True) for mean in means]
            for work in works:
                work.wait()
        torch._foreach_div_(means, float(self._size))
        self.tally.groups += 1
        self.tally.members += self._size
        self.tally.bytes_sent += sum(2 * m.numel() * m.element_size() for m in means)
        return means


class Sma(Collective):
    """Synchronous model averaging: after each update v <- (1 - alpha) v + alpha mean(v)."""

    def __init__(self, sources: Sequence[Source], alpha: float) -> None:
        super().__init__(sources)
        self._alpha = alpha

    def after_update(self) -> None:
        """Draw the weights towards the mean of all."""
        for flat, mean in zip(self._vector.gather(), self._means()):
            flat.lerp_(mean, self._alpha)
        self._vector.scatter()


class LocalSgd(Collective):
    """The mean of all after every `every` updates, or as often a step of an outer optimizer (DiLoCo).

    The outer step treats what workers moved on average since the last one as a gradient, under Nesterov's
    momentum; only weights take it, everything else its mean.
    """

    def __init__(
        self, sources: Sequence[Source], every: int, outer_lr: float | None = None, momentum: float = 0.9
    ) -> None:
        super().__init__(sources)
        self._every = every
        self._outer_lr = outer_lr
        self._momentum = momentum
        self._since = 0
        self._vector.gather()
        self._anchor = [flat.clone() for flat in self._vector.weights]
        self._speed = [torch.zeros_like(flat) for flat in self._anchor]

    def after_update(self) -> None:
        """Average where it is due."""
        self._since += 1
        if self._since >= self._every:
            self._average()

    def settle(self) -> tuple[int, ...]:
        if self._outer_lr is None or not self._since:
            self._since = 0
            return super().settle()
        self._vector.gather()
        before = [flat.clone() for flat in self._vector.weights]
        self._average()
        self.tally.distances.append(distance(self._vector.weights, before))
        return self.living()

    def _average(self) -> None:
        self._vector.gather()
        for flat, mean in zip(self._vector.flats, self._means()):
            flat.copy_(mean)
        if self._outer_lr is not None:
            for flat, anchor, speed in zip(self._vector.weights, self._anchor, self._speed):
                moved = anchor - flat
                speed.mul_(self._momentum).add_(moved)
                anchor.sub_(moved.add_(speed, alpha=self._momentum), alpha=self._outer_lr)
                flat.copy_(anchor)
        self._vector.scatter()
        self._since = 0
