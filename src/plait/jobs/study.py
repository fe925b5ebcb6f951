"""Studies of Optuna in and out: what a sweep is given as its study, and the study that a sweep becomes."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.api.objects import keep
from plait.core import events, run_events
from plait.core.artefact import load
from plait.core.errors import InputError
from plait.core.names import searching
from plait.core.shown import shown
from plait.launcher.run_dir import RunDir, RunKind, find_run
from plait.schema.results import SweepResult
from plait.schema.settings import StudySettings
from plait.sweeping.search.compared_by import choose_metric
from plait.sweeping.search.space import Dimension
from plait.sweeping.search.study import (
    ATTRIBUTE,
    DIRECTIONS,
    as_choice,
    check_study,
    final,
    open_study,
    optuna_for_study,
    study_url,
    value_of,
)
from plait.sweeping.search.tpe import distribution_of
from plait.sweeping.settings import KIND, VERSION, SweepSettings
from plait.workloads.metrics import find_modes

if TYPE_CHECKING:
    import optuna

_SQLITE = "sqlite:///"


@dataclass(frozen=True)
class GivenStudy:
    """What a sweep was given as its study: `settings`, and `files` that its folder must have for them.

    `objects` are an `optuna.Study`, if one was given; one `in_memory` receives the trials at the end.
    """

    settings: StudySettings = field(default_factory=StudySettings)
    files: Mapping[str, bytes] = field(default_factory=dict)
    objects: tuple[optuna.Study, ...] = ()
    in_memory: bool = False

    def choose(self, search: str | None, name: str) -> dict[str, Any]:
        """The arguments of a new sweep that say it has a study, called `name` unless the user named one."""
        if search != "study" and self == GivenStudy():
            return {}
        if search not in (None, "study"):
            raise InputError(
                f"--search {search} and --study: found both, but the study draws the trials and decides "
                f"which go on; leave --search out, or hand the sweep to a study when it has ended: "
                f"plait.study(run, storage=URL)"
            )
        return {"search": "study", "study": replace(self.settings, name=self.settings.name or name)}

    def check(self, settings: SweepSettings) -> None:
        """Refuse a study that cannot have the trials of this sweep."""
        if settings.search.kind != "study":
            return
        metric = choose_metric(settings)
        mode = find_modes(settings.train.evaluate, settings.train.loss)[metric]
        for study in self.objects or self._named(settings, mode):
            check_study(study, metric, mode, settings.over)

    def _named(self, settings: SweepSettings, mode: str) -> tuple[optuna.Study, ...]:
        """The study by its name; none if it will be new, in the run's folder."""
        return (open_study(settings.search, "", mode),) if settings.search.study.storage else ()

    def check_resumed(self, begun: StudySettings) -> None:
        """Refuse another study than the one that a sweep was begun with."""
        for key in ("name", "storage"):
            now, then = getattr(self.settings, key), getattr(begun, key)
            if now and now != then and not self.objects:
                raise InputError(
                    f"--{'study' if key == 'name' else key}: found {shown(now)}, but the sweep was begun "
                    f"with {shown(then)}, which has its trials; leave it out, or begin another"
                )

    def receive(self, folder: RunDir) -> None:
        """Add the sweep's trials to a study in memory, of which its run had a copy."""
        if not self.in_memory:
            return
        (study,), optuna = self.objects, optuna_for_study()
        known = {str(trial.user_attrs.get(ATTRIBUTE)) for trial in study.trials}
        there = optuna.load_study(study_name=study.study_name, storage=study_url(folder))
        new = [trial for trial in there.trials if ATTRIBUTE in trial.user_attrs and trial.state.is_finished()]
        study.add_trials([trial for trial in new if str(trial.user_attrs[ATTRIBUTE]) not in known])


def shared_study(study: object, **options: str | None) -> GivenStudy:
    """What was given as a study: an `optuna.Study`, or its name with `storage`, `sampler` and `pruner`."""
    given = {key: value for key, value in options.items() if value is not None}
    if study is not None and not isinstance(study, str) and isinstance(study, optuna_for_study().Study):
        if given:
            raise InputError(f"{next(iter(given))}: found it besides an optuna.Study, which has its own")
        return _of_object(study)
    if study is not None and not (isinstance(study, str) and study):
        raise InputError(f"study: found {shown(study)}, expected an optuna.Study or the name of one")
    if isinstance(study, str) and "storage" not in given and "://" in study:
        raise InputError(f"--study: found {shown(study)}, expected a name; give the URL as --storage")
    if "storage" in given and study is None:
        raise InputError("--storage: found it without --study, the name of the study that it has")
    storage = given.get("storage", "")
    if storage.startswith(_SQLITE) and not storage.startswith(f"{_SQLITE}/") and storage != _SQLITE:
        given["storage"] = f"{_SQLITE}{Path(storage.removeprefix(_SQLITE)).absolute()}"
    elif storage and "://" not in storage and ":" not in storage:
        raise InputError(f"--storage: found {shown(storage)}, expected a URL, such as sqlite:///study.db")
    return GivenStudy(StudySettings(study or "", **given))


