"""Ordinary code that is easily trained wrong: trained as a plain loop does, or refused in words."""

from __future__ import annotations

import contextlib
import json
import logging
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
import torch.nn.functional as F

from plait.core.errors import InputError
from plait.launcher.run_dir import RunDir
from plait.schema.settings import SyncSettings
from plait.training.audit.record import DifferenceError
from support import plans
from support.silent_cases import (
    CASES,
    EVALUATE_EVERY,
    WORKERS,
    Rows,
    SilentCase,
    build_model,
    parts_of,
    plain,
    settings,
)
from support.training import largest_difference, saved_weights, train_here, train_rank
from support.world import run_ranks

# What is refused, in all ways of training in stages, or in one way.
STATE = "on which its next one depends, and stages would not keep it"
REFUSED = {
    "clamped weights | recompute": "'b.weight' is trained, and written by forward, which is correct only if",
    "clamped weights | stash": "'b.weight' is trained, and written by forward, which is correct only if",
    "clamped weights | 2bw": "'b.weight' is trained, and written by forward, which is correct only if",
    "count in a dict": f"CountsInDict changes self.state, {STATE}",
    "every seventh forward": f"EverySeventh changes self.n, {STATE}",
    "countdown": f"Countdown changes self.left, {STATE}",
    "annealer": f"Anneals changes self.annealer, {STATE}",
    "window": f"Window changes self.window, {STATE}",
    "own random numbers": f"OwnNumbers changes self.numbers, {STATE}",
    "counting block | replicas": "1 changes self.calls, on which its next one depends, but stage 0",
    "global": "forward of 0 and 2 changes the global _CALLS, on which its next one depends, and is used in",
    "class attribute": f"changes CountsInClass.calls, {STATE}",
    "swapped in evaluation | flush": "train() of SwapsAverage does more than set the mode",
    "task name": "found 'even' at ['task'] of a batch's inputs, where the trace had 'odd', and the code of",
    "inverse temperature": "and the code of TemperedInverse depends on it; give it as a tensor",
    "first batch | two": "the parameter scale: not the same on workers 0 and 1, which train together",
    "first batch | replicas": "`if not self.ready:`: this reads the value of a tensor",
    "rows carried over | two": "forward writes buffer 'rows' for single samples",
    "rows carried over | replicas": "this fixes the batch size",
    "memory bank | two": "forward writes buffer 'bank' for single samples",
    "memory bank | replicas": "forward writes buffer 'bank' for single samples",
    "tied in memory | flush": "'a.weight' and 'c.weight' share memory but are not one tensor",
    "norm of all": "GlobalNorm computes an update from all parameters together",
}
# Whatever the way of training: `make test` shows it in the first.
ALWAYS_REFUSED = {
    "stream by rank": "worker 1 read other samples than worker 0",
    "stream by rank, later": "worker 1 read other samples than worker 0",
    "loss with weights": "has a parameter 'temperature', which would not be trained; make it part of the",
    "loss with a centre": "Centred changes its tensors when it is called, which no checkpoint",
    "lazy": "Lazy has a parameter without a size yet, b.weight",
    # Trained, with a warning: what it draws nobody can know.
    "kept augmentation": "data.kind: samples were others where they had been read for an epoch before",
    "own augmentation": "data.kind: samples are not the same when they are read again",
}
REFUSED |= {f"{name} | {mode}": words for name, words in ALWAYS_REFUSED.items() for mode in WORKERS}


def first_stage(case: SilentCase, folder: Path) -> set[str]:
    """The parameters of the first of two stages, as the run has cut them."""
    stages = json.loads(RunDir(folder).verified.read_text())["stages"]
    layers = plans.layers_of(settings(case, "one"))
    return {name for layer in stages[0] for name in layers[layer]}


