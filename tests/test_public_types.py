"""The names that `plait` offers: a checker knows their types, and results print and dump."""

from __future__ import annotations

import ast
import inspect
import json
import typing
from dataclasses import FrozenInstanceError, fields, is_dataclass
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from torch import nn

import plait
from plait.core.codec import decode
from plait.schema.results import ArrayResult

RUN: dict[str, Any] = {
    "reason": "finished",
    "step": 20,
    "steps": 20,
    "train_loss": 0.5,
    "test": {"loss": 0.4, "accuracy": 0.934},
    "best": {"step": 10, "loss": 0.3, "accuracy": 0.95},
    "samples_per_s": 5120.0,
    "seconds": 1.25,
    "workers": 2,
    "device": "cpu",
    "verified_s": 0.5,
    "run": "runs/t-001",
    "mode": {"loss": "min", "accuracy": "max"},
    "warnings": ["the test split is trained on"],
}
TRIALS = [
    {
        "trial": number,
        "state": "finished",
        "step": 20,
        "values": {"optimizer.lr": 0.1, "model_args.sizes": [1, 2]},
        "metrics": {"loss": 0.25, "accuracy": None},
        "train_loss": None,
        "why": "",
    }
    for number in range(12)
]
SWEEP: dict[str, Any] = {
    "reason": "finished",
    "step": 12,
    "steps": 12,
    "search": "grid",
    "metric": "loss",
    "best": TRIALS[0],
    "trials": TRIALS,
    "arrays": [{"number": 0, "worker": 0, "trials": [0, 1], "most": 2, "fused": True, "why": ""}],
    "seconds": 2.0,
    "trial_steps_per_s": 120.0,
    "workers": 1,
    "replicas": 1,
    "run": "runs/t-002",
    "mode": "min",
    "warnings": [],
}


@pytest.mark.parametrize(
    ("kind", "plain"),
    [
        (plait.RunResult, RUN),
        (plait.RunResult, {k: v for k, v in RUN.items() if k not in ("verified_s", "run")}),
        (plait.RunResult, {**RUN, "steps": None, "train_loss": None, "test": {}, "best": None}),
        (plait.SweepResult, SWEEP),
        (plait.SweepResult, {**SWEEP, "best": None, "trials": [], "arrays": []}),
    ],
)
def test_a_result_dumps_as_the_json_it_was_read_from(kind: type[Any], plain: dict[str, Any]):
    result = decode(kind, json.loads(json.dumps(plain)))
    # The order of the keys, and whole numbers that stay whole, are part of it.
    assert json.dumps(result.to_dict()) == json.dumps(plain)
    assert decode(kind, result.to_dict()) == result


def test_a_result_prints_for_people():
    assert str(decode(plait.RunResult, RUN)).splitlines() == [
        "finished at step 20 of 20 after 1.25 s",
        "5,120 samples/s on 2 x cpu",
        "training loss 0.5",
        "test loss 0.4, accuracy 93.4%",
        "best at step 10: loss 0.3, accuracy 95.0%",
        "warning: the test split is trained on",
        "runs/t-001",
    ]
    shown = str(decode(plait.SweepResult, SWEEP)).splitlines()
    assert shown[:3] == [
        "finished: 12 of 12 trials in 2 s, 120 trial steps/s on 1 worker",
        "best first, by loss:",
        "  trial 0 (optimizer.lr 0.1, model_args.sizes [1, 2]): test loss 0.25, accuracy not a number, "
        "finished at step 20",
    ]
    assert shown[-2:] == ["  and 2 more", "runs/t-002"]


def test_a_result_of_before_warnings_were_kept_is_read():
    old = {key: value for key, value in RUN.items() if key not in ("mode", "warnings")}
    assert decode(plait.RunResult, old).to_dict() == {**old, "mode": {}, "warnings": []}


def test_a_result_cannot_be_changed():
    result = decode(plait.RunResult, RUN)
    with pytest.raises(FrozenInstanceError):
        result.step = 3  # type: ignore[misc]


def test_runs_and_sweeps_are_declared_to_return_their_results():
    # Imported by a checker only: a job is started without torch.
    names = {"Module": nn.Module, "Optimizer": torch.optim.Optimizer, "Tensor": torch.Tensor}
    assert typing.get_type_hints(plait.train, localns=names)["return"] is plait.RunResult
    assert typing.get_type_hints(plait.sweep, localns={"optuna": optuna})["return"] is plait.SweepResult


@pytest.mark.parametrize("name", sorted({*plait.__all__} - {"__version__"}))
def test_every_parameter_and_result_of_a_public_name_has_a_type(name: str):
    offered = getattr(plait, name)
    if is_dataclass(offered):
        assert all(hint is not Any for hint in typing.get_type_hints(offered).values())
        assert all(field.type for field in fields(offered))
        return
    function = offered.__init__ if inspect.isclass(offered) else offered
    parameters = list(inspect.signature(function).parameters.values())[inspect.isclass(offered) :]
    # What is passed on as it comes may be anything.
    parameters = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    assert [p.name for p in parameters if p.annotation in (p.empty, "Any")] == []
    assert inspect.isclass(offered) or inspect.signature(function).return_annotation not in ("", "Any")


def test_a_checker_sees_exactly_the_names_that_are_offered():
    (block, *_) = [
        node
        for node in ast.parse(Path(plait.__file__).read_text()).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    seen = {
        alias.asname or alias.name: (node.module, alias.name)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == plait._HOMES
    assert {*seen, "__version__"} == {*plait.__all__}


def test_arrays_of_a_result_are_values_too():
    assert decode(plait.SweepResult, SWEEP).arrays == (ArrayResult(0, 0, (0, 1), 2, True, ""),)


# What a checker sees as Any, as in torch: whatever a model, a data set or a function returns, states that the
# user saves, and values of a job file.
UNKNOWN = {
    "DataLoader.__iter__",
    "DataLoader.state_dict",
    "DataParallel.forward",
    "DataParallel.load_state_dict",
    "DataParallel.state_dict",
    "Elastic.state_dict",
    "FusedModule.call",
    "FusedModule.forward",
    "FusedModule.map",
    "FusedOptimizer.parameters",
    "FusedOptimizer.state_dict",
    "FusedOptimizer.step",
    "Lion.step",
    "Pipeline.evaluate",
    "Pipeline.state_dict",
    "RunResult.to_dict",
    "SweepResult.to_dict",
}


def returns_any(offered: type[Any]) -> list[str]:
    """The methods and properties of a class that are declared to return Any, or something with it."""
    special = ("__call__", "__iter__", "__getitem__", "__enter__")
    found = []
    for name, member in vars(offered).items():
        function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        if inspect.isfunction(function) and (not name.startswith("_") or name in special):
            declared = str(function.__annotations__.get("return", "Any"))
            found += [f"{offered.__name__}.{name}"] if "Any" in declared else []
    return found


def test_what_is_returned_as_any_is_listed():
    offered = [getattr(plait, name) for name in plait.__all__ if name != "__version__"]
    functions = [each for each in offered if inspect.isfunction(each)]
    assert [each.__name__ for each in functions if "Any" in str(each.__annotations__["return"])] == []
    classes = [each for each in offered if inspect.isclass(each)]
    assert {name for each in classes for name in returns_any(each)} <= UNKNOWN