def _of_object(study: optuna.Study) -> GivenStudy:
    optuna, storage = optuna_for_study(), study._storage
    parts: dict[str, object] = {"sampler": study.sampler, "pruner": study.pruner}
    in_memory = isinstance(storage, optuna.storages.InMemoryStorage)
    if not in_memory:
        parts["storage"] = storage
    kept = keep(parts)
    files = {**kept.files, RunDir(Path()).study.name: _as_file(study)} if in_memory else kept.files
    return GivenStudy(StudySettings(study.study_name, **kept.names), files, (study,), in_memory)


def _as_file(study: optuna.Study) -> bytes:
    """The database that has a study in memory."""
    optuna = optuna_for_study()
    waiting = [trial for trial in study.trials if trial.state == optuna.trial.TrialState.WAITING]
    if waiting:
        raise InputError(
            f"study: found {len(waiting)} enqueued trials in a study in memory, of which the sweep has a "
            f"copy; make it with a storage, such as optuna.create_study(storage='sqlite:///study.db')"
        )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "study.db"
        optuna.copy_study(
            from_study_name=study.study_name, from_storage=study._storage, to_storage=f"{_SQLITE}{path}"
        )
        return path.read_bytes()


def study(
    sweep: SweepResult | str | Path,
    storage: str | None = None,
    name: str | None = None,
    *,
    run_dir: str | Path = "runs",
    trust: bool = False,
) -> optuna.Study:
    """The trials of a sweep as an `optuna.Study`: values, results at each evaluation, and how they ended.

    `sweep` is what `plait.sweep` returned, or the run's folder or name below `run_dir`. The study is in
    memory, or in `storage` under `name` (the name of the job unless given), where trials of other sweeps
    stay and those of this one are added once; trials that have not ended are left out. A sweep that had a
    study gives that one, unless a `storage` is named. Another user's run is refused unless `trust` is set.

    Examples:
        ```py
        study = plait.study("digits")  # the latest sweep of that name
        study.best_params
        ```
    """
    optuna = optuna_for_study()
    folder = find_run(
        sweep.run if isinstance(sweep, SweepResult) else str(sweep), Path(run_dir), RunKind.SWEEP
    )
    if not trust:
        folder.check_owner("pass trust=True")
    settings = load(SweepSettings, folder.sweep, KIND, VERSION)
    metric = choose_metric(settings)
    mode = find_modes(settings.train.evaluate, settings.train.loss)[metric]
    if settings.search.kind == "study" and storage is None:
        with searching(str(folder.path)):
            return open_study(settings.search, study_url(folder), mode)
    made = optuna.create_study(
        study_name=name or settings.train.name,
        storage=storage,
        direction=DIRECTIONS[mode],
        load_if_exists=True,
    )
    check_study(made, metric, mode, ())
    run = folder.read_record().id
    known = {str(trial.user_attrs.get(ATTRIBUTE)) for trial in made.get_trials(deepcopy=False)}
    ended = _ended_trials(folder, settings, metric, run)
    made.add_trials([trial for trial in ended if str(trial.user_attrs[ATTRIBUTE]) not in known])
    return made


def _ended_trials(folder: RunDir, settings: SweepSettings, metric: str, run: str | None) -> list[Any]:
    """The trials that have ended, in their order."""
    optuna = optuna_for_study()
    distributions = {dimension.key: _distribution(dimension) for dimension in settings.over}
    values: dict[int, Mapping[str, Any]] = {}
    started: dict[int, float] = {}
    curves: dict[int, dict[int, float]] = {}
    ended: dict[int, Any] = {}
    for recorded in events.read(folder.events()):
        event = recorded.event
        match event:
            case run_events.TrialDrawn():
                values[event.trial], started[event.trial] = event.values, recorded.t
                curves[event.trial] = {}
            case run_events.TrialCopied():
                values[event.trial] = event.values
            case run_events.TrialEvaluated():
                curves[event.trial][event.step] = value_of(metric, event.metrics, None)
            case run_events.TrialReached() if event.result is not None:
                curves[event.trial][event.step] = value_of(metric, event.metrics, event.train_loss)
            case run_events.TrialEnded():
                result = value_of(metric, event.metrics, event.train_loss)
                state, value = final(event.state, result, optuna)
                curve = curves[event.trial]
                if state == optuna.trial.TrialState.PRUNED and curve:
                    value = curve[max(curve)]
                attributes: dict[str, Any] = {ATTRIBUTE: {"run": run, "trial": event.trial}}
                if event.why:
                    attributes["why"] = event.why
                trial = optuna.trial.create_trial(
                    state=state,
                    value=value,
                    params={key: as_choice(each) for key, each in values[event.trial].items()},
                    distributions=distributions,
                    user_attrs=attributes,
                    intermediate_values=curve,
                )
                trial.datetime_start = datetime.fromtimestamp(started[event.trial])
                trial.datetime_complete = datetime.fromtimestamp(recorded.t)
                ended[event.trial] = trial
    return [ended[number] for number in sorted(ended)]


def _distribution(dimension: Dimension) -> Any:
    """What a dimension's values were tried from; listed numbers as the range that they are in."""
    optuna, ends = optuna_for_study(), dimension.ends()
    numbers = [end for end in ends if isinstance(end, int | float) and not isinstance(end, bool)]
    if dimension.is_range or len(numbers) < len(ends):
        return distribution_of(dimension, [as_choice(value) for value in dimension.values], optuna)
    whole = all(isinstance(number, int) for number in numbers)
    return distribution_of(
        replace(dimension, values=(), low=min(numbers), high=max(numbers), whole=whole), (), optuna
    )