def judge(case: SilentCase, mode: str, folder: Path) -> str:
    """`right`, or how far the trained weights are off those of a plain loop."""
    found = {name: value for name, value in saved_weights(folder).items() if value.is_floating_point()}
    if parts_of(mode) is None:
        before = build_model(settings(case, "one").model, 0).double().state_dict()
        return "right" if case.holds is None or case.holds(found, before) else "wrong"
    if case.against is not None:
        expected = saved_weights(folder.with_name("against"))
    else:
        expected = plain(case, mode, first_stage(case, folder) if mode == "stash" else ())
    off = largest_difference(found, {name: expected[name] for name in found})
    return "right" if off < 1e-10 else f"off by {off:.3g}"


def alone(case: SilentCase, folder: Path) -> None:
    """Train a case in this process, though there may be others."""
    with mock.patch.object(dist, "is_initialized", return_value=False):
        train_here(settings(case, "one"), folder)


def outcomes(
    rank: int, mode: str, names: list[str], folder: Path, layers: dict[str, dict[str, tuple[str, ...]]]
) -> dict[str, str]:
    """What becomes of each case: `right`, or the words that refuse it or, on the first rank, warn of it."""
    plans.LAYERS.update(layers)
    found, warnings = {}, list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("plait").addHandler(handler)
    for name in names:
        warnings.clear()
        own = folder / name.replace(" ", "-")
        try:
            if CASES[name].against is not None and rank == 0:
                alone(CASES[name], own.with_name("against"))
            train_rank(rank, settings(CASES[name], mode), own)
            found[name] = judge(CASES[name], mode, own) if rank == 0 else "right"
        except InputError as failure:
            found[name] = str(failure)
        except Exception:
            found[name] = traceback.format_exc()
        if found[name].startswith("off by"):
            found[name] += f", with warnings: {'; '.join(warnings)}"
        if dist.is_initialized():
            dist.barrier()
    return found


# The cases of a mode are shared out to as many worlds.
SHARES = {"flush": 2, "two": 2, "one": 2}


def all_but(*names: str) -> tuple[str, ...]:
    return tuple(name for name in CASES if name not in names)


# What another way of training could do to them in a way of its own; the others are for `make test-all`.
AT_ONCE = {
    "two": all_but(
        # One process evaluates them, and accumulates over them, as two workers do.
        *(
            "merged in evaluation",
            "swapped in evaluation",
            "optimizer with modes",
            "optimizer around another",
        ),
        *("extra state", "loss instance", "loss by a global", "loss by gradient mode", "set_epoch"),
        "gradients clipped by a hook",  # masks are hooks, too
        "stream by rank, later",  # which is refused as one that divides itself from its first sample
        "checkpointed, all used",
    ),
    "replicas": ("counting block", "first batch", "memory bank"),
    "flush": all_but(
        # What is kept in a dict, a class, a generator or one block is refused as what is kept in a global.
        *("every seventh forward", "countdown", "annealer", "window"),
        *("count in a dict", "class attribute", "own random numbers"),
        # One process, or two workers, read, evaluate and resume them as stages do.
        *("frozen norm", "from evaluation mode", "extra state", "set_epoch", "stream that counts epochs"),
        *("loss that counts", "loss instance", "steps in groups", "schedule-free", "own rate"),
        *("swapped in evaluation", "optimizer around another", "optimizer with modes"),
        # In stages under another schedule, or as a value at another place.
        *("masked gradients", "kept gradients", "weights in a list", "counting block", "momentum encoder"),
        *("mean teacher", "clamped weights", "gradients clipped by a hook", "task name inside"),
    ),
    "recompute": ("clamped weights", "counting block"),
    "zero-bubble": ("kept gradients", "masked gradients"),
    "2bw": ("weights in a list",),
    "stash": ("mean teacher", "clamped weights", "own rate"),
}


def is_new(name: str, mode: str) -> bool:
    """Whether no mode before this one refuses the case in the same words."""
    modes = [own for own in WORKERS if own in CASES[name].modes]
    return name not in ALWAYS_REFUSED or mode == modes[0]


