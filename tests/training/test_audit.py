"""Steps that are taken twice: a run that trains something else than plain PyTorch is found, and no other."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plait.planner.schedules.in_flight import Schedule
from plait.schema.settings import (
    DataSettings,
    EvaluateSettings,
    ModelSettings,
    OptimizerSettings,
    SyncSettings,
    TrainSettings,
    VerifySettings,
)
from plait.training.audit.schedule import USUAL_COST, is_audited, next_audited
from support.audited import audits
from support.further import but_further
from support.plans import planned
from support.training import digits_job, largest_difference, train_rank
from support.world import run_ranks


def audited_steps(settings: TrainSettings, steps: int, cost: float = USUAL_COST) -> list[int]:
    return [step + 1 for step in range(steps) if is_audited(settings, step, cost)]


def test_steps_are_audited_ever_more_rarely_and_after_evaluations() -> None:
    assert audited_steps(digits_job(), 1000) == [1, 2, 8, 128]
    often = digits_job(evaluate=EvaluateSettings(every_steps=10))
    assert audited_steps(often, 100) == [1, 2, 8, 11, 21, 41, 81]
    rarely = digits_job(evaluate=EvaluateSettings(every_steps=100))
    assert audited_steps(rarely, 1000) == [1, 2, 8, 101, 201, 401, 801]
    only = replace(rarely, verify=VerifySettings(audit="evaluations"))
    assert audited_steps(only, 1000) == [101, 201, 401, 801]
    assert audited_steps(digits_job(verify=VerifySettings(audit="off")), 100) == []
    assert audited_steps(digits_job(), 1000, cost=3.5) == [1, 16, 256]


@pytest.mark.parametrize("every", [None, 7, 100])
def test_the_next_audited_step_is_the_first_that_is_audited(every: int | None) -> None:
    settings = digits_job(evaluate=EvaluateSettings(every_steps=every))
    steps = [number - 1 for number in audited_steps(settings, 3000)]
    for step in range(500):
        assert next_audited(settings, step) == next(at for at in steps if at >= step)


HERE = "support.audited"


# Parts of these are in the others, and averaged weights in test_so_is_what_each_does_alone.
FURTHER = ("sgd", "a count that modules share", "an unused parameter", "bf16", "local-sgd", "flush")


def at_once() -> dict[str, TrainSettings]:
    return {name: job for name, job in right().items() if name not in FURTHER}


def further() -> dict[str, TrainSettings]:
    return {name: right()[name] for name in FURTHER}


@functools.cache
def right() -> dict[str, TrainSettings]:
    """Made when they are needed: they trace their models."""
    return {
        "sgd": digits_job(steps=9),
        "adamw, accumulated and clipped": digits_job(
            optimizer=OptimizerSettings("adamw", {"lr": 0.003}), accumulate=3, clip_norm=0.5, steps=5
        ),
        "shares of unlike sizes, and none": digits_job(data=DataSettings("digits", 131), steps=12),
        "a count that modules share": digits_job(
            model=ModelSettings(f"{HERE}:Shared"), evaluate=EvaluateSettings(every_steps=2), steps=5
        ),
        "an unused parameter": digits_job(model=ModelSettings("support.training:HalfUsed"), steps=3),
        "batch norm and dropout": digits_job(
            model=ModelSettings("support.training:norm_net"), precision="float32", steps=9
        ),
        "bf16": digits_job(model=ModelSettings("support.training:norm_net"), precision="bf16", steps=3),
        "local-sgd": digits_job(steps=5, sync=SyncSettings("local-sgd")),
        "flush": planned((1, 1), Schedule.FLUSH, steps=5),
        "stash": planned((1, 1), Schedule.STASH, steps=5),
        "2bw": planned((1, 1), Schedule.TWO_BUFFERED, steps=5, clip_norm=0.5),
        "stages with batch norm and dropout": planned(
            (1, 1),
            Schedule.FLUSH,
            steps=5,
            model=ModelSettings("support.training:norm_net"),
            precision="float32",
        ),
    }


# After these there is no process group any more.
AT_THEIR_OWN_PACE = {
    "partial-reduce": digits_job(steps=5, sync=SyncSettings("partial-reduce")),
    "partial-reduce of gradients": digits_job(
        steps=5, clip_norm=0.1, sync=SyncSettings("partial-reduce", {"average": "gradients"})
    ),
    "ad-psgd": digits_job(steps=5, sync=SyncSettings("ad-psgd")),
}


@functools.cache
def with_replicas() -> dict[str, TrainSettings]:
    """The same with stages of two workers."""
    return {
        "gpipe": planned((2, 1), Schedule.GPIPE, steps=5, model=ModelSettings("support.training:norm_net")),
        "zero-bubble": planned((1, 2), Schedule.ZERO_BUBBLE, steps=5),
        "stash": planned((2, 1), Schedule.STASH, steps=5),
    }


def largest_allowed(job: TrainSettings) -> float:
    return 1e-12 if job.precision == "float64" else 1e-4


@pytest.mark.parametrize(
    ("workers", "make"),
    [
        (2, at_once),
        pytest.param(2, further, marks=pytest.mark.extended),
        pytest.param(3, with_replicas, marks=pytest.mark.extended),
    ],
)
def test_what_workers_do_together_is_what_plain_pytorch_does(
    tmp_path: Path, workers: int, make: Callable[[], dict[str, TrainSettings]]
) -> None:
    jobs = make()
    for name, (steps, largest, words) in run_ranks(workers, audits, jobs, tmp_path)[0].items():
        assert words == ""
        cost = 1.0 if jobs[name].pipeline is None else USUAL_COST
        assert steps == len(audited_steps(jobs[name], jobs[name].steps or 0, cost)), name
        assert largest < largest_allowed(jobs[name]), name


# Gradients are averaged in the same way as weights; the largest difference is of what each does alone.
@pytest.mark.parametrize("name", but_further(AT_THEIR_OWN_PACE, "partial-reduce of gradients", "ad-psgd"))
def test_so_is_what_each_does_alone_before_it_averages(tmp_path: Path, name: str) -> None:
    found = [each[name] for each in run_ranks(2, audits, {name: AT_THEIR_OWN_PACE[name]}, tmp_path)]
    # Each step has a share for each worker, whoever takes it.
    assert sum(steps for steps, _, _ in found) == 2 * len(audited_steps(AT_THEIR_OWN_PACE[name], 5))
    assert all(largest < 1e-12 and words == "" for _, largest, words in found)


def apart_with_and_without(rank: int, folder: Path) -> float:
    job = digits_job(model=ModelSettings(f"{HERE}:CountsOutside"), steps=9)
    unaudited = replace(job, verify=VerifySettings(audit="off"))
    found = [train_rank(rank, each, folder / str(i))[1] for i, each in enumerate((job, unaudited))]
    return largest_difference(*found)


def test_an_audit_changes_nothing_that_forward_counts_outside_of_the_model(tmp_path: Path) -> None:
    assert run_ranks(2, apart_with_and_without, tmp_path) == [0.0, 0.0]


def staged(block: str, **changes: Any) -> TrainSettings:
    """A model whose stages are cut through a block, without any check before the first step."""
    model = ModelSettings(f"{HERE}:with_block", {"block": block})
    return planned((1, 1), Schedule.FLUSH, model=model, verify=VerifySettings("off"), steps=4, **changes)


OWN_RATE = OptimizerSettings(f"{HERE}:OwnRate", {"lr": 0.1})
LORA = ModelSettings(f"{HERE}:Lora")


@functools.cache
def wrong() -> dict[str, tuple[TrainSettings, str, str]]:
    """Jobs that train rightly, the part of an engine that is made wrong, and what the audit then says."""
    return {
        "merged after evaluation": (
            digits_job(model=LORA, evaluate=EvaluateSettings(every_steps=3), steps=9),
            "flags alone",
            "step 4 .* the gradient of down: none",
        ),
        "its own rate": (
            digits_job(optimizer=OWN_RATE, steps=3),
            "rates anew",
            "step 2 .* the parameter 0.weight: off by",
        ),
        "noise of its own": (
            digits_job(optimizer=OptimizerSettings(f"{HERE}:Noisy", {"lr": 0.1}), steps=3),
            "a seed for each worker",
            "step 1 .* the parameter 0.weight: not the same on workers 0 and 1",
        ),
        "gradients in parts": (
            digits_job(model=ModelSettings(f"{HERE}:SharedAndCheckpointed"), steps=3),
            "later parts are lost",
            "step 1 .* the gradient of shared.weight: off by",
        ),
        "counting": (
            staged("counting"),
            "state in Python is not seen",
            "step 1 .* the attribute 2.calls, which forward changes: 0, but 4 in",
        ),
        "counting in its class": (
            staged("counting in its class"),
            "state in Python is not seen",
            "step 1 .* CountingInClass.counted in 2, which forward changes: 0, but 4 in",
        ),
        "counting in a dict": (
            staged("counting in a dict"),
            "state in Python is not seen",
            r"step 1 .* the attribute 2.state, which forward changes: "
            r"\[\['calls', 0\]\], but \[\['calls', 4\]\]",
        ),
        "used before": (
            digits_job(model=ModelSettings(f"{HERE}:Shared"), steps=2),
            "a model that was used",
            r"step 1 .*\[\['calls', 2\]\], but \[\['calls', 0\]\] in a newly built model",
        ),
        "clipped": (
            staged("remembering", clip_norm=0.05),
            "stages clip for themselves",
            "step 1 .* the gradient of 1.weight: off by",
        ),
        "its own rate, alone": (
            digits_job(optimizer=OWN_RATE, steps=3, sync=SyncSettings("partial-reduce")),
            "rates anew",
            "step 2 .* the parameter 0.weight: off by",
        ),
    }


# Further kinds of state in Python, and of what makes an optimizer's step another one.
ALSO_WRONG = ("counting in its class", "counting in a dict", "its own rate", "clipped")


@pytest.mark.parametrize("is_further", [False, pytest.param(True, marks=pytest.mark.extended)])
def test_steps_that_are_not_plain_pytorchs_end_the_run(is_further: bool, tmp_path: Path) -> None:
    tried = {name: each for name, each in wrong().items() if (name in ALSO_WRONG) == is_further}
    jobs = {name: job for name, (job, _, _) in tried.items()}
    results = run_ranks(2, audits, jobs, tmp_path, {name: broken for name, (_, broken, _) in tried.items()})
    assert results[0].keys() == tried.keys()
    for name, (_, _, words) in results[0].items():
        assert re.search(tried[name][2], words), f"{name}: {words}"
        assert "a checkpoint of step" in words


# That right jobs pass is shown above, with others.
@pytest.mark.extended
def test_the_same_jobs_are_trained_rightly(tmp_path: Path) -> None:
    jobs = {name: job for name, (job, _, _) in wrong().items() if "alone" not in name}
    for name, (_, largest, words) in run_ranks(2, audits, jobs, tmp_path)[0].items():
        assert (words, largest < 1e-12) == ("", True), name


def test_a_run_may_go_on_with_a_warning_and_what_nobody_goes_by_may_differ(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    jobs = {
        "warned": replace(wrong()["its own rate"][0], verify=VerifySettings(on_difference="warn")),
        "remembering": staged("remembering"),
    }
    broken = {"warned": "rates anew", "remembering": "state in Python is not seen"}
    results = run_ranks(2, audits, jobs, tmp_path, broken)[0]
    assert results["warned"][::2] == (2, "")
    assert results["remembering"][0] == 2
    assert results["remembering"][2] == ""
