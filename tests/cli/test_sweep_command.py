"""`plait sweep` as a person uses it: real processes, wrong input, stop and resume, and the same in Python."""

from __future__ import annotations

import csv
import io
import json
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import plait
import plait.jobs.sweep as sweeps
from plait.cli.sweep import SweepDisplay, _check_asked, show_result, trials_table
from plait.core.codec import encode
from plait.core.errors import InputError
from plait.jobs.evaluate import measure_run
from plait.jobs.sweep import go_on, make_sweep, placement_of, sweep
from plait.launcher.run_dir import RunDir
from plait.planner import save_plan
from plait.planner.schedules.in_flight import Schedule
from plait.report.sweep import as_csv
from plait.schema.placement import Placement
from plait.sweeping.worker import check_request
from support.plans import planned
from support.sweeping import same_table, sweep_here

pytestmark = pytest.mark.usefixtures("forked_commands")

JOB = """
name: t
model: plait.workloads.mlp:mlp_tiny
data: {kind: digits, batch_size: 64}
optimizer: {kind: sgd, lr: 0.1}
steps: 20
precision: float64
"""

CONTENT: dict[str, Any] = {
    "name": "t",
    "model": "plait.workloads.mlp:mlp_tiny",
    "data": {"kind": "digits", "batch_size": 64},
    "optimizer": {"kind": "sgd", "lr": 0.1},
    "steps": 20,
}


def run(*words: str, cwd: Path, timeout: float = 100) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "plait", *words], cwd=cwd, capture_output=True, text=True, timeout=timeout
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path