def worlds() -> Iterator[Any]:
    """The modes, each with the names of the cases that one world trains in it."""
    for mode in WORKERS:
        names = [case.name for case in CASES.values() if mode in case.modes]
        if mode != "flush":  # what is refused in all stages is refused before a schedule comes in
            names = [name for name in names if name not in REFUSED]
        at_once = [name for name in names if name in AT_ONCE.get(mode, names) and is_new(name, mode)]
        for share in range(SHARES.get(mode, 1)):
            yield pytest.param(mode, at_once[share :: SHARES.get(mode, 1)], id=f"{mode}-{share}")
        if rest := [name for name in names if name not in at_once]:
            yield pytest.param(mode, rest, id=f"{mode}-rest", marks=pytest.mark.extended)


@pytest.mark.parametrize(("mode", "names"), worlds())
def test_ordinary_code_is_trained_as_a_plain_loop_does_or_refused_in_words(
    mode: str, names: list[str], tmp_path: Path
) -> None:
    expected = {name: REFUSED.get(f"{name} | {mode}", REFUSED.get(name, "right")) for name in names}
    for name in names:
        with contextlib.suppress(Exception):  # which the ranks tell of
            settings(CASES[name], mode)  # traces the model, once for all ranks and modes
    ranks = run_ranks(WORKERS[mode], outcomes, mode, names, tmp_path, plans.LAYERS, deadline_s=100)
    wrong = {
        name: found[name]
        for rank, found in enumerate(ranks)
        for name in names
        if not is_expected(found[name], expected[name], rank)
    }
    assert wrong == {}


def refusal(rank: int, name: str, folder: Path, **changes: Any) -> str:
    try:
        train_rank(rank, settings(CASES[name], "two", **changes), folder)
    except DifferenceError as failure:
        return str(failure)
    return ""


def test_rows_that_members_keep_for_themselves_are_refused_by_the_first_audit(tmp_path: Path) -> None:
    sync = SyncSettings("partial-reduce")
    words = run_ranks(2, refusal, "memory bank", tmp_path, sync=sync, deadline_s=60)
    found = "step 1 is not what plain PyTorch does: model: forward writes buffer 'bank' for single samples"
    assert all(found in each for each in words)


def is_expected(found: str, expected: str, rank: int) -> bool:
    return found == "right" if expected == "right" else expected in found or (rank > 0 and "right" in found)


@pytest.mark.parametrize("name", [case.name for case in CASES.values() if "resume" in case.modes])
def test_a_resumed_run_goes_on_with_all_that_model_and_optimizer_keep(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    train_here(settings(case, "one", steps=EVALUATE_EVERY), tmp_path)
    _, found = train_here(settings(case, "one"), tmp_path, resume=True)
    expected = plain(case, "one")
    assert largest_difference(found, {key: expected[key] for key in found}) < 1e-10


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("CountsInDict", "state"),
        ("HiddenBuffer", "mean"),
        ("Net", None),
        ("ExtraState", None),
        ("Cache", None),
    ],
)
def test_what_no_checkpoint_holds_is_said_with_the_first(
    model: str, name: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train_here(settings(SilentCase("kept", ("one",), model), "one"), tmp_path)
    words = [each for each in caplog.messages if "no checkpoint holds it: a resumed run begins" in each]
    assert [each.partition(" of ")[0] for each in words] == ([] if name is None else [f"model: {name}"])


@pytest.mark.parametrize("mode", ["flush", "stash"])
def test_stages_are_evaluated_with_all_that_was_trained(mode: str, tmp_path: Path) -> None:
    """Also where a stage uses in evaluation alone what another one trains."""
    job = settings(SilentCase("average", (mode,), "EvaluatesWithAverage"), mode)
    (result, _), _ = run_ranks(2, train_rank, job, tmp_path)
    model = build_model(job.model, 0).double().eval()
    model.load_state_dict(saved_weights(tmp_path))
    loss = F.cross_entropy(model(Rows("test").x), Rows("test").y)
    assert result.test["loss"] == pytest.approx(float(loss.detach()), rel=1e-12)
