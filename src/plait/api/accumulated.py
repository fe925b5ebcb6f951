"""How much each of the batches weighs whose gradients a worker accumulates (`DataParallel.no_sync`)."""

from __future__ import annotations

import math
from collections.abc import Sequence

# Of the numbers below, whose rounding is of the order of 1e-15.
_ROUNDING = 1e-11
NOTHING = (0.0, 0.0, 0.0)


class AccumulatedBatches:
    """The batches of a worker since its last sum of gradients.

    A loss is the mean over its batch. So this worker's share of n samples of a batch of N has the weight
    n / N, and its gradients are kept as multiples of the weight of the latest batch. N is known where samples
    are those of a `plait.DataLoader`. Otherwise workers must divide all batches in the same proportions:
    `are_weighed` tells whether they did.
    """

    def __init__(self) -> None:
        # This worker's samples of the latest batch, and all workers' if known: of forwards since a backward.
        self._count, self._total = 1.0, math.nan
        # The weight of which the gradients are multiples; NaN if it is not known.
        self._weight = math.nan
        # Of batches before the latest: sums of samples, and of both numbers times a factor for each batch.
        self._samples, self._counts, self._totals, self._batches = 0.0, 0.0, 0.0, 0

    def begin(self) -> None:
        """The gradients were summed, and are the same on all workers: other batches follow."""
        # Workers have parts of that sum which add up to the whole, also one without samples.
        self._weight = self._count / self._total if self._total else math.nan
        self._samples, self._counts, self._totals, self._batches = 0.0, 0.0, 0.0, 0
        self._count = self._total = 0.0

    def add(self, count: float, batch: tuple[int, int], has_gradients: bool) -> float:
        """A forward of `count` samples; `batch` has a loader's samples, here and in all.

        `has_gradients` tells whether a backward pass came since the forward before. Returns what the
        gradients that there are must be multiplied by.
        """
        if has_gradients:
            self._close()
        self._count += count
        self._total += batch[1] if batch[0] == count else math.nan
        weight = self._count / self._total if self._total else math.nan
        if weight == 0:  # its gradients are zero, whatever they are multiples of
            return 1.0
        before, self._weight = self._weight, weight
        ratio = before / weight
        return 1.0 if math.isnan(ratio) else ratio

    def _close(self) -> None:
        """The next forward is of another batch."""
        factor = self._factor
        self._samples += self._count
        self._counts, self._totals = self._counts + factor * self._count, self._totals + factor * self._total
        self._count, self._total, self._batches = 0.0, 0.0, self._batches + 1

    @property
    def _factor(self) -> float:
        return 1 + self._batches * 0.6180339887498949 % 1

    @property
    def samples(self) -> float:
        """This worker's samples of all batches."""
        return self._samples + self._count

    @property
    def latest(self) -> float:
        """This worker's samples of the latest batch."""
        return self._count

    @property
    def weight(self) -> float:
        """The weight of the gradients, in samples of the latest batch."""
        is_known = self._count == 0 and self._weight * self._total > 0
        return self._weight * self._total if is_known else self._count

    def numbers(self) -> tuple[float, float, float]:
        """What workers sum to tell whether all batches were weighed rightly."""
        counts = self._counts + self._factor * self._count
        totals = self._totals + self._factor * self._total
        return counts, counts**2 / self.samples if self.samples else 0.0, totals


def are_weighed(sums: Sequence[float], samples: float, workers: float) -> bool:
    """Whether gradients are those of one process, by the sums of `numbers` and of the samples.

    They are if each worker knew the sizes of all batches, or had the same share of each. (By the inequality
    of Cauchy and Schwarz the sum of squares is smallest if the shares are equal.)
    """
    counts, squares, totals = sums
    is_known = math.isclose(totals, workers * counts, rel_tol=_ROUNDING)
    return is_known or squares * samples <= counts**2 * (1 + _ROUNDING)
