"""Which trials continue: successive halving, ASHA and population-based training as pure functions of results.

A result is a loss, or anything else of which less is better; what is not a number is worst.
"""

from __future__ import annotations

import math
import random
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from plait.core.errors import InputError

Id = TypeVar("Id", bound=Hashable)
# Of population-based training: the share of trials that are replaced, and how much their values change.
_SHARE, _FACTORS = 0.25, (0.8, 1.25)


def best_first(results: Mapping[Id, float]) -> list[Id]:
    """The trials by result; equal results keep their order, and what is not a number comes last."""
    return sorted(results, key=lambda trial: (math.isnan(results[trial]), results[trial]))


def survivors(results: Mapping[Id, float], eta: int = 3) -> list[Id]:
    """The best of each `eta` trials, at least one, best first: one round of successive halving."""
    return best_first(results)[: max(1, len(results) // eta)]


def rungs(least: int, most: int, eta: int = 3) -> list[int]:
    """The steps after which trials are compared: `least`, `eta` times that, ... up to `most`."""
    if not 1 <= least <= most:
        raise InputError(f"rungs: found least {least} and most {most} steps, expected 1 <= least <= most")
    steps = [least]
    while steps[-1] * eta < most:
        steps.append(steps[-1] * eta)
    return [*steps, most] if steps[-1] != most else steps


def goes_on(result: float, reached: Sequence[float], eta: int = 3) -> bool:
    """Whether a trial that reached a rung continues (ASHA's stopping rule).

    `reached` holds the results of all trials that reached the rung before it. It continues if it is among
    the best 1/eta of those and itself, rounded down but at least one. The first trial at a rung always
    continues, so no trial waits for a rung to fill.
    """
    if math.isnan(result):
        return False
    better = sum(other < result for other in reached)
    return better < max(1, (len(reached) + 1) // eta)


@dataclass(frozen=True)
class Copy:
    """A loser takes over a winner's weights and hyperparameters; the factors change the latter."""

    loser: int
    winner: int
    factors: Mapping[str, float]


def exploit(results: Mapping[int, float], names: Sequence[str], seed: int) -> list[Copy]:
    """One round of population-based training: the worst `_SHARE` become changed copies of the best.

    So does every other that has no number for a result, as long as another has one. Each copied
    hyperparameter in `names` is multiplied by one of `_FACTORS`. The same seed and results give the same
    round.
    """
    order = best_first(results)
    count = min(max(1, round(len(order) * _SHARE)), len(order) // 2)
    winners = [trial for trial in order[:count] if not math.isnan(results[trial])]
    if not winners:
        return []
    worst = order[len(order) - count :]
    draw = random.Random(seed)
    return [
        Copy(loser, draw.choice(winners), {name: draw.choice(_FACTORS) for name in names})
        for loser in order
        if loser in worst or math.isnan(results[loser])
    ]
