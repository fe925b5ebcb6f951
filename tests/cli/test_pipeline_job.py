"""Pipelines as a person runs them: a plan file or `auto` in the job, and what is refused."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from plait.cli import app
from plait.core.codec import encode
from plait.core.errors import InputError, JobError, PlaitError
from plait.jobs.train import train
from plait.launcher.display import Silent
from plait.launcher.run_dir import RunDir, RunKind
from plait.measure import auto_plan
from plait.planner import Plan, Settings, data_parallel_plan, machines, make_plan, save_plan
from plait.schema.hosts import LOCAL, Host
from plait.schema.job import make_job
from plait.schema.placement import Placement
from plait.schema.plans.graph import Graph
from plait.schema.results import RunResult
from plait.schema.settings import TrainSettings
from support.browser import Browser
from support.commands import forked_commands
from support.graphs import chain

pytestmark = pytest.mark.usefixtures("forked_commands")

JOB: dict[str, Any] = {
    "name": "digits",
    "model": "plait.workloads.mlp:mlp",
    "model_args": {"inputs": 64, "hidden": [32, 32]},
    "data": {"kind": "digits", "batch_size": 64},
    "optimizer": {"kind": "sgd", "lr": 0.05},
    "steps": 30,
}


def plait(*arguments: str) -> dict[str, Any]:
    done = CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, Any]]]:
    """A folder with the run of a pipeline of two stages that was profiled and planned, and its result."""
    folder = tmp_path_factory.mktemp("pipeline")
    with forked_commands(), contextlib.chdir(folder):
        Path("job.yaml").write_text(json.dumps(JOB))
        plait("profile", "job.yaml", "--batch", "16", "--no-links", "--repeats", "1")
        options = ("--devices", "2", "--bandwidth", "1e9", "--straight", "--microbatches", "4")
        plan = plait("plan", "digits.profile.json", *options)
        assert len(plan["stages"]) == 2
        yield folder, plait("train", "job.yaml", "--plan", plan["plan"])


def test_profile_plan_train_and_evaluate_follow_each_other(
    trained: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, result = trained
    monkeypatch.chdir(folder)
    assert (result["reason"], result["workers"], result["step"]) == ("finished", 2, 30)
    judged = plait("evaluate", result["run"])
    assert judged["metrics"]["accuracy"] == result["test"]["accuracy"] > 0.5
    plait("report", result["run"], "-o", "report.html")
    page = Path("report.html").read_text()
    # 30 steps of 4 microbatches in 2 stages, and what was predicted of one.
    assert "worker 1 (stage 1)" in page
    assert "<dd>30 of 30</dd>" in page
    predicted = json.loads(page.partition('"predicted":')[2].partition("}")[0] + "}")
    assert len(predicted["row"]) >= 2 * 4 * 2


# How many pixels of the timeline are not its background, and the contrast of the page's text.
_DRAWN = """(() => { const c = document.querySelector("canvas"), p = c.getContext("2d");
  const { data } = p.getImageData(0, 0, c.width, c.height);
  let drawn = 0;
  for (let i = 0; i < data.length; i += 4)
    drawn += Math.max(data[i], data[i + 1], data[i + 2]) - Math.min(data[i], data[i + 1], data[i + 2]) > 40;
  return drawn; })()"""
_CONTRAST = """(() => { const style = getComputedStyle(document.body);
  const light = (colour) => { const [r, g, b] = colour.match(/[0-9.]+/g).map((v) => (v / 255) ** 2.2);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05; };
  const [a, b] = [light(style.color), light(style.backgroundColor)];
  return Math.max(a, b) / Math.min(a, b); })()"""


def test_a_browser_shows_the_report_of_a_pipeline_also_on_a_phone_and_in_the_dark(
    trained: tuple[Path, dict[str, Any]], browser: Browser
) -> None:
    folder, result = trained
    page = folder / "seen.html"
    plait("report", str(folder / result["run"]), "-o", str(page))
    for width, dark in ((1280, False), (390, True)):
        browser.open(page.as_uri(), width=width, dark=dark)
        assert "30 of 30" in browser.value("document.querySelector('dl').textContent")
        assert browser.value("document.querySelectorAll('svg.chart polyline').length") >= 3
        assert browser.value("document.documentElement.scrollWidth") == width
        assert browser.value(_CONTRAST) > 7
        whole = browser.value(_DRAWN)
        assert whole > 500
        browser.click("button[name=first]")
        browser.wait(f"{_DRAWN} !== {whole}")
        zoomed = browser.value(_DRAWN)
        browser.wheel("canvas", -100, with_ctrl=True)
        browser.wait(f"{_DRAWN} !== {zoomed}")
        browser.hover("canvas")
        browser.wait("/^worker [01] .stage [01].: /.test(document.querySelector('.tip').textContent)")
        assert browser.errors() == []
    browser.open(page.as_uri())
    browser.hover("svg.chart")
    browser.wait("/^step [0-9]+: [0-9.]+$/.test(document.querySelector('text.cursor').textContent)")


@pytest.mark.parametrize(
    ("parallel", "words"),
    [
        ({"plan": "dta-parallel"}, "did you mean 'data-parallel'"),
        ({"schedule": "flush"}, "parallel.schedule: belongs to a pipeline"),
        ({"plan": "auto", "schedule": "1f2b"}, "parallel.schedule: found '1f2b', expected stash or"),
        ({"plan": "auto", "microbatches": 0}, "parallel.microbatches: found 0"),
    ],
)
def test_a_wrong_request_for_a_plan_is_answered_with_the_right_one(parallel: Any, words: str) -> None:
    with pytest.raises(JobError, match=words):
        make_job({**JOB, "parallel": parallel})


def test_a_run_shows_the_plan_that_was_made_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(*_: Any) -> tuple[Plan, Graph]:
        graph = chain([0.25])
        return data_parallel_plan(graph, machines(1, 1e9), Settings(microbatches=3)), graph

    monkeypatch.setattr(auto_plan, "measure_and_plan", make)
    monkeypatch.setattr("plait.jobs.train_on.launch", lambda *_, **__: {"reason": "stopped"})
    Path(tmp_path / "job.yaml").write_text(json.dumps({**JOB, "run_dir": str(tmp_path)}))
    recorded = CliRunner().invoke(app, ["train", str(tmp_path / "job.yaml"), "--plan", "auto"]).stderr
    assert "1 stage on 1 device, schedule stash, 3 microbatches a step: 1.5 s predicted" in recorded
    assert "Every device holds the whole model" in recorded


def test_workers_that_a_plan_has_no_use_for_are_left_out_and_the_run_goes_on_under_its_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan for two devices of four; and going on, the run is not measured again."""
    two = make_plan(chain([1.0] * 2, output_bytes=1e3), machines(2, 1e9), Settings(straight=True))
    made = [replace(two, machines=machines(4, 1e9))]
    launched: list[tuple[TrainSettings, Placement]] = []

    def launch(settings: Any, placement: Any, folder: RunDir, *_: Any, resume: bool, **__: Any) -> RunResult:
        folder.claim(RunKind.TRAIN, resume)
        launched.append((settings, placement))
        folder.settings.write_text(json.dumps(encode(settings)))
        return RunResult("finished", 1, 1, None, {}, None, 0.0, 0.0, 2, "cpu", warnings=("of a worker",))

    monkeypatch.setattr(auto_plan, "measure_and_plan", lambda *_: (made.pop(), chain([0.25])))
    monkeypatch.setattr("plait.jobs.train_on.launch", launch)
    job = {**JOB, "run_dir": str(tmp_path), "parallel": {"workers": 4, "plan": "auto"}}
    recorded = RecordingDisplay()
    found = train(job, display=recorded)
    assert "2 of 4 workers run it" in recorded.lines[1]
    assert "an update takes the batch of 64 samples" in recorded.lines[2]
    assert found.warnings == (*recorded.lines[1:], "of a worker")
    train(job, resume=True)
    (first, there), (second, again) = launched
    assert there.hosts == again.hosts == (Host(LOCAL, 2),)
    assert first.pipeline == second.pipeline


