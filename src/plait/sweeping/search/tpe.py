"""Values drawn by Optuna's tree-structured Parzen estimator, a function of the results of trials so far.

Trials are pruned without Optuna, by `pruning.goes_on`: it is decided where results are recorded, so that a
sweep that was killed decides the same again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plait.core.names import check_extra
from plait.sweeping.search.space import Dimension


@dataclass(frozen=True)
class Past:
    """A trial as a sampler sees it: its values, the result so far (less is better), and its state."""

    values: Mapping[str, Any]
    result: float | None
    step: int
    state: str


def suggest(over: Sequence[Dimension], past: Sequence[Past], seed: int, number: int) -> Mapping[str, Any]:
    """The values to try next; trials that go on count as what is known of them."""
    optuna = import_optuna("--search asha")
    # By place: a value may be a list, which optuna does not take.
    distributions = {d.key: distribution_of(d, range(len(d.values)), optuna) for d in over}
    # A new sampler for each trial, so that its values depend only on the past trials.
    sampler = optuna.samplers.TPESampler(seed=(seed * 1_000_003 + number) % 2**32, constant_liar=True)
    study = optuna.create_study(sampler=sampler)
    study.add_trials([_known(one, over, distributions, optuna) for one in past])
    drawn = study.ask(distributions).params
    return {d.key: d.values[drawn[d.key]] if d.values else drawn[d.key] for d in over}


def import_optuna(what: str) -> Any:
    """The module optuna for `what`, without its log of every trial; InputError if it is not installed."""
    check_extra("optuna", what)
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def distribution_of(dimension: Dimension, choices: Sequence[Any], optuna: Any) -> Any:
    """The distribution of a dimension; `choices` stand for its listed values."""
    if not dimension.is_range:
        return optuna.distributions.CategoricalDistribution(list(choices))
    if dimension.whole:
        low, high = int(dimension.low), int(dimension.high)
        return optuna.distributions.IntDistribution(low, high, log=dimension.log)
    return optuna.distributions.FloatDistribution(dimension.low, dimension.high, log=dimension.log)


def _known(one: Past, over: Sequence[Dimension], distributions: Mapping[str, Any], optuna: Any) -> Any:
    states = optuna.trial.TrialState
    params = {d.key: d.values.index(one.values[d.key]) if d.values else one.values[d.key] for d in over}
    options: dict[str, Any] = {"params": params, "distributions": dict(distributions)}
    result = math.inf if one.result is None or math.isnan(one.result) else one.result
    if one.state == "dropped":
        return optuna.trial.create_trial(
            state=states.PRUNED, intermediate_values={one.step: result}, **options
        )
    if one.state == "failed":
        return optuna.trial.create_trial(state=states.FAIL, **options)
    if one.state in ("waiting", "running"):
        return optuna.trial.create_trial(state=states.RUNNING, **options)
    return optuna.trial.create_trial(state=states.COMPLETE, value=result, **options)
