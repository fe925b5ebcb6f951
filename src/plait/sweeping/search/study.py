"""The trials of a sweep in a study of Optuna: its sampler draws them, and its pruner ends them.

The study receives what a loop with `ask`, `report`, `should_prune` and `tell` would say. Results come from
the events of the sweep, on resume from those of its earlier parts too: what the study has is left out.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from plait.api.objects import load_object, save_object
from plait.core import run_events
from plait.core.errors import InputError, PlaitError
from plait.core.events import Event
from plait.core.names import in_words, resolve
from plait.core.shown import shown
from plait.launcher.run_dir import RunDir
from plait.schema.settings import SearchSettings, StudySettings
from plait.sweeping.search.compared_by import choose_metric
from plait.sweeping.search.space import Dimension
from plait.sweeping.search.tpe import distribution_of, import_optuna
from plait.sweeping.settings import SweepSettings
from plait.workloads.metrics import find_modes

# The attribute of a study's trial that says which trial of which run it is.
ATTRIBUTE = "plait"
DIRECTIONS = {"min": "minimize", "max": "maximize"}
# The states of a trial that count as complete; `dropped` is pruned, and any other has failed.
COMPLETE = ("finished", "early-stop")


def value_of(metric: str, metrics: Mapping[str, Any], train_loss: float | None) -> float:
    """What a trial is compared by: the metric, or the training loss of a trial that was not evaluated.

    If an evaluation lacks the metric, it is not a number: the loss is not comparable with it.
    """
    value = metrics.get(metric) if metrics else train_loss
    return math.nan if value is None else float(value)


class StudyTrials(Protocol):
    """Where a sweep's trials are shared with others."""

    def ask(self, number: int) -> Mapping[str, Any]:
        """The values of trial `number`; asked again, the same."""

    def is_pruned(self, number: int) -> bool:
        """Whether a trial ends at the goal that it has reported last."""

    def follow(self, *events: Event) -> None:
        """Report the results and the ends of trials that `events` tell; what is known already is left out."""


class NoStudy:
    """Trials of a sweep that has no study."""

    def ask(self, number: int) -> Mapping[str, Any]:
        raise AssertionError("only a search with a study asks for values")

    def is_pruned(self, number: int) -> bool:
        raise AssertionError("only a search with a study asks for decisions")

    def follow(self, *events: Event) -> None:
        """Do nothing."""


NO_STUDY = NoStudy()


class OptunaTrials:
    """The trials of `run` in an Optuna study, compared by `metric`; the sampler draws the values of `over`.

    `save` stores the sampler, with its random state, after each draw.
    """

    def __init__(
        self,
        study: Any,
        over: Sequence[Dimension],
        metric: str,
        run: str | None,
        save: Callable[[Any], None] = lambda sampler: None,
    ) -> None:
        self._optuna = optuna_for_study()
        self._study = study
        self._metric = metric
        self._run = run
        self._save = save
        self._choices = {d.key: [as_choice(value) for value in d.values] for d in over}
        self._over = over
        self._trials: dict[int, Any] = {}
        # The steps that the study knows results of, by trial.
        self._reported: dict[int, set[int]] = defaultdict(set)
        # A trial that is made again would draw from the study's sampler a second time.
        again = copy.copy(study)
        again.sampler = self._optuna.samplers.RandomSampler()
        for known in study.get_trials(deepcopy=False):
            mark = known.user_attrs.get(ATTRIBUTE, {})
            if mark.get("run") == run and "trial" in mark:
                self._trials[mark["trial"]] = self._optuna.trial.Trial(again, known._trial_id)
                self._reported[mark["trial"]] |= set(known.intermediate_values)

    def ask(self, number: int) -> Mapping[str, Any]:
        trial = self._trials.get(number)
        if trial is None:
            trial = self._study.ask()
            # Before values are drawn: after a kill the trial is found again, not drawn twice.
            trial.set_user_attr(ATTRIBUTE, {"run": self._run, "trial": number})
            self._trials[number] = trial
        values = {dimension.key: self._suggest(trial, dimension) for dimension in self._over}
        self._save(self._study.sampler)
        return values

    def _suggest(self, trial: Any, dimension: Dimension) -> Any:
        key, choices = dimension.key, self._choices[dimension.key]
        if choices:
            return dimension.values[choices.index(trial.suggest_categorical(key, choices))]
        if dimension.whole:
            return trial.suggest_int(key, int(dimension.low), int(dimension.high), log=dimension.log)
        return trial.suggest_float(key, dimension.low, dimension.high, log=dimension.log)

    def is_pruned(self, number: int) -> bool:
        return bool(self._trials[number].should_prune())

    def follow(self, *events: Event) -> None:
        for event in events:
            if isinstance(event, run_events.TrialReached | run_events.TrialEnded):
                trial = self._known(event.trial)
                value = value_of(self._metric, event.metrics, event.train_loss)
                if isinstance(event, run_events.TrialEnded):
                    self._tell(trial, event.state, value, event.why)
                elif event.result is not None and event.step not in self._reported[event.trial]:
                    self._reported[event.trial].add(event.step)
                    with contextlib.suppress(self._optuna.exceptions.UpdateFinishedTrialError):
                        trial.report(value, event.step)

    def _known(self, number: int) -> Any:
        if number not in self._trials:
            raise InputError(
                f"the study {self._study.study_name!r} has no trial {number} of this sweep, which was drawn "
                f"from it; name the storage and the study that the sweep was begun with"
            )
        return self._trials[number]

    def _tell(self, trial: Any, state: str, value: float, why: str) -> None:
        state_of_study, told = final(state, value, self._optuna)
        if why:
            with contextlib.suppress(self._optuna.exceptions.UpdateFinishedTrialError):
                trial.set_user_attr("why", why)
        self._study.tell(trial.number, told, state=state_of_study, skip_if_finished=True)


