"""`plait.train` with objects is the run of the same job by names, and `open_run` reads what it left."""

from __future__ import annotations

import functools
import logging
import random
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import plait
from plait.core.errors import InputError
from support.training import digits, small_net

NO_LOOP = Path(__file__).parents[2] / "examples" / "no_loop.py"
COMMON: dict[str, Any] = {"precision": "float64", "device": "cpu", "verify": "off", "log_every_steps": 1}
OPTIMIZER: dict[str, Any] = {"kind": "sgd", "lr": 0.05, "momentum": 0.9}


def _weights(run: str) -> dict[str, Tensor]:
    return dict(plait.open_run(run).model().state_dict())


def _is_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def _by_names(folder: Path, workers: int) -> dict[str, Tensor]:
    content = {
        **COMMON,
        "name": "named",
        "model": "support.training:small_net",
        "model_args": {"dropout": 0.2},
        "data": {"kind": "support.training:digits", "batch_size": 60},
        "loss": "torch.nn.functional:cross_entropy",
        "optimizer": OPTIMIZER,
        "steps": 4,
        "run_dir": str(folder),
        "parallel": {"workers": workers},
    }
    return _weights(plait.train(content).run)


def _train_local(folder: Path, **keys: Any) -> tuple[plait.RunResult, list[int]]:
    """Train objects that no other process can import."""
    calls: list[int] = []

    def net() -> nn.Module:
        return small_net(dropout=0.2)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        calls.append(len(target))
        return nn.functional.cross_entropy(output, target)

    def right(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
        return (output.argmax(-1) == target).sum(), len(target)

    result = plait.train(
        model=net,
        data=(digits("train"), digits("test")),
        loss=loss,
        optimizer=functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9),
        metric=right,
        batch_size=60,
        run_dir=str(folder),
        **COMMON | keys,
    )
    return result, calls


def test_one_worker_is_this_process_and_ends_as_the_job_by_names(tmp_path: Path) -> None:
    torch.manual_seed(7)
    random.seed(7)
    before = torch.get_rng_state(), random.getstate(), list(logging.getLogger("plait").handlers)
    half, calls = _train_local(tmp_path, steps=2)
    assert calls
    assert half.step == 2
    whole, _ = _train_local(tmp_path, steps=4, resume=True)
    assert (whole.run, whole.step) == (half.run, 4)
    assert set(whole.test) == {"loss", "right"}
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), logging.getLogger("plait").handlers) == before[1:]
    assert _is_equal(_weights(whole.run), _by_names(tmp_path, 1))


@pytest.mark.usefixtures("forked_commands")
def test_objects_on_two_workers_end_as_the_job_by_names(tmp_path: Path) -> None:
    result, calls = _train_local(tmp_path, steps=4, workers=2)
    assert (result.workers, calls) == (2, [])
    assert _is_equal(_weights(result.run), _by_names(tmp_path, 2))


def test_a_module_starts_with_its_weights_and_keeps_them(tmp_path: Path) -> None:
    model = small_net().double()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    images, labels = torch.rand(12, 1, 8, 8, dtype=torch.float64), torch.arange(12) % 10
    common: dict[str, Any] = {
        **COMMON,
        "model": model,
        "data": ((images, labels), (images, labels)),
        "steps": 1,
        "batch_size": 12,
        "run_dir": str(tmp_path),
    }
    result = plait.train(optimizer=torch.optim.SGD, **common)
    assert _is_equal(dict(model.state_dict()), start)
    nn.functional.cross_entropy(model(images), labels).backward()
    trained = {name: start[name] - 1e-3 * value.grad for name, value in model.named_parameters()}
    for name, value in _weights(result.run).items():
        torch.testing.assert_close(value, trained[name], rtol=0, atol=1e-14)


