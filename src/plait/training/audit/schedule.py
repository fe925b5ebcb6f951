"""Which steps are audited: a function of the step alone, so that a resumed run audits the same ones."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from plait.schema.settings import TrainSettings

# After step 8, each audited step is this many times as late as the one before.
_APART = 16

# The cost of an audit on CPUs, in steps: a newly built model takes the step, and both results are compared.
# In a pipeline the weights are sent to one worker, which computes while the others wait.
USUAL_COST = 2.0


def is_audited(settings: TrainSettings, step: int, cost: float = USUAL_COST) -> bool:
    """Whether the step after `step` steps is audited; `cost` is the cost of an audit, in steps.

    Steps 1, 2, 8, 128, 2048, ... are, or fewer where an audit takes longer, and the first step after
    evaluations 1, 2, 4, 8, ..., which stands for one of the others that would follow soon.
    """
    return next_audited(settings, step, cost) == step


def next_audited(settings: TrainSettings, step: int, cost: float = USUAL_COST) -> int | None:
    """The first step count from `step` on after which a step is audited; None where none is."""
    mode, every = settings.verify.audit, settings.evaluate.every_steps
    if mode == "off":
        return None
    steps = [next(at for at in _doubled(every) if at >= step)] if every else []
    if mode == "doubling":
        steps += itertools.islice((n - 1 for n in _numbers(cost, every) if n > step), 1)
    return min(steps, default=None)


def _numbers(cost: float, every: int | None) -> Iterator[int]:
    """The steps that are audited in addition to those after evaluations."""
    first, start, apart = ((1, 2), 8, _APART) if cost <= USUAL_COST else ((), 1, 2 ** math.ceil(cost))
    numbers = itertools.chain(first, (start * apart**power for power in itertools.count()))
    # Later, a step after an evaluation is always audited shortly before.
    return numbers if not every else itertools.takewhile(lambda n: n <= max(8, every), numbers)


def _doubled(every: int) -> Iterator[int]:
    return (every << power for power in itertools.count())