def final(state: str, value: float, optuna: Any) -> tuple[Any, float | None]:
    """The state and the value that a study is told of a trial that ended."""
    states = optuna.trial.TrialState
    if state in COMPLETE and not math.isnan(value):
        return states.COMPLETE, value
    return (states.PRUNED if state == "dropped" else states.FAIL), None


def as_choice(value: Any) -> Any:
    """A listed value as Optuna keeps it: lists and maps as JSON."""
    return value if value is None or isinstance(value, bool | int | float | str) else json.dumps(value)


def optuna_for_study() -> Any:
    """The module optuna; InputError if it is not installed."""
    return import_optuna("a study")


def open_study(search: SearchSettings, file_url: str, mode: str) -> Any:
    """The study that `search` names, made if it is not there; `file_url` is the storage in the run's folder.

    InputError if it cannot be opened.
    """
    optuna, settings = optuna_for_study(), search.study
    sampler = _made(settings.sampler, "--sampler", optuna.samplers.BaseSampler)
    # Of trials that train at the same time, those that go on count as bad: values lie further apart.
    usual = optuna.samplers.TPESampler(seed=search.seed, constant_liar=True)
    try:
        return optuna.create_study(
            study_name=settings.name,
            storage=_storage_of(settings, file_url),
            sampler=sampler or usual,
            pruner=_made(settings.pruner, "--pruner", optuna.pruners.BasePruner),
            direction=DIRECTIONS[mode],
            load_if_exists=True,
        )
    except PlaitError:
        raise
    except Exception as failure:  # of any database and its driver
        raise InputError(
            f"--study {shown(settings.name)}: it cannot be opened in {shown(settings.storage or file_url)}: "
            f"{in_words(failure)}"
        ) from failure


def _storage_of(settings: StudySettings, file_url: str) -> Any:
    if not settings.storage:
        return file_url
    return settings.storage if "://" in settings.storage else resolve(settings.storage, "--storage")


def _made(path: str, key: str, kind: type) -> Any:
    """The sampler or pruner that `path` names, made by the class or function there; None if it is empty."""
    if not path:
        return None
    found = resolve(path, key)
    made = found if isinstance(found, kind) or not callable(found) else found()
    if not isinstance(made, kind):
        raise InputError(f"{key}: found {shown(path)}, which is {shown(made)}; expected a {kind.__name__}")
    return made


def check_study(study: Any, metric: str, mode: str, over: Sequence[Dimension]) -> None:
    """Refuse a study of another direction than the metric's, or whose trials have other distributions."""
    optuna = optuna_for_study()
    found = [direction.name.lower() for direction in study.directions]
    if found != [DIRECTIONS[mode]]:
        raise InputError(
            f"study {study.study_name!r}: found direction {' and '.join(found)}, but trials are compared by "
            f"{metric}, expected {DIRECTIONS[mode]}; name another study, or another metric with --metric or "
            f"its evaluate.mode"
        )
    for dimension in over:
        new = distribution_of(dimension, [as_choice(value) for value in dimension.values], optuna)
        for trial in study.get_trials(deepcopy=False):
            old = trial.distributions.get(dimension.key, new)
            try:
                optuna.distributions.check_distribution_compatibility(old, new)
            except ValueError as failure:
                raise InputError(
                    f"--over {dimension.key}: found {new}, but trial {trial.number} of study "
                    f"{study.study_name!r} has {old}: {in_words(failure)}; write it as it was, or name "
                    f"another study"
                ) from None


def open_trials(settings: SweepSettings, folder: RunDir, run: str | None) -> StudyTrials:
    """The sweep's trials in its study, if it has one; the sampler goes on from where it was."""
    search = settings.search
    if search.kind != "study":
        return NO_STUDY
    metric, kept = choose_metric(settings), folder.sampler
    mode = find_modes(settings.train.evaluate, settings.train.loss)[metric]
    study = open_study(search, study_url(folder), mode)
    if kept.exists():
        study.sampler = load_object(kept)
    check_study(study, metric, mode, settings.over)
    return OptunaTrials(study, settings.over, metric, run, lambda sampler: save_object(kept, sampler))


def study_url(folder: RunDir) -> str:
    """The storage of a study in the folder of its run."""
    return f"sqlite:///{folder.study.absolute()}"
