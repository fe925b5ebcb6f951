"""Which values trials have, and when they are compared: pure functions of settings and results."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from plait.adapt.policies.registry import make_policy
from plait.adapt.policies.step_table import StepBased
from plait.core.errors import InputError
from plait.core.names import check_extra
from plait.schema.settings import SearchSettings
from plait.schema.sync_options import read_options
from plait.schema.topology_spec import check_topology
from plait.sweeping.engines.array_plans import check_stages_of, holders_of_stages
from plait.sweeping.search.pruning import goes_on, rungs
from plait.sweeping.search.space import Dimension, check_keys, combinations, draw
from plait.sweeping.search.study import NO_STUDY, StudyTrials
from plait.sweeping.search.tpe import Past, suggest
from plait.sweeping.settings import SweepSettings

# Population-based training changes these between two steps; anything else a trial keeps to its end.
_CHANGEABLE = ("optimizer.", "loss_args.", "clip_norm")


# Policies, and changes of a table, that would change more than the trial that asks for them; and why.
_OF_ALL_TRIALS = {
    "plan": "the stages of an array are those of all its trials",
    "sync": "the workers of an array train all its trials with one sync",
    "topology": "the workers of an array sum the gradients of all its trials over one topology, that of "
    "parallel.topology",
    "workers": "each trial has its policies, and the workers are the sweep's; with parallel.elastic, plait "
    "resize changes them",
}


class Search:
    """How many trials there are, their values, and the steps at which they are compared."""

    def __init__(self, settings: SweepSettings, study: StudyTrials = NO_STUDY) -> None:
        self.settings: SearchSettings = settings.search
        self._study = study
        self.over = settings.over
        check(settings)
        self._listed = combinations(self.over) if self.settings.trials is None else None
        self.total = len(self._listed) if self._listed is not None else self.settings.trials or 0

    @property
    def waits(self) -> bool:
        """Whether trials wait for each other at each rung: halving and population-based training."""
        return self.settings.kind in ("halving", "pbt")

    @property
    def learns(self) -> bool:
        """Whether a trial's values depend on the results before it."""
        return self.settings.kind in ("asha", "study") and self._listed is None

    def values(self, number: int, past: Sequence[Past]) -> Mapping[str, Any]:
        """The values of trial `number`; the same past gives the same values."""
        if self._listed is not None:
            return self._listed[number]
        if self.settings.kind == "study":
            return self._study.ask(number)
        if self.learns:
            return suggest(self.over, past, self.settings.seed, number)
        return draw(self.over, self.settings.seed, number)

    def goes_on(self, number: int, result: float, before: Sequence[float]) -> bool:
        """Whether trial `number` continues from a rung that those with the results `before` reached, too."""
        if self.settings.kind == "study":
            return not self._study.is_pruned(number)
        return goes_on(result, before, self.settings.eta)

    def goals(self, steps: int) -> list[int]:
        """After how many of its `steps` steps a trial is compared; the last is its end."""
        least = self.settings.least_steps
        if self.settings.kind in ("grid", "random"):
            return [steps]
        if self.settings.kind in ("pbt", "study"):
            every = least or max(1, steps // 10)
            return [*range(every, steps, every), steps]
        # Rounded up, so that no rung is just before the end.
        first = min(steps, least or -(-steps // self.settings.eta**2))
        return rungs(first, steps, self.settings.eta)


def check(settings: SweepSettings) -> None:
    """Refuse a search that cannot be made, saying what would make it one."""
    if settings.train.compile:
        raise InputError(
            "compile: found true, but trials of a sweep train fused, which torch.compile cannot trace; leave "
            "it out, and compile the run of the best trial"
        )
    search, over = settings.search, settings.over
    if not over:
        raise InputError("--over: found none, expected one or more, such as optimizer.lr=log:1e-4:1e-1:16")
    check_keys(over)
    _check_policies(settings)
    if search.trials is not None and search.trials < 1:
        raise InputError(f"--trials: found {search.trials}, expected 1 or more")
    if settings.width is not None and settings.width < 1:
        raise InputError(f"--width: found {settings.width}, expected 1 or more")
    _check_replicas(settings)
    check_stages_of(settings)
    for size in holders_of_stages(settings) if settings.train.in_stages else {settings.replicas}:
        if size > 1:
            check_topology(settings.train.topology, size)
    if search.eta < 2:
        raise InputError(f"--eta: found {search.eta}, expected 2 or more: one in eta trials goes on")
    ranges = [dimension.key for dimension in over if dimension.is_range]
    if search.kind == "grid" and ranges:
        raise InputError(
            f"--over {ranges[0]}: a range has no end of values; add a count, as in log:1e-4:1e-1:16, "
            f"or draw from it with --search random or asha and --trials N"
        )
    if search.kind == "asha" and search.trials is not None:
        check_extra("optuna", "--search asha")
    if search.kind == "grid" and search.trials is not None:
        raise InputError(
            f"--trials: found {search.trials}, but --search grid tries all {len(combinations(over))} "
            f"combinations; leave it out, or draw with --search random"
        )
    if search.trials is None and (ranges or search.kind in ("random", "study")):
        raise InputError(f"--search {search.kind}: say how many trials to draw with --trials N")
    if search.kind == "pbt":
        _check_population(over, search)


def _check_policies(settings: SweepSettings) -> None:
    """Refuse policies that change more than one trial: each trial has its own."""
    for number, policy in enumerate(settings.train.adapt):
        made = make_policy(policy.kind, policy.options)
        found = {f"adapt[{number}].kind": policy.kind}
        if isinstance(made, StepBased):
            found = {
                f"adapt[{number}].changes.{step}": key
                for step, entry in made.changes.items()
                for key in entry
                if key in _OF_ALL_TRIALS
            }
        for key, kind in found.items():
            if kind in _OF_ALL_TRIALS:
                raise InputError(f"{key}: found {kind}, but {_OF_ALL_TRIALS[kind]}; leave it out")


def _check_replicas(settings: SweepSettings) -> None:
    if settings.replicas < 1:
        raise InputError(f"--replicas: found {settings.replicas}, expected 1 or more")
    swept = [dimension.ends() for dimension in settings.over if dimension.key == "data.batch_size"]
    # What is no number is refused with the job's own words.
    sizes = [size for size in (swept[0] if swept else ()) if isinstance(size, int)]
    smallest = min(sizes, default=settings.train.data.batch_size)
    if settings.replicas > max(1, smallest):
        raise InputError(
            f"--replicas: found {settings.replicas}, but a batch has {smallest} samples, so some workers "
            f"would have nothing to do; use at most {smallest} replicas, or a larger data.batch_size"
        )
    sync = settings.train.sync
    if settings.replicas > 1 and not settings.train.in_stages:
        # The job was checked with all of its workers.
        read_options(sync.kind, sync.options, settings.replicas)


def _check_population(over: Sequence[Dimension], search: SearchSettings) -> None:
    for dimension in over:
        numbers = all(_is_number(value) for value in dimension.ends())
        if not dimension.key.startswith(_CHANGEABLE) or dimension.key == "optimizer.kind" or not numbers:
            raise InputError(
                f"--over {dimension.key}: population-based training changes numbers while trials go on, of "
                f"the optimizer, of the loss, or clip_norm; sweep this one with --search asha or halving"
            )
    count = search.trials or math.prod(len(dimension.values) for dimension in over)
    if count < 2:
        raise InputError(f"--search pbt: found a population of {count}, expected 2 or more")


def _is_number(value: Any) -> bool:
    is_plain = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_plain and math.isfinite(value)
