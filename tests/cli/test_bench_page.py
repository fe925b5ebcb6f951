"""`plait bench --all`: every experiment in a process, one page of all, also where one fails."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from plait.cli import app
from plait.report.outputs.experiments import ExperimentRun, make_bench_page

# `plait.cli.bench` is also the name of the verb.
command = importlib.import_module("plait.cli.bench")
CLAIM = {"claim": "fused <over> serial", "value": 2.5, "goal": "at least 2", "holds": True}
CONTENT: dict[str, Any] = {
    "name": "good",
    "machine": {"system": "Linux", "cores": 2, "gpu": None, "load": 0.5},
    "versions": {"torch": "2.13"},
    "command": "plait bench good --quick",
    "seed": 0,
    "date": "2026-11-18",
    "rows": [{"case": "a&b", "step_s": 0.123456, "exact": True, "none": None}],
    "claims": [CLAIM],
}
# What stands for `python -m plait`: experiments that end well, with a claim that does not hold, badly, never.
EXPERIMENTS = """
import json, signal, sys
name, content = sys.argv[2], json.loads({content!r})
print("plait bench: some progress", file=sys.stderr, flush=True)
if name == "hangs":
    signal.pause()
if name == "fails":
    print("Traceback: \\x1b[2Jno memory", file=sys.stderr)
    print(json.dumps({{"error": "no memory"}}))
    sys.exit(1)
open(sys.argv[sys.argv.index("--png") + 1], "wb").write(b"PNG of " + name.encode())
content["claims"][0]["holds"] = name == "good"
print(json.dumps(content))
sys.exit(name != "good")
"""


@pytest.fixture
def experiments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plait").mkdir()
    (tmp_path / "plait" / "__init__.py").touch()
    (tmp_path / "plait" / "__main__.py").write_text(EXPERIMENTS.format(content=json.dumps(CONTENT)))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    monkeypatch.setattr(command, "installed", lambda: dict.fromkeys(("fails", "good", "weak"), "x"))
    monkeypatch.chdir(tmp_path)


def test_all_experiments_are_one_page_also_if_one_fails(experiments: None):
    done = CliRunner().invoke(app, ["bench", "--all", "--quick", "-o", "all.html", "--json"])
    assert "1 experiment failed: fails; all.html says how" in str(done.exception)
    printed = json.loads(done.stdout)
    weak = "1 claim of 1 did not hold"
    assert printed["states"] == {"fails": "failed", "good": "holds", "weak": weak}
    assert printed["experiments"]["good"]["rows"] == CONTENT["rows"]
    assert "plait bench: some progress" in done.stderr
    page = Path("all.html").read_text()
    assert "3 experiments, 1 failed" in page
    assert "no memory\nexit status 1 after" in page
    assert page.count("data:image/png;base64,") == 2


def test_an_experiment_that_never_ends_is_ended(experiments: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(command, "installed", lambda: {"hangs": "x"})
    monkeypatch.setattr(command, "QUICK_LIMIT_S", 0.2)
    done = CliRunner().invoke(app, ["bench", "--all", "--quick"])
    assert "1 experiment failed: hangs; bench.html says how" in str(done.exception)
    assert "exit status -15 after" in Path("bench.html").read_text()


def test_an_interrupt_ends_the_experiments_and_keeps_the_results_before_it(
    experiments: None, monkeypatch: pytest.MonkeyPatch
):
    run_one = command._run_one

    def interrupted(name: str, quick: bool) -> ExperimentRun:
        if name == "weak":
            raise KeyboardInterrupt
        return run_one(name, quick)

    monkeypatch.setattr(command, "_run_one", interrupted)
    done = CliRunner().invoke(app, ["bench", "--all", "--quick"])
    assert done.exit_code == 130
    assert "interrupted during weak; bench.html has the results of 2 of 3 experiments" in done.stderr
    page = Path("bench.html").read_text()
    assert "3 experiments, 1 failed, 1 to come" in page
    assert page.count("data:image/png;base64,") == 1


def test_a_page_that_cannot_be_written_is_refused_before_the_first_experiment(
    experiments: None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(command, "_run_one", lambda name, quick: pytest.fail("an experiment was run"))
    Path("file").touch()
    done = CliRunner().invoke(app, ["bench", "--all", "-o", "file/bench.html"])
    assert "file/bench.html" in str(done.exception)


def test_a_page_names_what_it_was_measured_on_and_escapes_what_it_shows():
    runs = [ExperimentRun("good", 3.0, CONTENT, b"png"), ExperimentRun("later")]
    page = make_bench_page("plait bench --all --quick", runs)
    assert "2 experiments, 1 to come" in page
    assert "fused &lt;over&gt; serial</td><td>2.5</td>" in page
    assert "a&amp;b</td><td>0.1235</td><td>yes</td><td>-</td>" in page
    assert "<dt>machine</dt><dd>system Linux, cores 2</dd><dt>versions</dt><dd>torch 2.13</dd>" in page
    assert "plait bench good --quick, seed 0, 3 s, load of the machine 0.5</p>" in page
    busy = {**CONTENT, "machine": {"cores": 2, "load": 4.5}}
    page = make_bench_page("plait bench --all --quick", [ExperimentRun("good", 3.0, busy)])
    assert "load of the machine 4.5 on 2 cores: what others ran made its times longer</p>" in page
    assert "http" not in page.partition("</head>")[2].replace("http-equiv", "")


def test_a_claim_that_is_not_resolved_is_neither_held_nor_broken():
    unresolved = {**CLAIM, "holds": False, "unresolved": "the repeats are 1.5 to 3"}
    run = ExperimentRun("rough", 3.0, {**CONTENT, "claims": [CLAIM, unresolved]})
    assert (run.state, run.is_good) == ("1 claim not resolved", True)
    page = make_bench_page("plait bench --all --quick", [run])
    assert '<td class="words">not resolved</td>' in page
    assert "at least 2; the repeats are 1.5 to 3</td>" in page
    broken = ExperimentRun("rough", 3.0, {**CONTENT, "claims": [unresolved, {**CLAIM, "holds": False}]})
    assert (broken.state, broken.is_good) == ("1 claim of 2 did not hold, 1 claim not resolved", False)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "NAME: missing; expected plait bench NAME, or plait bench --all"),
        (["good", "-o", "x.html"], "-o: found without --all"),
        (["good", "--all"], "--all: found with NAME"),
        (["good", "--csv", "plait/__main__.py/x.csv"], "__main__.py cannot be written to"),
        (["good", "--csv", "/proc/none/x.csv"], "but /proc cannot be written to"),
        (["good", "--png", "folder.png"], "--png: found the folder 'folder.png', expected a file"),
        (["goood"], "NAME: found 'goood', expected an experiment; did you mean 'good'"),
    ],
)
def test_what_does_not_go_together_is_refused(experiments: None, words: list[str], message: str):
    Path("folder.png").mkdir()
    assert message in str(CliRunner().invoke(app, ["bench", *words]).exception)
