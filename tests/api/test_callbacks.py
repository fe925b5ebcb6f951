"""Callbacks: what they are told, what is refused, and what happens where one fails."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import plait
from plait.callbacks import Callback, CallbackError, MLflow, WandB
from plait.callbacks.records import ChangeRecord, CheckpointRecord, EndRecord, StartRecord, StepRecord
from plait.core.errors import InputError, JobError, PlaitError
from plait.schema.settings import CallSettings, CheckpointSettings, EvaluateSettings
from support.sweeping import sweep_here, sweep_of
from support.training import digits_job, train_here

X = torch.randn(64, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = (X.sum(1) > 0).long()


class Told(Callback):
    def __init__(self) -> None:
        self.records: list[Any] = []

    on_start = on_step = on_evaluate = on_checkpoint = on_change = on_end = lambda self, record: (
        self.records.append(record)
    )


class Failing:
    def __init__(self, event: str = "on_step", step: int = 2) -> None:
        self._fails = (event, step)

    def on_step(self, record: StepRecord) -> None:
        if ("on_step", record.step) == self._fails:
            raise ValueError("no room")

    def on_end(self, record: EndRecord) -> None:
        if self._fails[0] == "on_end":
            raise KeyError("end")


class Misspelt:
    def on_steps(self, record: StepRecord) -> None:
        """Never called."""


class WithoutRecord:
    def on_step(self) -> None:
        """Cannot be called."""


def train(folder: Path, callbacks: Any, **keys: Any) -> plait.RunResult:
    common: dict[str, Any] = {"steps": 4, "batch_size": 16, "precision": "float64", "verify": "off"}
    return plait.train(
        model=lambda: torch.nn.Linear(4, 2),
        data=((X, Y), (X, Y)),
        name="t",
        callbacks=callbacks,
        run_dir=str(folder),
        log_every_steps=1,
        **common | keys,
    )


def test_a_callback_is_told_what_the_record_of_the_run_has_in_its_order(tmp_path: Path) -> None:
    told = Told()
    table = {"kind": "steps", "changes": {2: {"batch_size": 8}}}
    best = {"keep_best": "loss"}
    result = train(tmp_path, [told], evaluate={"every_steps": 2}, adapt=[table], checkpoint=best)
    folder = Path(result.run)
    names = [type(record).__name__.removesuffix("Record") for record in told.records]
    in_turn = ["Step", "Step", "Checkpoint", "Evaluation", "Checkpoint"]
    assert names == ["Start", *in_turn, "Change", *in_turn, "End"]
    start, *_, end = told.records
    assert (start.label, start.folder, start.step) == ("t-001", folder, 0)
    assert start.settings["optimizer"]["kind"] == "sgd"
    losses = [(each.step, each.loss) for each in told.records if isinstance(each, StepRecord)]
    assert losses == plait.open_run(folder).history("loss")
    (changed,) = (each for each in told.records if isinstance(each, ChangeRecord))
    assert (changed.step, changed.kind, changed.values["batch_size"]) == (2, "BatchSizeChange", 8)
    saved = [each for each in told.records if isinstance(each, CheckpointRecord)]
    assert [(each.step, each.best) for each in saved] == [(2, False), (2, True), (4, False), (4, True)]
    assert all(each.path.is_dir() for each in saved)
    assert end == EndRecord(4, "finished")
    told.records.clear()
    train(tmp_path, [told], steps=5, resume=True)
    assert (told.records[0].step, told.records[1].step) == (4, 5)


@pytest.mark.parametrize("event", ["on_step", "on_end"])
def test_a_callback_that_fails_ends_the_run_with_its_name_and_the_others_with_it(
    event: str, tmp_path: Path
) -> None:
    told = Told()
    words = rf"callbacks: Failing failed in {event} after step \d: .* \(test_callbacks.py, line \d+\)"
    with pytest.raises(CallbackError, match=words):
        train(tmp_path, [told, Failing(event)])
    assert isinstance(told.records[-1], EndRecord)
    # A run can go on without it.
    assert train(tmp_path, None, resume=True, run_folder=str(tmp_path / "t-001")).step == 4


def test_a_callback_that_fails_in_a_trial_ends_the_sweep(tmp_path: Path) -> None:
    callbacks = (CallSettings("test_callbacks:Failing", {"step": 1}),)
    job = digits_job(steps=2, log_every_steps=1, callbacks=callbacks)
    with pytest.raises(PlaitError, match="callbacks: Failing failed in on_step after step 1"):
        sweep_here(sweep_of("optimizer.lr=0.01,0.1", job=job), tmp_path)


class Written(Callback):
    """Writes what it is told to a file of its trial."""

    def on_start(self, record: StartRecord) -> None:
        self._file = record.folder / f"{record.label}.txt"

    def on_checkpoint(self, record: CheckpointRecord) -> None:
        self._write(f"checkpoint {record.step} {record.path.is_dir()}")

    def on_end(self, record: EndRecord) -> None:
        self._write(f"end {record.step}")

    def _write(self, line: str) -> None:
        with self._file.open("a") as file:
            print(line, file=file)


def test_trials_tell_their_callbacks_of_checkpoints(tmp_path: Path) -> None:
    job = digits_job(
        steps=4,
        checkpoint=CheckpointSettings(every_steps=2),
        callbacks=(CallSettings("test_callbacks:Written"),),
    )
    found = sweep_here(sweep_of("optimizer.lr=0.001,0.1", job=job), tmp_path)
    best, other = (row["trial"] for row in found["trials"])
    assert told_of(tmp_path, best) == ["checkpoint 2 True", "checkpoint 4 True", "end 4"]
    assert told_of(tmp_path, other)[0] == "checkpoint 2 True"
    assert told_of(tmp_path, other)[-1] == "end 4"


def told_of(folder: Path, trial: int) -> list[str]:
    return (folder / f"{folder.name}-trial-{trial:04d}.txt").read_text().splitlines()


@pytest.mark.usefixtures("forked_commands", "no_pictures")
def test_a_sweep_is_given_callbacks_that_are_objects(tmp_path: Path) -> None:
    class Local(Written):
        """Of a function, so that it cannot be imported."""

    job = {
        "name": "t",
        "model": "support.training:small_net",
        "data": {"kind": "support.training:digits", "batch_size": 64},
        "steps": 2,
        "checkpoint": {"every_steps": 1},
        "verify": "off",
        "run_dir": str(tmp_path),
    }
    with pytest.raises(InputError, match="Misspelt has a method 'on_steps'"):
        plait.sweep(job, {"optimizer.lr": [0.1, 0.2]}, callbacks=[Misspelt()])
    result = plait.sweep(job, {"optimizer.lr": [0.1, 0.2]}, callbacks=[Local()])
    for trial in (0, 1):
        assert {"checkpoint 1 True", "end 2"} <= set(told_of(Path(result.run), trial))
    with pytest.raises(InputError, match="goes on with those it was begun with"):
        plait.sweep(job, resume=result.run, callbacks=[Local()])


@pytest.mark.extended
def test_a_callback_that_fails_on_the_first_of_two_workers_ends_both(tmp_path: Path) -> None:
    with pytest.raises(PlaitError, match="worker 0 .* callbacks: Failing failed in on_step after step 2"):
        train(tmp_path, [Failing], workers=2)


def test_the_others_are_told_nothing_and_training_is_that_without_callbacks(tmp_path: Path) -> None:
    evaluate = EvaluateSettings(every_steps=2)
    job = digits_job(steps=3, evaluate=evaluate, callbacks=(CallSettings("support.told:Told"),))
    _, told = train_here(job, tmp_path / "told")
    _, plain = train_here(digits_job(steps=3, evaluate=evaluate), tmp_path / "plain")
    assert all(torch.equal(told[name], plain[name]) for name in plain)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (Misspelt, "Misspelt has a method 'on_steps', which no event calls; did you mean 'on_step'?"),
        (Misspelt(), "Misspelt has a method 'on_steps'"),
        (WithoutRecord(), r"on_step of WithoutRecord .*such as def on_step\(self, record\)"),
        (5, "found 5, expected an object with methods such as on_step"),
        (torch.nn.Linear, "callbacks.options: Linear needs 'in_features'"),
        ({"call": Failing, "options": {"stop": 1}}, "Failing takes no 'stop'; did you mean 'step'?"),
        ({"cal": Failing}, "expected an object, a name, or a dict with 'call'"),
        ("plait.callbacks:Tensorboard", "did you mean 'TensorBoard'?"),
        (lambda: 3, "int has none of the methods on_start"),
    ],
)
def test_what_is_no_callback_is_refused_before_the_first_step(wrong: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(JobError, match=words):
        train(tmp_path, [wrong])
    with pytest.raises(InputError, match="callbacks: found .* expected a list"):
        train(tmp_path, wrong)


class Calls:
    """Stands for a package: remembers the calls of its functions."""

    def __init__(self, answers: dict[str, Callable[..., Any]]) -> None:
        self.calls: list[tuple[str, Any, Any]] = []
        self._answers = answers

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((name, args, kwargs))
            return self._answers.get(name, lambda *_, **__: None)(*args, **kwargs)

        return call

    def of(self, name: str) -> list[tuple[Any, Any]]:
        return [(args, kwargs) for each, args, kwargs in self.calls if each == name]


def test_runs_and_trials_are_logged_to_wandb(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = Calls({})
    package = Calls({"init": lambda **_: run})
    module = ModuleType("wandb")
    module.init = package.init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    train(tmp_path, [{"call": WandB, "options": {"project": "mine", "mode": "offline"}}], steps=2)
    ((_, options),) = package.of("init")
    assert (options["project"], options["mode"], options["name"]) == ("mine", "offline", "t-001")
    assert (options["config"]["optimizer.kind"], options["config"]["data.batch_size"]) == ("sgd", 16)
    assert [kwargs["step"] for _, kwargs in run.of("log")] == [1, 2, 2]
    assert {"test/loss", "test/accuracy"} == run.of("log")[-1][0][0].keys()
    assert run.of("finish") == [((), {"exit_code": 0})]
    trial = WandB()
    trial.on_start(StartRecord("t", Path(tmp_path) / "t-002", 0, {}, 3, {"lr": 0.1}))
    options = package.of("init")[-1][1]
    assert (options["group"], options["name"]) == ("t-002", "t-002-trial-0003")


def test_runs_are_logged_to_mlflow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = SimpleNamespace(info=SimpleNamespace(run_id="r"))
    client = Calls({"search_runs": lambda *_, **__: [], "create_run": lambda *_, **__: made})
    module = ModuleType("mlflow")
    module.entities = SimpleNamespace(Param=lambda key, value: (key, value))  # type: ignore[attr-defined]
    module.tracking = SimpleNamespace(MlflowClient=lambda uri: client)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlflow", module)
    train(tmp_path, [{"call": MLflow, "options": {"experiment": "mine"}}], steps=2)
    assert client.of("create_experiment") == [(("mine",), {})]
    assert ("optimizer.kind", "sgd") in client.of("log_batch")[0][1]["params"]
    logged = [(args[1], kwargs["step"]) for args, kwargs in client.of("log_metric")]
    assert {("train/loss", 1), ("train/loss", 2), ("test/accuracy", 2)} <= set(logged)
    assert client.of("set_terminated") == [(("r", "FINISHED"), {})]
