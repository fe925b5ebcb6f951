"""docs/combinations.md: each row of its tables is refused before the first step, in words."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.utils.data import IterableDataset

from plait.core.errors import PlaitError
from plait.jobs.sweep import sweep
from plait.jobs.train import train
from plait.planner import save_plan
from plait.planner.schedules.in_flight import Schedule
from support.plans import planned

pytestmark = pytest.mark.usefixtures("forked_commands", "no_pictures")

PAGE = Path(__file__).parents[1] / "docs" / "combinations.md"
DIGITS: dict[str, Any] = {
    "name": "refused",
    "model": "support.training:small_net",
    "data": {"kind": "digits", "batch_size": 64},
    "optimizer": {"kind": "sgd", "lr": 0.05},
    "steps": 30,
    "device": "cpu",
}
AVERAGE = {"sync": "partial-reduce"}
RATES = {"optimizer.lr": [0.1, 0.2]}


class Images(IterableDataset[Any]):
    """A stream of unknown length."""

    def __init__(self, split: str) -> None:
        self.samples = [([[[0.0] * 8] * 8], 0)] * 64

    def __iter__(self) -> Iterator[Any]:
        return iter(self.samples)


class CountingLoss(nn.Module):
    """Counts its calls."""

    calls = 0

    def forward(self, output: Any, target: Any) -> Any:
        self.calls += 1
        return nn.functional.cross_entropy(output, target)


@dataclass(frozen=True)
class Refused:
    """A job that is refused with `words`, in stages if `stages` has the replicas of each."""

    words: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    parallel: Mapping[str, Any] = field(default_factory=dict)
    stages: tuple[int, ...] = ()
    schedule: Schedule = Schedule.FLUSH
    # Trials that are tried over the job, with the options of the sweep.
    over: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    def run(self, folder: Path) -> None:
        """Run the job, or its trials."""
        parallel = dict(self.parallel)
        if self.stages:
            parallel |= {"plan": str(folder / "plan.json"), "workers": sum(self.stages)}
            save_plan(planned(self.stages, self.schedule).stages.plan, folder / "plan.json")
        job = {**DIGITS, **self.changes, "parallel": parallel, "run_dir": str(folder / "runs")}
        if self.over:
            sweep(job, self.over, **self.options)
        else:
            train(job)


def continued(**changes: Any) -> dict[str, Any]:
    """A job whose samples continue those of the batch before."""
    data = {
        "kind": "plait.workloads.data.continued_text:synthetic_text", "streams": 8, "length": 16,
        "vocabulary": 64, "windows": 16, "batch_size": 8, "shuffle": False,
    }  # fmt: skip
    model = "plait.workloads.language.awd_lstm:awd_lstm_tiny"
    return {"model": model, "model_args": {"vocabulary": 64, "streams": 8}, "data": data, **changes}


def stream(**data: Any) -> dict[str, Any]:
    return {"data": {"kind": "test_combinations:Images", "batch_size": 16, "shuffle": False, **data}}


# By the row's first two columns; where a column lists several, there is a job for each.
ROWS: dict[tuple[str, str], list[Refused]] = {
    (
        "`precision: fp16`",
        "schedules `stash`, `2bw` and others that do not drain; pipelines that average",
    ): [
        Refused("precision: found 'fp16'", {"precision": "fp16"}, stages=(1, 1), schedule=Schedule.STASH),
        Refused(
            "precision: found 'fp16'", {"precision": "fp16"}, stages=(1, 1), schedule=Schedule.TWO_BUFFERED
        ),
        Refused("precision: found 'fp16'", {"precision": "fp16"}, AVERAGE, stages=(2, 2)),
        Refused("precision: found 'fp16'", {"precision": "fp16"}, AVERAGE, stages=(2, 2), over=RATES),
        Refused("precision: found 'fp16'", {}, AVERAGE, stages=(2, 2), over=["precision=float32,fp16"]),
    ],
    ("`sync_options.average: gradients`", "`precision: fp16`"): [
        Refused(
            "parallel.sync_options.average: found 'gradients'",
            {"precision": "fp16"},
            {**AVERAGE, "workers": 2, "sync_options": {"average": "gradients"}},
        )
    ],
    ("`clip_norm`", "pipelines that average"): [
        Refused("clip_norm: needs the whole model's gradient", {"clip_norm": 1.0}, AVERAGE, stages=(2, 2)),
        Refused("clip_norm: needs", {}, AVERAGE, stages=(2, 2), over={"clip_norm": [None, 1.0]}),
    ],
    ("an optimizer that couples all parameters (a norm over all)", "two or more stages"): [
        Refused(
            "from all parameters together",
            {"optimizer": {"kind": "support.silent_cases:GlobalNorm", "lr": 0.1}},
            stages=(1, 1),
        )
    ],
    (
        "an optimizer that draws random numbers",
        "two or more stages",
    ): [
        Refused(
            "draws random numbers",
            {"optimizer": {"kind": "support.silent_cases:Noisy", "lr": 0.1}},
            stages=(1, 1),
        )
    ],
    ("`parallel.vertical_sync`", "a schedule other than `stash`"): [
        Refused("parallel.vertical_sync: found schedule flush", {}, {"vertical_sync": True}, stages=(1, 1))
    ],
    ("`parallel.depths`, `recompute`", "`parallel.elastic: true` under `all-reduce`"): [
        Refused("parallel.depths: found", {}, {"depths": {0: 2}, "elastic": True}, stages=(1, 1)),
        Refused("parallel.recompute: found", {}, {"recompute": [0], "elastic": True}, stages=(1, 1)),
    ],
    (
        "`parallel.min_workers` below the workers of one pipeline",
        "elastic pipelines side by side",
    ): [Refused("parallel.min_workers", {}, {**AVERAGE, "elastic": True, "min_workers": 1}, stages=(2, 2))],
    ("`accumulate`", "a pipeline"): [
        Refused("accumulate: a pipeline accumulates by itself", {"accumulate": 2}, stages=(1, 1))
    ],
    (
        "samples that continue those of the batch before (`continued-text`)",
        "averaging, replicated stages, `--replicas`, elastic workers, changes of the batch size",
    ): [
        Refused("parallel.sync: found 'partial-reduce'", continued(), {**AVERAGE, "workers": 2}),
        Refused("parallel.elastic: found true", continued(), {"elastic": True, "workers": 2}),
        Refused("--replicas", continued(), {"workers": 2}, over=RATES, options={"replicas": 2, "width": 1}),
        Refused(
            "adapt: found steps",
            continued(adapt=[{"kind": "steps", "changes": {5: {"batch_size": 16}}}]),
        ),
    ],
    ("a stream of samples", "averaging; several loader processes"): [
        Refused("stream", stream(), {**AVERAGE, "workers": 2}),
        Refused("data.loaders", stream(loaders=2)),
    ],
    ("`epochs` of a stream whose length is unknown", "stages; a sweep"): [
        Refused("epochs", {**stream(), "epochs": 1, "steps": None}, stages=(1, 1)),
        Refused("epochs", {**stream(), "epochs": 1, "steps": None}, over=RATES, options={"width": 1}),
    ],
    ("a loss with state or weights of its own", "workers that do not all compute every loss"): [
        Refused(
            "changes self.calls when it is called",
            {"loss": "test_combinations:CountingLoss"},
            {**AVERAGE, "workers": 2},
        ),
    ],
    ("schedules that do not drain", "fused trials in stages; pipelines that average"): [
        Refused("schedule", stages=(1, 1), schedule=Schedule.STASH, over=RATES, options={"width": 2}),
        Refused("parallel.schedule: found stash", {}, AVERAGE, stages=(2, 2), schedule=Schedule.STASH),
    ],
    ("`--search pbt` over what shapes the model or its data", ""): [
        Refused(
            "data.batch_size",
            over={"data.batch_size": [16, 32]},
            options={"search": "pbt", "trials": 4, "width": 1},
        )
    ],
    ("the policies `workers`, `sync`, `plan`, `topology`", "a sweep"): [
        Refused("adapt[0].kind: found workers", {"adapt": [{"kind": "workers", "most": 4}]}, over=RATES),
        Refused("adapt[0].kind: found sync", {"adapt": [{"kind": "sync"}]}, over=RATES),
        Refused("adapt[0].kind: found plan", {"adapt": [{"kind": "plan"}]}, stages=(1, 1), over=RATES),
        Refused("adapt[0].kind: found topology", {"adapt": [{"kind": "topology"}]}, over=RATES),
    ],
    ("`compile: true`", "a sweep; schedule `zero-bubble`"): [
        Refused("compile: found true, but trials", {"compile": True}, over=RATES),
        Refused(
            "compile: found schedule zero-bubble",
            {"compile": True},
            stages=(1, 1),
            schedule=Schedule.ZERO_BUBBLE,
        ),
    ],
    ("`parallel.sync: auto`", "elastic pipelines"): [
        Refused("parallel.sync: found 'auto'", {}, {"sync": "auto", "elastic": True}, stages=(2, 2))
    ],
    ("a topology as a graph of ranks", "elastic workers; stages with replicas"): [
        Refused(
            "parallel.topology: found",
            {},
            {"topology": "test_combinations:a_chain", "elastic": True, "workers": 2},
        ),
        Refused("parallel.topology: found", {}, {"topology": "test_combinations:a_chain"}, stages=(2, 1)),
    ],
    ("batches with fewer samples than workers", ""): [
        Refused(
            "data.batch_size: found 2 for 3", {"data": {"kind": "digits", "batch_size": 2}}, {"workers": 3}
        )
    ],
}


def a_chain(workers: int) -> list[dict[str, Any]]:
    return [{"reduce": [[rank, rank - 1] for rank in range(1, workers)]}]


def rows_of_the_page() -> set[tuple[str, str]]:
    """The first two columns of each row of its tables."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    cells = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines]
    return {(found, other) for found, other, _ in cells} - {("found", "with"), ("---", "---")}


def test_every_row_of_the_page_has_a_job_and_every_job_a_row() -> None:
    assert rows_of_the_page() == set(ROWS)


@pytest.mark.parametrize(
    "refused", list(chain(*ROWS.values())), ids=lambda each: re.sub(r"\W+", "-", each.words)
)
def test_it_is_refused_before_the_first_step(refused: Refused, tmp_path: Path) -> None:
    with pytest.raises(PlaitError, match=re.escape(refused.words)) as failure:
        refused.run(tmp_path)
    assert not list(tmp_path.glob("runs/*/*/checkpoints/*")), failure.value
