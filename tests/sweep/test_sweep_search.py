"""Searches: what is drawn, which trials go on, and what a scheduler decides again after a restart."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import plait
from plait.callbacks import EndRecord, EvaluationRecord, StartRecord, StepRecord
from plait.callbacks.tensorboard import MOST_OPEN, TensorBoard
from plait.core import run_events
from plait.core.codec import decode, encode
from plait.core.errors import InputError, JobError
from plait.core.run_events import TrialStep
from plait.schema.settings import EvaluateSettings, ModelSettings, TrainSettings
from plait.sweeping.array_record import Arrays
from plait.sweeping.progress import SweepProgress
from plait.sweeping.scheduler import TrialScheduler
from plait.sweeping.search.compared_by import check_comparable, choose_metric
from plait.sweeping.search.pruning import goes_on
from plait.sweeping.search.tpe import Past
from plait.sweeping.search.values import Search
from plait.sweeping.trial_settings import array_key, with_values
from plait.sweeping.trials.scheduled_trial import Report
from support.sweeping import sweep_here, sweep_of
from support.training import digits_job


def make_scheduler(
    settings: Any, past: Sequence[Any] = (), copy: Any = lambda winner, loser: None
) -> tuple[TrialScheduler, list[Any]]:
    """A scheduler that needs no run, and the events it recorded."""
    recorded: list[Any] = []
    scheduler = TrialScheduler(
        settings, 1, "loss", lambda own: own.steps or 0, lambda *events: recorded.extend(events), copy
    )
    scheduler.open(past)
    return scheduler, recorded


def test_the_time_left_follows_the_steps_and_not_what_came_before_them():
    scheduler, _ = make_scheduler(sweep_of("seed=0,1", job=digits_job(steps=1000)))
    now = [0.0]
    progress = SweepProgress(scheduler, Arrays([]), clock=lambda: now[0])
    # A minute of getting ready, then a hundred steps of each trial a second.
    now[0] = 60.0
    for step in range(100, 500, 100):
        for trial in (0, 1):
            progress.count(trial, step, 0.5)
        left_s = progress.report().get("left_s")
        assert left_s is None if step < 300 else left_s == pytest.approx((2000 - 2 * step) / 200, rel=0.3)
        now[0] += 1.0


def test_a_resumed_sweep_counts_from_where_its_trials_were():
    scheduler, _ = make_scheduler(sweep_of("seed=0,1", job=digits_job(steps=1000)))
    progress = SweepProgress(scheduler, Arrays([]), [TrialStep(1, 500, 0.5)], clock=lambda: 0.0)
    progress.count(1, 510, None)
    assert [(row.trial, row.step, row.train_loss) for row in progress.table()] == [
        (0, 0, None),
        (1, 510, 0.5),
    ]
    assert progress.trial_steps_per_s == pytest.approx(10 / progress.seconds)


def play(scheduler: TrialScheduler, losses: dict[int, float]) -> None:
    """Train every trial to its goals; its loss never changes."""
    while not scheduler.is_over:
        waiting = scheduler.waiting()
        for trial in scheduler.take(waiting[0].group, 3, begin=False):
            until = trial.goal
            while until:
                until = scheduler.report([Report(trial.number, until, {"loss": losses[trial.number]}, None)])[
                    0
                ]


def test_halving_lets_the_best_of_each_eta_go_on_to_the_next_rung():
    scheduler, _ = make_scheduler(
        sweep_of("seed=" + ",".join(map(str, range(9))), kind="halving", least_steps=2)
    )
    play(scheduler, {number: float(number) for number in range(9)})
    steps = {trial.number: trial.step for trial in scheduler.trials}
    # Nine come to 2 steps, three to 6, one on to 18 and its end.
    assert [steps[n] for n in range(9)] == [30, 6, 6, 2, 2, 2, 2, 2, 2]
    assert sum(trial.state == "finished" for trial in scheduler.trials) == 1
    assert [row.trial for row in scheduler.table()[:3]] == [0, 1, 2]


def test_asha_decides_as_trials_come_and_never_waits():
    losses = {0: 5.0, 1: 4.0, 2: 6.0, 3: 1.0, 4: 7.0, 5: 0.5}
    scheduler, _ = make_scheduler(sweep_of("seed=0,1,2,3,4,5", kind="asha", least_steps=3))
    play(scheduler, losses)
    reached: list[float] = []
    for number in range(6):
        expected = goes_on(losses[number], reached, 3)
        assert (scheduler.trials[number].step > 3) == expected
        reached.append(losses[number])


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4, 5), (5, 4, 3, 2, 1, 0), (2, 5, 0, 3, 1, 4)])
def test_asha_judges_trials_that_come_together_by_the_same_results_whatever_their_places(order):
    losses = {0: 5.0, 1: 4.0, 2: 6.0, 3: 1.0, 4: 7.0, 5: 0.5}
    settings = sweep_of("seed=0,1,2,3,4,5", kind="asha", least_steps=3)
    scheduler, recorded = make_scheduler(settings)
    scheduler.take(scheduler.waiting()[0].group, 6, begin=False)
    found = scheduler.report([Report(number, 3, {"loss": losses[number]}, None) for number in order])
    goes = {number for number, until in zip(order, found) if until}
    assert goes == {3, 5}
    # A decision that was lost is made again by the same results, not by those that came later.
    drawn = [event for event in recorded if not isinstance(event, run_events.TrialEnded)]
    again, _ = make_scheduler(settings, [_through_json(event) for event in drawn])
    assert {trial.number for trial in again.trials if not trial.has_ended} == {3, 5}


def test_a_population_replaces_every_member_that_diverged():
    copies = []
    settings = sweep_of("optimizer.lr=0.1,0.2,0.3,0.4,0.5", kind="pbt", least_steps=10)
    scheduler, recorded = make_scheduler(settings, copy=lambda w, s: copies.append((w, s)))
    scheduler.take(scheduler.waiting()[0].group, 5, begin=False)
    for number in (1, 2, 3):
        scheduler.stop(number, 4 + number, "diverged", {}, None)
    scheduler.report([Report(number, 10, {"loss": float(number)}, None) for number in (0, 4)])
    # Those that have no result, and no more: a quarter of five is one.
    assert {loser for _, loser in copies} == {1, 2, 3}
    assert {winner for winner, _ in copies} == {0}
    assert [trial.state for trial in scheduler.trials] == ["waiting"] * 5
    assert [trial.step for trial in scheduler.trials] == [10] * 5
    again, _ = make_scheduler(settings, [_through_json(event) for event in recorded])
    assert again.table() == scheduler.table()
    play(scheduler, dict.fromkeys(range(5), 1.0))
    assert {trial.state for trial in scheduler.trials} == {"finished"}


def test_a_population_of_which_all_diverged_has_diverged():
    scheduler, _ = make_scheduler(sweep_of("optimizer.lr=0.1,0.2", kind="pbt", least_steps=10))
    scheduler.take(scheduler.waiting()[0].group, 2, begin=False)
    for number in (0, 1):
        scheduler.stop(number, 4, "diverged", {}, None)
    assert [trial.state for trial in scheduler.trials] == ["diverged"] * 2


@pytest.mark.parametrize("kind", ["grid", "halving", "asha", "pbt"])
def test_a_scheduler_restarted_after_any_event_comes_to_the_same_end(kind: str):
    over = "optimizer.lr=" + ",".join(str(0.01 * n) for n in range(1, 8))
    settings = sweep_of(over, kind=kind, least_steps=4, eta=2)
    losses = {0: 3.0, 1: 1.0, 2: 2.0, 3: 0.1, 4: math.inf, 5: 0.5, 6: 0.7}
    whole, recorded = make_scheduler(settings)
    play(whole, losses)
    for cut in range(len(recorded)):
        again, _ = make_scheduler(settings, [_through_json(event) for event in recorded[:cut]])
        play(again, losses)
        assert again.table() == whole.table(), cut


def _through_json(event: Any) -> Any:
    return decode(type(event), encode(event))


def test_a_population_copies_winners_and_changes_their_values():
    copies = []
    settings = sweep_of("optimizer.lr=0.1,0.2,0.3,0.4", kind="pbt", least_steps=10)
    scheduler = TrialScheduler(
        settings, 1, "loss", lambda own: 30, lambda *e: None, lambda w, s: copies.append((w, s))
    )
    scheduler.open()
    play(scheduler, {0: 1.0, 1: 2.0, 2: 3.0, 3: 4.0})
    assert copies == [(0, 3), (0, 3)]
    # Not 0.08: what is tried begins at 0.1.
    assert scheduler.trials[3].values["optimizer.lr"] in (0.1, pytest.approx(0.125))
    assert all(trial.state == "finished" for trial in scheduler.trials)


@pytest.mark.parametrize(
    ("over", "kind"),
    [
        ("optimizer.rho=0.85,0.9,0.95,0.99", float),
        ("optimizer.lr=log:0.01:0.05", float),
        ("optimizer.weight_decay=linear:0.5:0.7", float),
        ("loss_args.ignore_index=int:3:9", int),
        ("clip_norm=1,2,4,8", int),
    ],
)
def test_a_population_stays_within_what_was_asked_for(over: str, kind: type):
    settings = sweep_of(over, kind="pbt", least_steps=1, trials=None if "," in over else 8)
    scheduler = TrialScheduler(settings, 1, "loss", lambda own: 60, lambda *e: None, lambda w, s: None)
    scheduler.open()
    (dimension,) = settings.over
    seen, rounds = set(), 0
    while not scheduler.is_over:
        rounds += 1
        for trial in scheduler.take(scheduler.waiting()[0].group, 8, begin=False):
            seen.add(trial.values[dimension.key])
            # Who is best changes, so that values move.
            loss = float((trial.number * 7 + rounds * 3) % 11)
            scheduler.report([Report(trial.number, trial.goal, {"loss": loss}, None)])
    low, high = min(dimension.ends()), max(dimension.ends())
    assert all(low <= value <= high and type(value) is kind for value in seen)
    assert {low, high} < seen


def test_a_population_takes_no_switches():
    with pytest.raises(InputError, match="optimizer.nesterov: population-based training changes numbers"):
        Search(sweep_of("optimizer.nesterov=true,false", kind="pbt"))


def test_a_trial_without_the_metric_is_never_the_best():
    scheduler = TrialScheduler(
        sweep_of("evaluate.metric=accuracy,none", job=digits_job(steps=5)),
        1,
        "accuracy",
        lambda own: 5,
        lambda *e: None,
        lambda w, s: None,
    )
    scheduler.open()
    for trial in scheduler.take(scheduler.waiting()[0].group, 2, begin=False):
        metrics = {"loss": 9.0, "accuracy": 0.1} if trial.number == 0 else {"loss": 9.0}
        scheduler.report([Report(trial.number, 5, metrics, 9.0)])
    best = scheduler.best()
    assert best is not None
    assert best.number == 0


def test_the_values_that_optuna_draws_follow_from_the_past_alone():
    settings = sweep_of(
        "optimizer.lr=log:1e-4:1", "model_args.classes=int:10:20", "optimizer.momentum=0,0.9",
        kind="asha", trials=40,
    )  # fmt: skip
    search = Search(settings)
    past: list[Past] = []
    for number in range(30):
        values = search.values(number, past)
        assert values == search.values(number, past)
        assert 1e-4 <= values["optimizer.lr"] <= 1
        assert values["model_args.classes"] in range(10, 21)
        # Near 0.01 is best.
        result = abs(math.log10(values["optimizer.lr"]) + 2)
        state = "dropped" if number % 3 == 1 else "diverged" if number % 7 == 5 else "finished"
        past.append(Past(values, math.nan if state == "diverged" else result, 5, state))
    rates = [one.values["optimizer.lr"] for one in past]
    distance = [abs(math.log10(rate) + 2) for rate in rates]
    assert sum(distance[15:]) / 15 < sum(distance[:10]) / 10


def test_no_rung_lies_just_before_the_end():
    search = Search(sweep_of("seed=0,1", kind="asha"))
    assert search.goals(138) == [16, 48, 138]
    assert search.goals(9) == [1, 3, 9]
    assert search.goals(1) == [1]
    assert Search(sweep_of("seed=0,1", kind="asha", least_steps=10)).goals(5) == [5]


def test_drawn_values_depend_on_seed_and_number_and_stay_in_their_range():
    over = ("optimizer.lr=log:1e-4:1", "optimizer.weight_decay=linear:0:1", "seed=int:3:5")
    search = Search(sweep_of(*over, kind="random", trials=50))
    drawn = [search.values(number, ()) for number in range(50)]
    assert drawn == [search.values(number, ()) for number in range(50)]
    assert {values["seed"] for values in drawn} == {3, 4, 5}
    assert all(1e-4 <= values["optimizer.lr"] <= 1 for values in drawn)
    assert len({values["optimizer.lr"] for values in drawn}) == 50
    other = Search(sweep_of(*over, kind="random", trials=50, seed=1))
    assert drawn[0] != other.values(0, ())


def test_values_put_over_settings_are_those_of_the_job_file():
    content = {
        "name": "t",
        "model": "plait.workloads.mlp:mlp_tiny",
        "data": {"kind": "digits", "batch_size": 8},
        "early_stop": {"patience": 2},
        "evaluate": {"every_steps": 3},
        "steps": 5,
    }
    for key, value in {
        "model_args.classes": 12,
        "data.batch_size": 9,
        "data.shuffle": False,
        "data.path": "x",
        "optimizer.kind": "adam",
        "optimizer.betas": [0.8, 0.9],
        "lr_schedule.warmup_steps": 3,
        "lr_schedule.gamma": 0.5,
        "early_stop.patience": 4,
        "evaluate.every_steps": 2,
        "loss": "mse",
        "loss_args.label_smoothing": 0.1,
        "seed": 3,
        "model": "plait.workloads.mlp:mlp",
    }.items():
        expected = plait.make_job(content, [f"{key}={json.dumps(value)}"]).settings()
        assert with_values(plait.make_job(content).settings(), {key: value}) == expected, key


def test_trials_share_an_array_when_only_numbers_differ():
    job: TrainSettings = digits_job()
    same = {"optimizer.lr": 0.3, "seed": 5, "data.batch_size": 7, "clip_norm": 1.0, "steps": 3}
    other = {
        "model_args.classes": 11,
        "optimizer.nesterov": True,
        "precision": "float32",
        "data.shuffle": False,
    }
    for key, value in same.items():
        assert array_key(with_values(job, {key: value})) == array_key(job), key
    for key, value in other.items():
        assert array_key(with_values(job, {key: value})) != array_key(job), key
    none, some = (with_values(job, {"loss_args.label_smoothing": value}) for value in (None, 0.1))
    assert array_key(none) != array_key(some)
    # Dropouts of any size share an array, but not with none: models ask whether there is one.
    with_dropout = [array_key(with_values(job, {"model_args.dropout": p})) for p in (0.1, 0.2, 0.0)]
    assert with_dropout[0] == with_dropout[1] != with_dropout[2]


def test_asha_trains_few_trials_to_the_end(tmp_path: Path):
    job = digits_job(steps=18, evaluate=EvaluateSettings(batch_size=360))
    settings = sweep_of("optimizer.lr=log:1e-4:0.3", kind="asha", trials=9, job=job, width=3)
    found = sweep_here(settings, tmp_path)
    states = [row["state"] for row in found["trials"]]
    assert states.count("dropped") >= 3
    assert states[0] == "finished"
    assert found["best"]["step"] == 18


def test_a_sweep_writes_the_curves_of_each_trial_for_tensorboard(tmp_path: Path):
    job = digits_job(steps=4, tensorboard=True, evaluate=EvaluateSettings(every_steps=2))
    sweep_here(sweep_of("optimizer.lr=0.01,0.1", job=job), tmp_path)
    for trial in (0, 1):
        found = EventAccumulator(str(tmp_path / "tensorboard" / f"trial-{trial:04d}"))
        found.Reload()
        assert set(found.Tags()["scalars"]) == {"train/loss", "test/loss", "test/accuracy"}
        assert [point.step for point in found.Scalars("train/loss")] == [1, 2, 3, 4]
        assert [point.step for point in found.Scalars("test/accuracy")] == [2, 4]
    # Few files are open at a time.
    boards = [TensorBoard() for _ in range(2 * MOST_OPEN)]
    for trial, board in enumerate(boards):
        board.on_start(StartRecord("many", tmp_path / "many", 0, {}, trial))
        board.on_step(StepRecord(1, 0.5))
        board.on_evaluate(EvaluationRecord(1, {"loss": math.nan}))
    assert len(TensorBoard._open) == MOST_OPEN
    for board in boards:
        board.on_end(EndRecord(1, "finished"))
    assert len(list((tmp_path / "many").glob("tensorboard/*/events*"))) == 2 * MOST_OPEN
    assert not TensorBoard._open


def test_a_diverged_member_of_a_population_goes_on_as_a_copy_of_a_good_one(tmp_path: Path):
    job = digits_job(steps=8, model=ModelSettings("support.odd_models:Net"))
    settings = sweep_of("optimizer.lr=0.05,1e308,0.1", job=job, kind="pbt", least_steps=4, width=3)
    found = sweep_here(settings, tmp_path)
    row = next(row for row in found["trials"] if row["trial"] == 1)
    assert row["state"] == "finished"
    assert row["step"] == 8
    assert row["values"]["optimizer.lr"] < 1.0
    assert math.isfinite(row["metrics"]["loss"])


def test_losses_that_trials_compute_differently_are_not_compared_unless_asked_for():
    plain = digits_job(steps=2, evaluate=EvaluateSettings(metric="none"))
    for over in ("loss_args.label_smoothing=0.0,0.1", "loss=cross-entropy,mse"):
        settings = sweep_of(over, job=plain)
        with pytest.raises(InputError, match=r"loss.*computed differently.*--metric"):
            check_comparable(settings, choose_metric(settings))
    asked = sweep_of("loss_args.label_smoothing=0.0,0.1", job=plain, metric="loss")
    check_comparable(asked, choose_metric(asked))
    other = sweep_of("loss_args.label_smoothing=0.0,0.1", job=digits_job(steps=2))
    check_comparable(other, choose_metric(other))


def test_a_nested_key_sets_the_nested_value_and_leaves_its_neighbours():
    model = ModelSettings("support.sweeping:norm_net", {"config": {"width": 4, "deep": {"rate": 0.1}}})
    job = digits_job(steps=2, model=model)
    values = {"model_args.config.deep.rate": 0.5, "model_args.other.share": 2, "data.extra.size": 3}
    made = with_values(job, values)
    assert made.model.args == {"config": {"width": 4, "deep": {"rate": 0.5}}, "other": {"share": 2}}
    assert made.data.options["extra"] == {"size": 3}
    assert job.model.args == {"config": {"width": 4, "deep": {"rate": 0.1}}}
    assert with_values(job, {"optimizer.lr": 0.25}).optimizer.options["lr"] == 0.25
    with pytest.raises(JobError, match=r"--over model_args.config.width.low: found 4 as 'width' in the job"):
        with_values(job, {"model_args.config.width.low": 1})
    assert array_key(made) != array_key(with_values(job, {**values, "model_args.other.share": 3}))
