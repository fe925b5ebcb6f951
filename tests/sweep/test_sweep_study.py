"""Sweeps in a study of Optuna: it draws and prunes their trials, and they become studies."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optuna
import pytest

import plait
from plait.core import run_events
from plait.core.artefact import text_of
from plait.core.codec import encode
from plait.core.errors import InputError
from plait.jobs.study import shared_study
from plait.launcher.run_dir import RunDir, RunKind
from plait.schema.settings import StudySettings
from plait.sweeping.scheduler import TrialScheduler
from plait.sweeping.search.study import OptunaTrials, check_study
from plait.sweeping.settings import KIND, VERSION, SweepSettings
from plait.sweeping.trials.scheduled_trial import Report
from support.sweeping import sweep_here, sweep_of
from support.training import digits_job, unverified_job

OVER = ("optimizer.lr=log:1e-3:1", "optimizer.momentum=0.0,0.9", "data.batch_size=int:8:64")
# Trials that are drawn, and that come to a goal, together.
TOGETHER = 3


class KilledError(Exception):
    """The coordinator is gone."""


def loss_of(values: Mapping[str, Any], step: int) -> float:
    return abs(math.log(values["optimizer.lr"]) + 3) + values["optimizer.momentum"] + 10 / step


def new_study(url: str | None) -> optuna.Study:
    return optuna.create_study(
        storage=url,
        study_name="digits",
        load_if_exists=True,
        sampler=optuna.samplers.TPESampler(seed=3, n_startup_trials=4),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=3),
    )


def schedule(settings: SweepSettings, study: optuna.Study, recorded: list[Any], last: int = -1) -> bool:
    """Play a sweep that goes on after `recorded` events until it is over, or until it has `last` of them."""
    trials = OptunaTrials(study, settings.over, "loss", "this run")

    def record(*events: Any) -> None:
        for event in events:
            if len(recorded) == last:
                raise KilledError
            recorded.append(event)
        trials.follow(*events)

    scheduler = TrialScheduler(settings, 1, "loss", lambda own: 30, record, lambda a, b: None, study=trials)
    past = list(recorded)
    try:
        trials.follow(*past)
        scheduler.open(past)
        while not scheduler.is_over:
            running = scheduler.take(scheduler.waiting()[0].group, TOGETHER, begin=False)
            goals = {trial.number: trial.goal for trial in running}
            while goals:
                reports = [
                    Report(number, goal, {"loss": loss_of(scheduler.trials[number].values, goal)}, None)
                    for number, goal in goals.items()
                ]
                left = dict(zip(goals, scheduler.report(reports)))
                goals = {number: goal for number, goal in left.items() if goal}
    except KilledError:
        return False
    return True


def plain_loop(study: optuna.Study, trials: int) -> None:
    """What a person writes with Optuna alone, with the same trials together."""
    for _ in range(trials // TOGETHER):
        running = [study.ask() for _ in range(TOGETHER)]
        values = {
            trial.number: {
                "optimizer.lr": trial.suggest_float("optimizer.lr", 1e-3, 1, log=True),
                "optimizer.momentum": trial.suggest_categorical("optimizer.momentum", [0.0, 0.9]),
                "data.batch_size": trial.suggest_int("data.batch_size", 8, 64),
            }
            for trial in running
        }
        for step in range(10, 31, 10):
            for trial in running:
                trial.report(loss_of(values[trial.number], step), step)
            for trial in list(running):
                if step == 30:
                    study.tell(trial, loss_of(values[trial.number], step))
                elif trial.should_prune():
                    study.tell(trial, state=optuna.trial.TrialState.PRUNED)
                    running.remove(trial)


def seen(study: optuna.Study) -> list[Any]:
    return [(t.number, t.state, t.values, t.params, t.intermediate_values) for t in study.trials]


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/study.db"


def settings_of(trials: int) -> SweepSettings:
    return sweep_of(*OVER, kind="study", trials=trials, least_steps=10)


def test_a_study_hears_of_a_sweep_what_a_plain_loop_of_optuna_tells_it(url: str):
    expected, study = new_study(None), new_study(url)
    # Trials that were there before count as knowledge of the sampler and the pruner.
    for each in (expected, study):
        plain_loop(each, 3)
    plain_loop(expected, 9)
    assert schedule(settings_of(9), study, [])
    assert seen(study) == seen(expected)
    states = [trial.state.name for trial in study.trials]
    assert len(states) == 12
    assert set(states) == {"COMPLETE", "PRUNED"}
    assert optuna.load_study(study_name="digits", storage=url).best_trial.number == study.best_trial.number


def test_a_sweep_killed_after_any_event_leaves_no_trial_twice_in_its_study():
    settings, events = settings_of(6), []
    assert schedule(settings, new_study(None), events)
    for last in range(len(events)):
        study, recorded = new_study(None), []
        assert not schedule(settings, study, recorded, last)
        assert schedule(settings, study, recorded)
        assert len(study.trials) == 6
        assert all(trial.state.is_finished() for trial in study.trials)
        ended = {e.trial: e for e in recorded if isinstance(e, run_events.TrialEnded)}
        for trial in study.trials:
            number = trial.user_attrs["plait"]["trial"]
            assert trial.value == loss_of(trial.params, ended[number].step)
            assert list(trial.intermediate_values) == list(range(10, ended[number].step + 1, 10))


def test_trials_that_are_found_again_draw_nothing_from_the_sampler():
    class Once(optuna.samplers.RandomSampler):
        def infer_relative_search_space(self, study: Any, trial: Any) -> Any:
            assert not study.trials[trial.number].params
            return super().infer_relative_search_space(study, trial)

    study, over = optuna.create_study(sampler=Once(seed=1)), sweep_of(*OVER).over
    drawn = OptunaTrials(study, over, "loss", "this run").ask(0)
    assert OptunaTrials(study, over, "loss", "this run").ask(0) == drawn
    assert OptunaTrials(study, over, "loss", "another").ask(0) != drawn


def test_trials_end_in_the_study_as_they_ended(url: str):
    study = new_study(url)
    trials = OptunaTrials(study, sweep_of(*OVER).over, "loss", "this run")
    ends = {"finished": 0.5, "early-stop": 0.25, "diverged": None, "failed": None}
    for number, (state, value) in enumerate([*ends.items(), ("finished", None)]):
        trials.ask(number)
        trials.follow(run_events.TrialEnded(number, 7, state, {"loss": value}, None, "it broke"))
    told = [(trial.state.name, trial.value) for trial in study.trials]
    assert told == [("COMPLETE", 0.5), ("COMPLETE", 0.25), ("FAIL", None), ("FAIL", None), ("FAIL", None)]
    assert study.trials[3].user_attrs["why"] == "it broke"


def test_listed_values_that_are_no_numbers_are_drawn_as_they_are(url: str):
    over = sweep_of("model_args.sizes=[1,2],[3]", "optimizer.kind=sgd,adam").over
    study = new_study(url)
    values = OptunaTrials(study, over, "loss", "run").ask(0)
    assert values["model_args.sizes"] in ([1, 2], [3])
    assert study.trials[0].params["model_args.sizes"] == str(values["model_args.sizes"])


def test_a_study_of_another_direction_or_with_other_values_is_refused():
    study = optuna.create_study(direction="maximize")
    with pytest.raises(InputError, match="found direction maximize, .* by loss, expected minimize"):
        check_study(study, "loss", "min", ())
    both = optuna.create_study(directions=["minimize", "maximize"])
    with pytest.raises(InputError, match="found direction minimize and maximize"):
        check_study(both, "loss", "min", ())
    study.ask().suggest_categorical("optimizer.lr", [0.1, 0.2])
    with pytest.raises(InputError, match=r"--over optimizer.lr: found FloatDist.* trial 0 .* Categorical"):
        check_study(study, "accuracy", "max", sweep_of("optimizer.lr=log:1e-3:1").over)


def test_what_is_no_study_is_refused(tmp_path: Path):
    job = {"model": "plait.workloads.mlp:mlp_tiny", "data": {"kind": "digits", "batch_size": 8}, "steps": 1}
    over = {"optimizer.lr": "log:1e-3:1"}
    for message, options in {
        "expected an optuna.Study or the name": {"study": 3},
        "expected a name; give the URL as --storage": {"study": "sqlite:///x.db"},
        "without --study": {"storage": "sqlite:///x.db"},
        "expected a URL, such as sqlite": {"study": "x", "storage": "x.db"},
        "the study draws the trials": {"study": "x", "search": "asha"},
        "say how many trials": {"study": "x"},
        "found it besides an optuna.Study": {"study": optuna.create_study(), "sampler": "a:b"},
        "it cannot be opened": {"study": "x", "storage": "nosuch://host/db", "trials": 2},
        "expected a BaseSampler": {
            "study": "x",
            "storage": "sqlite://",
            "sampler": "optuna.pruners:NopPruner",
            "trials": 2,
        },
    }.items():
        with pytest.raises(InputError, match=message):
            plait.sweep({**job, "name": "digits", "run_dir": str(tmp_path)}, over, **options)
    study = optuna.create_study()
    study.enqueue_trial({"optimizer.lr": 0.1})
    with pytest.raises(InputError, match="1 enqueued trials in a study in memory"):
        shared_study(study)


def test_fused_trials_are_pruned_by_the_study_of_their_folder_also_after_a_stop(tmp_path: Path):
    job = unverified_job(steps=6)
    search = {"trials": 4, "least_steps": 2, "metric": "loss"}
    found = StudySettings("digits", "", "optuna.samplers:RandomSampler", "support.pruning:EveryOther")
    settings = sweep_of("optimizer.lr=0.01,0.1", job=job, kind="study", study=found, **search)
    RunDir(tmp_path).claim(RunKind.SWEEP, False)
    stopped = sweep_here(settings, tmp_path, stop_file=tmp_path / "run.json")
    assert stopped["reason"] == "stopped"
    result = sweep_here(settings, tmp_path, resume=True)
    study = optuna.load_study(study_name="digits", storage=f"sqlite:///{tmp_path}/study.db")
    rows = {row["trial"]: row for row in result["trials"]}
    assert [trial.state.name for trial in study.trials] == ["PRUNED", "COMPLETE"] * 2
    for trial in study.trials:
        row = rows[trial.user_attrs["plait"]["trial"]]
        assert (trial.params, trial.value) == (row["values"], row["metrics"]["loss"])
        assert trial.last_step == row["step"]
    # The study that a sweep had is the one that it gives; elsewhere its trials are added once.
    (tmp_path / "sweep.json").write_text(text_of(encode(settings), KIND, VERSION))
    assert seen(plait.study(tmp_path)) == seen(study)
    for _ in range(2):
        copied = plait.study(tmp_path, storage=f"sqlite:///{tmp_path}/other.db", name="other")
        assert [(t.state, t.value, t.params) for t in copied.trials] == [
            (t.state, t.value, t.params) for t in study.trials
        ]


@pytest.mark.parametrize("kind", ["grid", "pbt", "asha"])
def test_the_folder_of_a_sweep_becomes_a_study(tmp_path: Path, kind: str):
    folder = RunDir(tmp_path)
    folder.claim(RunKind.SWEEP, False)
    over = ("optimizer.lr=0.1,0.2,0.4,0.8", "optimizer.momentum=0,1")
    settings = sweep_of(*over, job=digits_job(steps=8), kind=kind, least_steps=4, metric="loss")
    log = plait.core.events.EventLog(folder.events(), 0)
    scheduler = TrialScheduler(
        settings, 1, "loss", lambda own: 8, lambda *events: [log.record(e) for e in events], lambda a, b: None
    )
    scheduler.open()
    while not scheduler.is_over:
        for trial in scheduler.take(scheduler.waiting()[0].group, 8, begin=False):
            goal = trial.goal
            while goal:
                (goal,) = scheduler.report([Report(trial.number, goal, {"loss": float(trial.number)}, 1.0)])
    log.close()
    (tmp_path / "sweep.json").write_text(text_of(encode(settings), KIND, VERSION))
    study = plait.study(str(tmp_path))
    best = scheduler.best()
    assert best is not None
    assert study.best_trial.number == best.number
    assert study.best_trial.params == best.values
    assert len(study.trials) == 8
    states = {"grid": {"COMPLETE"}, "pbt": {"COMPLETE"}, "asha": {"COMPLETE", "PRUNED"}}
    assert {trial.state.name for trial in study.trials} == states[kind]
    assert set(optuna.importance.get_param_importances(study)) <= set(best.values)


@pytest.mark.extended
def test_a_study_in_memory_has_the_trials_of_a_launched_sweep(tmp_path: Path):
    job = {
        "name": "digits",
        "model": "plait.workloads.mlp:mlp_tiny",
        "data": {"kind": "digits", "batch_size": 32},
        "steps": 4,
        "run_dir": str(tmp_path),
        "verify": "off",
    }
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.RandomSampler(seed=1))
    study.add_trial(
        optuna.trial.create_trial(
            params={"optimizer.lr": 0.5},
            distributions={"optimizer.lr": optuna.distributions.FloatDistribution(1e-3, 1, log=True)},
            value=0.1,
        )
    )
    result = plait.sweep(job, {"optimizer.lr": "log:1e-3:1"}, study=study, trials=3)
    assert len(study.trials) == 4
    assert result.best is not None
    assert study.best_trial.params == result.best.values
    assert study.best_trial.value == result.best.metrics["accuracy"]
