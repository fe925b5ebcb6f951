"""`plait profile`, `plan` and `bench` as a person uses them."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from plait.cli import app, planning
from plait.core.errors import InputError
from plait.graph import pipedream
from plait.planner import Schedule, load_plan
from plait.profiler.profile import Profile, load_profile
from plait.profiler.timing import Timed
from plait_bench.planner import PROFILES
from support.graphs import chain

pytestmark = pytest.mark.usefixtures("forked_commands")

JOB = """
name: t
model: plait.workloads.vgg:vgg16_tiny
data: {kind: digits, batch_size: 32}
epochs: 1
parallel: {workers: 2}
"""

ALEXNET = str(PROFILES / "alexnet.txt")


def plait(*words: str) -> str:
    """What the verb printed, in this process; an input error is raised as it is."""
    result = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_job_is_profiled_planned_drawn_and_written_as_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text(JOB)
    profiled = plait("profile", "job.yaml", "--batch", "8", "--repeats", "2", "--graph", "g.txt")
    assert "wrote t.profile.json; next: plait plan t.profile.json --devices 2" in profiled
    assert "the layers compute what the model computes" in profiled
    profile = load_profile(tmp_path / "t.profile.json")
    assert (profile.batch, profile.dtype, profile.threads) == (8, "float32", 1)
    assert {(link.source, link.target) for link in profile.links} == {(0, 1), (1, 0)}
    assert len(pipedream.read(tmp_path / "g.txt").graph().nodes) == len(profile.graph.nodes)

    plait("plan", "t.profile.json", "--timeline", "t.png", "--to-code", "code", "--job", "job.yaml")
    plan = load_plan(tmp_path / "t.plan.json")
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")
    assert len(list((tmp_path / "code").glob("stage_*.py"))) == len(plan.stages)
    assert plan.machines.latency_s > 0


def test_a_profile_that_does_not_hold_together_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    graph = chain([0.5] * 4, output_bytes=1e3, parameter_bytes=1e3)
    profile = Profile("m", graph, "cpu", "float32", 4, "2", 1, 1, Timed(1.0, 0.0), ())
    step = replace(profile.step, seconds=profile.graph.compute_s(), spread_s=0.0)
    steady = replace(profile, step=step)
    assert steady.doubts() == ""
    busy = replace(steady, step=replace(step, seconds=10 * step.seconds, spread_s=7 * step.seconds))
    assert "add up to 10% of the step" in busy.doubts()
    assert "spread" in busy.doubts()
    assert "--repeats 20" in busy.doubts()
    planning._show_profile(busy, tmp_path / "p.json", None)
    assert "\nwarning: the layers add up to 10%" in capsys.readouterr().out
    assert planning._profile_summary(busy, tmp_path / "p.json")["warnings"] == [busy.doubts()]
    assert planning._profile_summary(steady, tmp_path / "p.json")["warnings"] == []


def test_a_graph_of_pipedreams_is_planned_without_torch(tmp_path: Path):
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom plait.cli import app\n"
        f"words = ['plan', {ALEXNET!r}, '--devices', '2', '--bandwidth', '1e9', '-o', 'p.json']\n"
        "done = CliRunner().invoke(app, words)\n"
        "assert done.exit_code == 0, done.output\nprint('torch' in sys.modules)\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout == "False\n", done.stderr


def test_workers_to_measure_on_are_given_as_to_train(tmp_path: Path):
    job = tmp_path / "job.yaml"
    job.write_text(JOB)
    with pytest.raises(InputError, match="-np and -H: found both"):
        plait("profile", str(job), "-np", "2", "-H", "w0:2")
    with pytest.raises(InputError, match="found 32 for 40 workers"):
        plait("profile", str(job), "-np", "40")


def test_a_model_whose_own_code_no_trace_repeats_is_not_profiled_unless_asked(tmp_path: Path):
    job = tmp_path / "job.yaml"
    job.write_text(JOB.replace("plait.workloads.vgg:vgg16_tiny", "support.hard_models:Digits"))
    words = ("profile", str(job), "--no-links", "--repeats", "1", "-o", str(tmp_path / "p.json"))
    with pytest.raises(InputError, match=r"forward of Digits changes self.calls.*--set verify=off"):
        plait(*words)
    assert not (tmp_path / "p.json").exists()
    assert "verif" not in plait(*words, "--set", "verify=off")


def test_a_profile_names_the_module_that_a_run_keeps_in_one_stage(tmp_path: Path):
    job = tmp_path / "job.yaml"
    job.write_text(JOB.replace("plait.workloads.vgg:vgg16_tiny", "support.hard_models:digits_around_state"))
    words = ("profile", str(job), "--no-links", "--repeats", "1", "-o", str(tmp_path / "p.json"), "--json")
    found = json.loads(plait(*words))
    assert found["verified_s"] > 0
    (note,) = found["notes"]
    assert "forward of 2 (Digits) changes self.calls" in note
    assert note.endswith("so a run keeps the layers of 2 in one stage")
    assert load_profile(tmp_path / "p.json").notes == (note,)


def test_layers_that_compute_something_else_are_not_profiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    job = tmp_path / "job.yaml"
    job.write_text(JOB.replace("plait.workloads.vgg:vgg16_tiny", "support.hard_models:DigitsByCount"))
    words = ("profile", str(job), "--no-links", "--repeats", "1", "-o", str(tmp_path / "p.json"))
    with pytest.raises(InputError, match=r"would take another branch than in the trace.*--set verify=off"):
        plait(*words)
    monkeypatch.setattr("plait.profiler.traced_model.Guards.broken_by", lambda self, shapes: None)
    with pytest.raises(InputError, match="its layers do not compute what the model computes: in training"):
        plait(*words)


def test_the_json_of_a_plan_keeps_its_contract(tmp_path: Path):
    words = ["--devices", "4", "--bandwidth", "1e9", "--json", "-o", str(tmp_path / "p.json")]
    found = json.loads(plait("plan", ALEXNET, *words))
    assert found["bottleneck_s"] == pytest.approx(0.034217, abs=1e-6)
    assert found["lower_bound_s"] <= found["bottleneck_s"]
    assert found["exact"] is True
    assert found["solve_s"] > 0
    assert {"layers", "replicas", "compute_s", "memory_bytes"} <= found["stages"][0].keys()
    assert found["speedup_over"].keys() == {"single", "data_parallel", "model_parallel"}
    assert found["best_partition"]["bottleneck_s"] == found["bottleneck_s"]
    assert found["best_partition"]["replicas"] == [stage["replicas"] for stage in found["stages"]]


def test_a_plan_for_people_says_stages_gains_and_reasons(tmp_path: Path):
    words = ["--devices", "4x4", "--bandwidth", "10e9,1.25e9", "-o", str(tmp_path / "p.json")]
    shown = plait("plan", ALEXNET, *words)
    for part in ("stage", "replicas", "memory", "traffic", "x one device", " the pace ", "wrote "):
        assert part in shown


def test_a_schedule_may_have_its_conventional_name(tmp_path: Path):
    words = ["--devices", "2", "--bandwidth", "1e9", "--schedule", "1F1B", "-o", str(tmp_path / "p.json")]
    plait("plan", ALEXNET, *words)
    assert load_plan(tmp_path / "p.json").schedule is Schedule.FLUSH


def test_unlike_devices_are_planned_by_their_speed(tmp_path: Path):
    words = ["--devices", "2", "--bandwidth", "1e9", "--json", "-o", str(tmp_path / "p.json")]
    alike = json.loads(plait("plan", ALEXNET, *words))
    unlike = json.loads(plait("plan", ALEXNET, *words, "--speeds", "1,0.25"))
    single = alike["bottleneck_s"] * alike["speedup_over"]["single"]
    assert alike["bottleneck_s"] < unlike["bottleneck_s"] <= single + 1e-9


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--devices", "four"], "--devices: found 'four', expected a number as in 4 or 4x4"),
        (
            ["--devices", "0"],
            "--devices, --bandwidth, --speeds: level 1: found 0 devices, expected at least 1",
        ),
        (["--bandwidth", "-1"], "found a bandwidth of -1 bytes/s, expected more than 0"),
        (["--bandwidth", "1e9,1e9"], "found 1 levels of devices (4) and 2 bandwidths"),
        (["--memory", "lots"], "--memory: found 'lots', expected a size such as 16GB"),
        (["--memory", "1e999GB"], "--memory: found '1e999GB', expected a size such as 16GB"),
        (["--optimizer-copies", "nan"], "--optimizer-copies: found nan, expected 0 or more"),
        (["--microbatches", "1000000000"], "found 1000000000 microbatches, expected 1 to 65,536"),
        (["--devices", "9" * 5000], "--devices: found '999"),
        (["--memory", "1MB"], "no plan fits: every device has 1 MB"),
        (["--schedule", "1f2b"], "--schedule: found '1f2b', expected a schedule; did you mean '1f1b'?"),
        (["--to-code", "x"], "--to-code: needs --job JOB"),
    ],
)
def test_bad_input_is_answered_with_what_would_have_to_change(words: list[str], message: str, tmp_path: Path):
    given = ["--devices", "4", "--bandwidth", "1e9", "-o", str(tmp_path / "p.json"), *words]
    with pytest.raises(InputError) as caught:
        plait("plan", ALEXNET, *given)
    assert message in str(caught.value)
    assert not (tmp_path / "p.json").exists()


def test_a_graph_without_links_needs_a_bandwidth():
    with pytest.raises(InputError, match="--bandwidth: missing, and no links were measured"):
        plait("plan", ALEXNET, "--devices", "4")


def test_files_of_another_kind_are_distinguished(tmp_path: Path):
    (tmp_path / "job.yaml").write_text(JOB)
    with pytest.raises(InputError, match="a job file, expected its profile; make it with: plait profile"):
        plait("plan", str(tmp_path / "job.yaml"))
    (tmp_path / "x.json").write_text('{"plait": "profile", "version": 1}')
    with pytest.raises(InputError, match="this is a profile file, expected a job file"):
        plait("train", str(tmp_path / "x.json"))


def test_a_model_with_several_inputs_is_profiled_as_it_is_trained(tmp_path: Path, monkeypatch):
    (tmp_path / "pairs.py").write_text(
        "import torch\n"
        "class Pairs:\n"
        "    def __init__(self, split): pass\n"
        "    def __len__(self): return 40\n"
        "    def __getitem__(self, i): return (torch.ones(4), torch.ones(3) * i), torch.tensor(i % 2)\n"
        "class Two(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.a, self.b = torch.nn.Linear(4, 2), torch.nn.Linear(3, 2)\n"
        "    def forward(self, a, b): return self.a(a) + self.b(b)\n"
    )
    job = "name: t\nmodel: pairs:Two\ndata: {kind: 'pairs:Pairs', batch_size: 8}\nsteps: 1\n"
    (tmp_path / "job.yaml").write_text(job)
    monkeypatch.syspath_prepend(str(tmp_path))
    shown = plait("profile", str(tmp_path / "job.yaml"), "-o", str(tmp_path / "p.json"), "--repeats", "1")
    assert "--devices 2 --bandwidth 1e9" in shown


def test_a_bench_that_is_not_there_is_answered_with_the_nearest():
    with pytest.raises(InputError, match="did you mean 'planner'"):
        plait("bench", "planer")


def test_where_no_experiments_are_installed_a_bench_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.metadata.MetadataPathFinder.find_distributions", lambda *_, **__: iter(()))
    with pytest.raises(InputError, match=r"pip install \./benchmarks"):
        plait("bench", "planner")
    assert "none is installed" in plait("bench", "--help")


def test_the_help_of_bench_names_the_experiments_without_importing_one():
    script = (
        "import sys; from typer.testing import CliRunner; from plait.cli import app\n"
        "print(CliRunner().invoke(app, ['bench', '--help']).stdout, 'plait_bench' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert "adaptive-batch, adaptive-topology, elastic, fusion" in " ".join(done.stdout.split())
    assert done.stdout.split()[-1] == "False"


@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize("words", [["--batch", "4294967296"], ["--set", "data.batch_size=4294967296"]])
def test_a_microbatch_that_nobody_can_put_together_is_refused_at_once(
    words: list[str], workers: str, tmp_path: Path
):
    job = tmp_path / "job.yaml"
    job.write_text(
        "name: t\nmodel: plait.workloads.mlp:mlp_tiny\ndata: {kind: digits, batch_size: 8}\nsteps: 1\n"
    )
    done = CliRunner().invoke(app, ["profile", str(job), *words, "--set", f"parallel.workers={workers}"])
    assert isinstance(done.exception, InputError)
    assert "found microbatches of 4,294,967,296 samples, expected 1,048,576 at most" in str(done.exception)