def test_a_job_that_cannot_be_planned_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> tuple[Plan, Graph]:
        raise JobError("model: it cannot be traced")

    monkeypatch.setattr(auto_plan, "measure_and_plan", refuse)
    job = {**JOB, "run_dir": str(tmp_path / "runs"), "parallel": {"plan": "auto"}}
    with pytest.raises(JobError, match="it cannot be traced"):
        train(job)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"parallel": {"plan": "two.json", "workers": 3}}, "the plan is for 2 devices, but the job has 3"),
        ({"parallel": {"plan": "two.json"}, "accumulate": 2}, "accumulate: a pipeline accumulates by itself"),
        ({"parallel": {"plan": "auto"}, "optimizer": {"kind": "sgd", "lrr": 1}}, "did you mean 'lr'"),
    ],
)
def test_the_hosts_refuse_a_plan_before_any_worker_starts(
    changes: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    graph = chain([1.0] * 2, output_bytes=1e3)
    save_plan(make_plan(graph, machines(2, 1e9), Settings(straight=True)), Path("two.json"))
    with pytest.raises(InputError, match=words):
        train({**JOB, **changes})
    assert [path.name for path in tmp_path.iterdir()] == ["two.json"]


def test_a_run_folder_that_cannot_be_made_is_refused_before_the_job_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto_plan, "measure_and_plan", lambda *_: pytest.fail("measured"))
    (tmp_path / "runs").write_text("a file")
    job = {**JOB, "run_dir": str(tmp_path / "runs"), "parallel": {"plan": "auto"}}
    with pytest.raises(InputError, match="no folder can be made there"):
        train(job)
    with pytest.raises(PlaitError, match="cannot be written: Not a directory; name another place"):
        train(job, run_folder=str(tmp_path / "runs" / "mine"))
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


class RecordingDisplay(Silent):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def printed(self, line: str) -> None:
        self.lines.append(line)
