"""Every workload has an example, which without its files trains in two stages and fused as in one process."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import plait
from plait.core.codec import encode
from plait.jobs.evaluate import measure_kept, measure_run
from plait.launcher.run_dir import RunDir
from plait.planner.schedules.in_flight import Schedule
from plait.schema.settings import TrainSettings
from support.sweeping import sweep_here, sweep_of, trial_alone
from support.training import largest_difference, saved_weights, train_here
from support.workloads import (
    EXAMPLES,
    MICROBATCHES,
    TINY,
    TRANSFORMERS,
    Stashed,
    job_of,
    train_in_stages,
)
from support.world import run_ranks

WORKLOADS = Path(plait.__file__).parent / "workloads"
FLUSH, STASH = Schedule.FLUSH, Schedule.STASH
# Trained together in one world each, which saves its start. The first is recurrent, with attention, and has
# sentences of other lengths; `make test-all` trains the others, too.
EVERY_TIME = ("gnmt",)
WORLDS = (
    EVERY_TIME,
    ("transformer",),
    ("vgg", "lstm"),
    ("bert",),
    ("mlp", "alexnet", "digits"),
    ("mobilenet", "pointnet", "dcgan"),
    ("awd-lstm", "gnmt-catalogues", "s2vt"),
    ("bert-pretraining", "squad"),
    ("gpt2", *TRANSFORMERS),
    ("lora_sweep",),
)
Trained = Callable[[str], "InStages"]
# The first test of a world waits for all of it, and on a busy machine tracing takes long.
pytestmark = pytest.mark.timeout(240)


@dataclass(frozen=True)
class InStages:
    """A workload's job on two workers under both schedules: what the ranks came to, and in which folders."""

    job: TrainSettings
    results: dict[Schedule, Any]
    folders: dict[Schedule, Path]
    # The parameters of each stage, as the stashed run had them.
    held: tuple[tuple[str, ...], tuple[str, ...]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Profiles, plans and trains the workloads of a world together, once."""

    @cache
    def world(names: tuple[str, ...]) -> dict[str, InStages]:
        folder = tmp_path_factory.mktemp("world")
        jobs = {name: job_of(name) for name in names}
        ranks = run_ranks(2, train_in_stages, jobs, (FLUSH, STASH), folder, deadline_s=220)
        for (name, kind), trained_run in ranks[0].items():
            # What a launcher leaves in a run's folder, for its evaluation.
            run = RunDir(folder / f"{name} {kind.value}")
            run.settings.write_text(json.dumps(encode(trained_run.settings)))
        return {name: gathered(name, jobs[name], ranks, folder) for name in names}

    def gathered(name: str, job: TrainSettings, ranks: list[Any], folder: Path) -> InStages:
        results = {kind: ranks[0][name, kind].result for kind in (FLUSH, STASH)}
        held = tuple(rank[name, STASH].held for rank in ranks)
        return InStages(job, results, {kind: folder / f"{name} {kind.value}" for kind in results}, held)

    return lambda workload: next(world(names)[workload] for names in WORLDS if workload in names)


def skip_without_library(workload: str) -> float:
    """How close to one process a workload comes: models of transformers compute their losses in float32."""
    if job_of(workload).loss != "model":
        return 1e-9
    pytest.importorskip("transformers")
    if workload == "lora_sweep":
        pytest.importorskip("peft", reason="needs peft: pip install 'plait[peft]'")
    return 1e-6


def bleu(folder: Path) -> Any:
    (kept,) = measure_kept(RunDir(folder), {"beam": 1})
    return kept["metrics"]["bleu"]


def in_pieces(job: TrainSettings) -> TrainSettings:
    """The job in one process with the microbatches of a pipeline; padding makes the means of these unlike."""
    size = job.data.batch_size // MICROBATCHES if job.loss == "model" else job.evaluate.batch_size
    return replace(job, accumulate=MICROBATCHES, evaluate=replace(job.evaluate, batch_size=size))


@pytest.mark.parametrize(
    "workload",
    [
        pytest.param(name, marks=() if names is EVERY_TIME else pytest.mark.extended)
        for names in WORLDS
        for name in names
    ],
)
def test_a_workload_is_planned_and_trains_in_two_stages_and_fused_as_in_one_process(
    workload: str, trained: Trained, tmp_path: Path
) -> None:
    close = skip_without_library(workload)
    run = trained(workload)
    job = in_pieces(run.job)
    plain, weights = train_here(job, tmp_path / "plain")
    assert largest_difference(saved_weights(run.folders[FLUSH]), weights) < close
    assert run.results[FLUSH].test == pytest.approx(plain.test, abs=close)
    if workload == "gnmt":
        RunDir(tmp_path / "plain").settings.write_text(json.dumps(encode(job)))
        assert bleu(run.folders[FLUSH]) == bleu(tmp_path / "plain")

    stashed = Stashed(run.job, run.held)
    assert largest_difference(saved_weights(run.folders[STASH]), stashed.train()) < close
    assert stashed.loss_of_first_batch() < stashed.losses[0]
    measured = measure_run(RunDir(run.folders[STASH]))["metrics"]
    found = run.results[STASH].test
    assert found == pytest.approx({name: measured[name] for name in found}, abs=close)

    rate = job.optimizer.options["lr"]
    sweep = sweep_of(f"optimizer.lr={rate},{rate / 2}", job=job, width=2)
    swept = sweep_here(sweep, tmp_path / "sweep")
    assert [(array["trials"], array["fused"]) for array in swept["arrays"]] == [([0, 1], True)]
    for row in swept["trials"]:
        is_plain = row["values"] == {"optimizer.lr": rate}
        alone = plain if is_plain else trial_alone(sweep, row["values"], tmp_path / "alone")[0]
        assert row["metrics"] == pytest.approx(alone.test, abs=close)
        assert row["train_loss"] == pytest.approx(alone.train_loss, abs=close)


def makes_models(path: Path) -> bool:
    """Whether a function of the module returns one of its own or torch's modules."""
    body = ast.parse(path.read_text()).body
    bases = {n.name: {ast.unparse(base) for base in n.bases} for n in body if isinstance(n, ast.ClassDef)}
    own = {name for name, found in bases.items() if "nn.Module" in found}
    made = [ast.unparse(n.returns) for n in body if isinstance(n, ast.FunctionDef) and n.returns is not None]
    return not {"nn.Sequential", "nn.Module", *own}.isdisjoint(made)


def test_every_module_that_makes_models_has_an_example_a_test_and_a_row_in_the_docs() -> None:
    examples = sorted(EXAMPLES.glob("*.yaml"))
    tested = {name for names in WORLDS for name in names}
    assert tested == {path.stem for path in examples} | TRANSFORMERS.keys()
    assert TINY.keys() == {path.stem for path in examples}
    named = {re.search(r"^model: ([\w.]+):(\w+)", path.read_text(), re.M): path for path in examples}
    factories = {match.group(1): match.group(2) for match in named if match is not None}
    docs = (EXAMPLES.parent / "docs" / "workloads.md").read_text()
    for path in examples:
        assert f"examples/{path.name}" in docs, path.name
    for path in WORKLOADS.rglob("*.py"):
        # Adapters are put on models that others make.
        if not makes_models(path) or path.parent.name == "adapters":
            continue
        module = ".".join(("plait", *path.relative_to(WORKLOADS.parent).with_suffix("").parts))
        package = module.rpartition(".")[0]
        assert module in factories or package in factories, f"{module} makes models and no example names it"