def test_a_run_is_opened_with_its_history_its_models_and_other_data(tmp_path: Path) -> None:
    model = functools.partial(small_net, dropout=0.0)
    checkpoint = {"every_steps": 2, "keep_best": "loss"}
    with pytest.raises(InputError, match="no such run"):
        plait.open_run("small", tmp_path)
    result = plait.train(
        **COMMON,
        name="small",
        model=model,
        data=(digits("train"), digits("test")),
        optimizer=OPTIMIZER,
        steps=4,
        metrics=["accuracy", {"call": lambda output, target: (target.sum(), len(target)), "name": "own"}],
        evaluate={"every_steps": 2},
        checkpoint=checkpoint,
        run_dir=str(tmp_path),
    )
    run = plait.open_run("small", tmp_path)
    assert str(run.folder) == result.run
    assert run.result == result
    assert [step for step, _ in run.history("loss")] == [1, 2, 3, 4]
    assert run.history("loss")[-1][1] == pytest.approx(result.train_loss, abs=1e-15)  # each has one step
    assert run.history("test_loss")[-1] == (4, result.test["loss"])
    assert run.evaluate()["loss"] == pytest.approx(result.test["loss"], abs=1e-12)
    assert run.evaluate(best=True)["loss"] == pytest.approx((result.best or {})["loss"], abs=1e-12)
    other = digits("train")
    images = torch.stack([image for image, _ in other]).double()
    with torch.no_grad():
        output = run.model()(images)
    target = torch.tensor([int(label) for _, label in other])
    right = (output.argmax(-1) == target).double().mean().item()
    found = run.evaluate(other, metrics=["accuracy", lambda output, target: (len(target), len(target))])
    loss = nn.functional.cross_entropy(output, target).item()
    expected = {"loss": loss, "accuracy": right, "<lambda>": 1.0}
    assert found == pytest.approx(expected, abs=1e-9)
    assert run.evaluate((images, target), metrics=[]) == pytest.approx({"loss": loss}, abs=1e-9)
    assert run.evaluate(metrics=["own"]) == pytest.approx({k: result.test[k] for k in ("loss", "own")})
    with pytest.raises(InputError, match="found 'owm', which neither the job nor Plait has.*'own'"):
        run.evaluate(metrics=["owm"])
    with pytest.raises(InputError, match="two metrics are two functions"):
        run.evaluate(metrics=[lambda output, target: (output.mean(), output.std())])
    with pytest.raises(InputError, match="expected a list"):
        run.evaluate(metrics="own")
    with pytest.raises(InputError, match=r"loader\.dataset"):
        run.evaluate(DataLoader(other))
    with pytest.raises(InputError, match="did you mean 'test_loss'"):
        run.history("testloss")


def test_a_run_without_its_objects_says_what_is_missing(tmp_path: Path) -> None:
    result, _ = _train_local(tmp_path, steps=1)
    (file,) = Path(result.run).glob("objects/*.pkl")
    content = file.read_bytes()
    file.write_bytes(content + b"more")
    with pytest.raises(InputError, match=r"model: .*its content has changed"):
        plait.open_run(result.run).model()
    file.unlink()
    with pytest.raises(InputError, match="model: its run was started with objects of a script"):
        plait.open_run(result.run).model()


class OwnError(Exception):
    """An error of a user's model."""


def test_an_error_of_the_only_worker_is_the_users_own(tmp_path: Path) -> None:
    def broken(output: Tensor, target: Tensor) -> Tensor:
        raise OwnError

    with pytest.raises(OwnError):
        plait.train(
            **COMMON, model=small_net, data=digits("train"), loss=broken, steps=1, run_dir=str(tmp_path)
        )


MODEL, LOCK = small_net(), threading.Lock()
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a misspelt keyword": ({"batchsize": 8}, "did you mean 'batch_size'"),
    "a job's key": ({"epohcs": 8}, "did you mean 'epochs'"),
    "an optimizer": ({"optimizer": torch.optim.SGD(MODEL.parameters(), lr=1.0)}, "functools.partial"),
    "a number": ({"optimizer": 0.1}, "expected a dict"),
    "a loader": ({"data": DataLoader(digits("train"), batch_size=8)}, "loader.dataset, and batch_size=8"),
    "two tensors": ({"data": (torch.zeros(4), torch.zeros(4))}, "test_inputs"),
    "inputs and test inputs": (
        {"data": ((torch.zeros(4), torch.zeros(2)), None)},
        "arrays of 4 and 2 samples",
    ),
    "a wrapped model": ({"model": nn.DataParallel(small_net())}, "give it the model itself"),
    "no model": ({"model": 3}, "expected a class, a function"),
    "no data": ({"data": None}, "needs model and data"),
    "arguments of a module": ({"model": MODEL, "model_args": {"classes": 3}}, "made already"),
    "an option": ({"optimizer": functools.partial(torch.optim.SGD, rate=0.1)}, "takes no 'rate'"),
    "a loss with weights": ({"loss": nn.Linear(2, 2)}, "would not be trained"),
    "a lock": ({"loss": lambda output, target, held=LOCK: output}, "cannot be pickled"),
    "other hosts": ({"cluster": {"hosts": ["w0:2"]}}, "kept on this machine"),
    "a model first": ({"job": small_net}, "by its keyword"),
    "a job too": ({"job": "job.yaml"}, "besides a job"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_trained_is_refused_in_words(tmp_path: Path, case: str) -> None:
    keys, why = WRONG[case]
    given = {
        "model": small_net,
        "data": (digits("train"), None),
        "steps": 1,
        "run_dir": str(tmp_path / "runs"),
    }
    with pytest.raises(InputError, match=why):
        plait.train(**COMMON | given | keys)
    assert not (tmp_path / "runs").exists()


@pytest.mark.extended
def test_a_script_trains_its_own_classes_and_others_read_its_run(tmp_path: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)

    done = run(str(NO_LOOP))
    assert done.returncode == 0, done.stderr
    assert "accuracy 9" in done.stdout
    shutil.move(tmp_path / "runs" / "net-001", tmp_path / "moved")
    measured = run("-m", "plait", "evaluate", "moved")
    assert measured.returncode == 0, measured.stderr
    shutil.rmtree(tmp_path / "moved" / "objects")
    lost = run("-m", "plait", "evaluate", "moved")
    assert lost.returncode == 2
    assert "model: its run was started with objects of a script" in lost.stderr