def test_two_workers_sweep_stop_and_go_on_as_a_group_to_the_table_of_one(folder: Path):
    over = ["optimizer.lr=log:1e-3:1:2", "optimizer.momentum=0,0.9"]
    words = [word for one in over for word in ("--over", one)]
    command = [
        sys.executable,
        "-m",
        "plait",
        "sweep",
        "job.yaml",
        *words,
        "--width",
        "3",
        "-np",
        "2",
        "--json",
    ]
    process = subprocess.Popen([*command, "--json"], cwd=folder, stdout=subprocess.PIPE, text=True)
    _wait_for(folder / "runs/t-001/events/rank0.jsonl")
    process.send_signal(signal.SIGTERM)
    stopped = json.loads(process.communicate(timeout=60)[0])
    assert process.returncode == (130 if stopped["reason"] == "stopped" else 0)
    done = run("sweep", "job.yaml", "--resume", "runs/t-001", "-np", "2", "--replicas", "2", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "4 of 4 trials" in done.stdout
    assert "wrote runs/t-001 (trials.csv, curves.png, sweep.html); next: plait evaluate" in done.stdout

    found = json.loads((folder / "runs/t-001/result.json").read_text())
    one = sweep_here(make_sweep(plait.read_job(folder / "job.yaml"), over, width=3), folder / "one")
    assert found["reason"] == "finished"
    assert same_table(one, found)
    measured = measure_run(RunDir(folder / "runs/t-001"))
    assert measured["metrics"] == pytest.approx(one["best"]["metrics"], abs=1e-9)
    _check_files(folder / "runs/t-001")


def _check_files(folder: Path) -> None:
    with (folder / "trials.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 4
    assert float(rows[0]["test accuracy"]) == max(float(row["test accuracy"]) for row in rows)
    page = (folder / "sweep.html").read_text()
    trials = page.partition('<div class="sortable">')[2].partition("</table>")[0].split("<tr>")[2:]
    # In the order of the table; and a curve of each.
    assert [int(re.search(r"<td>(\d+)</td>", row)[1]) for row in trials] == [
        int(row["trial"]) for row in rows
    ]  # type: ignore[index]
    assert page.partition("training loss")[2].partition("</svg>")[0].count("<polyline") == 4
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")


def _wait_for(path: Path) -> None:
    end = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < end, f"no {path} within 60 s"
        time.sleep(0.02)


def test_a_mistake_is_answered_with_one_message_and_status_two(folder: Path):
    done = run("sweep", "job.yaml", cwd=folder)
    assert done.returncode == 2
    assert "--over: found none" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (folder / "runs").exists() or not list((folder / "runs").iterdir())


def test_a_mistake_that_only_the_rooms_can_see_is_refused_by_the_hosts():
    settings = make_sweep(plait.make_job(CONTENT), ["optimizer.lrr=0.1"])
    with pytest.raises(InputError, match="optimizer.lrr: SGD takes no 'lrr'; did you mean 'lr'?"):
        check_request({"settings": encode(settings), "folder": "run", "resume": False})


@pytest.mark.parametrize(
    ("over", "options", "message"),
    [
        (["optimzer.lr=0.1"], {}, "--over optimzer: unknown key; did you mean 'optimizer'?"),
        (["data.batch_size=big"], {}, "--over data.batch_size: found 'big', expected a valid integer"),
        (["data.batch_size=0"], {}, "data.batch_size: found 0"),
        (["epochs=1,2", "steps=3,4"], {}, "expected one of epochs and steps"),
        (["parallel.workers=1,2"], {}, "belongs to the sweep as a whole"),
        (["optimizer.lr=0.1", "optimizer.lr=0.2"], {}, "optimizer.lr is given twice"),
        (["optimizer.lr=log:1e-3:1"], {}, "a range has no end of values; add a count"),
        (["optimizer.lr=log:1e-3:1"], {"search": "random"}, "say how many trials to draw with --trials N"),
        (["optimizer.lr=log:1e-3:1"], {"search": "random", "trials": 0}, "--trials: found 0"),
        (["optimizer.lr=0.1"], {"trials": 3}, "--search grid tries all 1"),
        (["optimizer.lr=0.1"], {"search": "asah"}, "did you mean 'asha'?"),
        (["optimizer.lr=0.1"], {"width": 0}, "--width: found 0"),
        (["data.batch_size=64,2"], {"replicas": 3}, "--replicas: found 3, but a batch has 2 samples"),
        (["model_args.width=8,16"], {"search": "pbt"}, "population-based training changes numbers"),
        (["optimizer.lr=0.1"], {"search": "pbt"}, "a population of 1"),
        (["optimizer.lr=log:3:1:2"], {}, "0 < low < high"),
        ([], {}, "--over: found none"),
        (["max_grad_norm=0,1"], {}, "--over max_grad_norm: found 0, expected greater than 0"),
        (["data.drop_last=1,2"], {}, "--over data.drop_last: found 1, expected true or false"),
        (["clip_norm=1", "max_grad_norm=2"], {}, "clip_norm is given twice"),
    ],
)
def test_what_cannot_be_swept_is_refused_before_anything_starts(over: list[str], options: Any, message: str):
    job = plait.make_job(CONTENT)
    with pytest.raises(InputError) as failure:
        placement_of(job, make_sweep(job, over, **options))
    assert message in str(failure.value)


def test_a_sweep_has_as_many_workers_as_train_an_array_where_the_job_does_not_say():
    job = plait.make_job(CONTENT)
    assert placement_of(job, make_sweep(job, ["optimizer.lr=0.1"], replicas=2)).workers == 2
    with pytest.raises(InputError, match="found 2, which does not divide the 3 workers; use -np 2"):
        placement_of(
            plait.make_job({**CONTENT, "parallel": {"workers": 3}}),
            make_sweep(job, ["optimizer.lr=0.1"], replicas=2),
        )


def test_keys_to_sweep_over_may_have_their_conventional_names():
    made = make_sweep(plait.make_job(CONTENT), ["data.drop_last=true,false", "max_grad_norm=1.0"])
    assert [(d.key, d.values) for d in made.over] == [
        ("data.last_batch", ("drop", "keep")),
        ("clip_norm", (1.0,)),
    ]


def test_only_a_sweep_can_be_resumed(tmp_path: Path):
    (tmp_path / "settings.json").write_text("{}")
    with pytest.raises(InputError, match="expected a run's folder or name"):
        sweep(plait.make_job(CONTENT), resume=str(tmp_path / "none"))
    with pytest.raises(InputError, match="holds no run that can go on"):
        sweep(plait.make_job(CONTENT), resume=str(tmp_path))


def test_a_sweep_goes_on_with_what_may_change_and_refuses_what_may_not():
    job, over = plait.make_job(CONTENT), ["optimizer.lr=log:1e-3:1"]
    begun = make_sweep(job, over, "asha", 8, width=4, eta=3)
    assert go_on(begun) == begun
    assert go_on(begun, width=2, replicas=2, trials=12) == replace(
        begun, width=2, replicas=2, search=replace(begun.search, trials=12)
    )
    assert go_on(begun, search="asha", eta=3, seed=0, metric="accuracy", trials=8) == begun
    for asked, words in (
        ({"eta": 2}, "--eta: found 2, but the sweep was begun with 3"),
        ({"search": "random"}, "--search: found 'random', but the sweep was begun with 'asha'"),
        ({"metric": "loss"}, "--metric: found 'loss', but the sweep was begun with 'accuracy'"),
        ({"seed": 1}, "--seed: found 1, but the sweep was begun with 0"),
        ({"least_steps": 3}, "--least-steps: found 3, but the sweep was begun with None"),
        ({"trials": 4}, "--trials: found 4, but the sweep was begun with 8"),
        ({"width": 0}, "--width: found 0, expected 1 or more"),
    ):
        with pytest.raises(InputError, match=words):
            go_on(begun, **asked)
    for kind in ("halving", "grid"):
        listed = make_sweep(job, ["optimizer.lr=0.1,0.2"], kind)
        with pytest.raises(InputError, match=f"--trials: found 9, but --search {kind} lists its trials"):
            go_on(listed, trials=9)
    halving = make_sweep(job, over, "halving", 8)
    with pytest.raises(InputError, match="compares all of its trials with each other"):
        go_on(halving, trials=9)


def test_a_sweep_that_goes_on_says_what_of_its_job_it_does_not_follow(caplog):
    begun = make_sweep(plait.make_job(CONTENT), ["optimizer.lr=0.1,0.2"])
    sweeps._warn_of_changes(begun, plait.make_job({**CONTENT, "run_dir": "elsewhere"}))
    assert not caplog.records
    sweeps._warn_of_changes(begun, plait.make_job(CONTENT, ["data.batch_size=7", "optimizer.momentum=0.3"]))
    assert "data.batch_size is 7 (was" in caplog.text
    assert "optimizer.momentum is 0.3 (was" in caplog.text


def test_a_sweep_asked_for_more_trials_draws_them_and_repeats_none(tmp_path: Path):
    # Arrays of other widths may take other ways through their matrix products, whichever was timed faster.
    job = plait.make_job({**CONTENT, "steps": 3, "precision": "float64"})
    begun = make_sweep(job, ["optimizer.lr=log:1e-3:1"], "random", 3, width=2)
    first = sweep_here(begun, tmp_path)
    more = sweep_here(go_on(begun, trials=5, width=4), tmp_path, resume=True)
    whole = sweep_here(make_sweep(job, ["optimizer.lr=log:1e-3:1"], "random", 5, width=2), tmp_path / "whole")
    assert len(first["trials"]) == 3
    assert same_table(more, whole)
    assert more["arrays"][-1]["trials"] == [3, 4]


def test_a_sweep_of_pipelines_has_as_many_workers_as_its_plan(tmp_path: Path):
    settings = planned((1, 1), Schedule.FLUSH)
    assert settings.pipeline is not None
    file = tmp_path / "plan.json"
    save_plan(settings.pipeline.plan, file)
    job = plait.make_job({**CONTENT, "parallel": {"plan": str(file)}})
    made = make_sweep(job, ["optimizer.lr=0.1,0.2"])
    assert [host.slots for host in placement_of(job, made).hosts] == [2]
    three = plait.make_job({**CONTENT, "parallel": {"plan": str(file), "workers": 3}})
    with pytest.raises(InputError, match=r"--plan: found a plan for 2 workers, which do not divide the 3"):
        placement_of(three, make_sweep(three, ["optimizer.lr=0.1,0.2"], width=2))


def test_replicas_of_a_plan_to_be_made_share_the_workers(monkeypatch: pytest.MonkeyPatch):
    asked: list[Placement] = []

    def measure(settings: Any, placement: Placement, request: Any) -> Any:
        asked.append(placement)
        return planned((1, 1), Schedule.FLUSH), planned((1, 1), Schedule.FLUSH).stages.plan

    monkeypatch.setattr("plait.measure.auto_plan.planned", measure)
    parallel = {"plan": "model-parallel", "workers": 4}
    job = plait.make_job({**CONTENT, "parallel": parallel})
    made = make_sweep(job, ["optimizer.lr=0.1,0.2"], width=2, replicas=2)
    assert asked[0].workers == 2
    assert placement_of(job, made).workers == made.workers_per_array == 4
    with pytest.raises(InputError, match="--replicas: found 3, which does not divide the 4 workers"):
        make_sweep(job, ["optimizer.lr=0.1,0.2"], width=2, replicas=3)


def test_a_person_reads_which_trials_are_fused_and_why_others_are_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    job = plait.make_job({**CONTENT, "steps": 2, "precision": "float64"})
    settings = make_sweep(job, ["optimizer.lr=0.1,0.2", "optimizer.kind=sgd,adamax"], width=4)
    found = {**sweep_here(settings, tmp_path), "run": str(tmp_path)}
    result = plait.SweepResult.of_plain(found)
    fused = "trials 0, 2 train fused, 2 at once, on worker 0"
    alone = "trial 1 trains alone on worker 0: optimizer.kind 'adamax' has no fused form"
    show_result(result, Path("job.yaml"))
    shown = capsys.readouterr().out
    assert fused in shown
    assert alone in shown
    with SweepDisplay() as display:
        for _ in range(2):
            display.progressed({"step": 1, "steps": 2, "ended": 0, "trials": 4, "rows": [], **found})
    # Each once, however often progress comes.
    assert capsys.readouterr().err.count(alone) == 1


def test_values_with_brackets_and_formulas_are_shown_as_they_are():
    values = {"optimizer.betas": [0.9, 0.99], "loss": "[bold]x", "model_args.name": "=1+1", "seed": -3}
    row = plait.TrialResult(0, "finished", 1, values, {}, -0.5)
    console = Console(width=200, file=io.StringIO())
    console.print(trials_table([row]))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "[0.9, 0.99]" in shown
    assert "[bold]x" in shown
    (read,) = csv.DictReader(as_csv([row]).splitlines())
    assert (read["model_args.name"], read["seed"], read["train_loss"]) == ("'=1+1", "-3", "-0.5")


@pytest.mark.parametrize("word", ["steps=40", "parallel.sync=sma", "parallel.plan"])
def test_a_sweep_that_goes_on_takes_no_other_job(word: str):
    places = ["parallel.workers=2", "cluster.nic=lo", "run_dir=elsewhere", "parallel.max_workers=4"]
    _check_asked(None, "run", places)
    with pytest.raises(InputError, match="goes on with the job that it was begun with"):
        _check_asked(None, "run", [*places, word])
