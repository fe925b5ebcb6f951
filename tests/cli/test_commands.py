"""The verbs as a person uses them: real processes, real runs, exit statuses."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from typer.testing import CliRunner

from plait.cli import app
from plait.core import events as core_events
from plait.core import run_events
from plait.core.codec import encode
from plait.core.errors import InputError
from plait.schema.job import read_job
from plait.training import checkpoint as checkpoints
from plait.training.worker import check_request
from support.commands import real_commands
from support.hosts import Hosts
from support.training import train_here

pytestmark = pytest.mark.usefixtures("forked_commands")

JOB = """
name: t
model: plait.workloads.mlp:mlp_tiny
data: {kind: digits, batch_size: 64}
optimizer: {kind: sgd, lr: 0.1}
epochs: 2
"""

# A run that does not end by itself; its workers sleep in every step rather than keep the machine busy.
LONG = ["--set", "epochs=null", "--set", "steps=1000000", "--set", "checkpoint.every_steps=1000000"]
LONG += ["--set", "parallel.jitter=[1.0, 0.02]"]


def plait(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return run([sys.executable, "-m", "plait", *words], cwd)


def installed(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """As `plait`, by the command that people type: it does not look for modules in `cwd` by itself."""
    return run([str(Path(sys.executable).parent / "plait"), *words], cwd)


def run(command: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=90)


def answer(folder: Path, *words: str) -> Any:
    """The JSON that a verb prints, in this process, which has imported torch already."""
    with contextlib.chdir(folder):
        done = CliRunner().invoke(app, [*words, "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    """A run in the background, once its first step is done."""
    command = [sys.executable, "-m", "plait", "train", "job.yaml", "-np", "2", *LONG, *words]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 60
    while time.monotonic() < end:
        assert process.poll() is None, process.communicate()
        with contextlib.suppress(FileNotFoundError):
            if json.loads((folder / "runs/t-001/status.json").read_text())["progress"].get("step", 0) > 0:
                return process
        time.sleep(0.05)
    process.kill()
    raise AssertionError(f"no step within 60 s; it said: {process.communicate()}")


def worker_pids(folder: Path) -> list[int]:
    return [w["pid"] for w in json.loads((folder / "runs/t-001/status.json").read_text())["workers"]]


def wait_until_gone(pids: list[int]) -> None:
    _, alive = psutil.wait_procs([psutil.Process(p) for p in pids if psutil.pid_exists(p)], timeout=15)
    assert alive == []


def test_a_job_with_a_model_of_ones_own_trains_evaluates_and_leaves_its_record(folder: Path):
    """Modules next to the job file or in the current folder are found, and replace none of Python's."""
    own = folder / "own"
    own.mkdir()
    for name, where in itertools.product(("secrets", "queue", "random", "types", "csv"), (folder, own)):
        (where / f"{name}.py").write_text("raise SystemExit('not the one of Python')\n")
    (own / "mine.py").write_text(
        "import torch\n"
        "from other import CLASSES\n"
        "def net(classes=CLASSES):\n"
        "    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, classes))\n"
    )
    (folder / "other.py").write_text("CLASSES = 10\n")
    (own / "job.yaml").write_text(JOB.replace("plait.workloads.mlp:mlp_tiny", "mine:net"))
    with real_commands():  # which import all modules from where they are to be found
        done = installed("train", "own/job.yaml", "-np", "2", "--set", "tensorboard=true", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "2 workers on localhost" in done.stderr
    assert re.search(r"test accuracy +\d", done.stdout)
    assert "wrote runs/t-001; next: plait evaluate runs/t-001" in done.stdout
    run = folder / "runs/t-001"
    kinds = [type(r.event) for r in core_events.read(run / "events/rank0.jsonl")]
    assert kinds[0] is run_events.RunStarted
    assert kinds[-1] is run_events.RunEnded
    assert run_events.Evaluated in kinds
    assert list((run / "tensorboard").glob("events.out.*"))
    assert (run / "logs/rank1.err").exists()

    measured = installed("evaluate", str(run), "--json", cwd=own)
    result = json.loads((run / "result.json").read_text())
    assert json.loads(measured.stdout)["metrics"] == pytest.approx(result["test"], rel=1e-5)
    assert json.loads(installed("status", "t", "--json", cwd=folder).stdout)["state"] == "finished"
    again = installed("train", "own/job.yaml", "--resume", "--json", cwd=folder)
    assert json.loads(again.stdout)["train_loss"] == result["train_loss"]
    assert again.stderr == ""
    over = installed("train", "own/job.yaml", "--run", "runs/t-001", cwd=folder)
    assert over.returncode == 2
    assert "holds a training run already; go on with --resume" in over.stderr


def test_a_mistake_in_json_mode_is_an_object_too(folder: Path):
    wrong = plait("train", "none.yaml", "--json", cwd=folder)
    assert wrong.returncode == 2
    assert "no such file" in json.loads(wrong.stdout)["error"]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("model=plait.workloads.mlp:mpl", "model: found 'plait.workloads.mlp:mpl', but"),
        ("data.kind=digts", "data.kind: unknown kind 'digts'; did you mean 'digits'?"),
        ("optimizer.momentun=0.9", "optimizer.momentun: SGD takes no 'momentun'; did you mean 'momentum'?"),
        ("optimizer.lr=much", "optimizer.lr: found 'much', expected a number"),
        ("device=cuda", "device: found 'cuda', but torch sees no GPU here"),
        ("model_args.clases=3", "model_args.clases: mlp_tiny takes no 'clases'; did you mean 'classes'?"),
    ],
)
def test_a_mistake_that_only_the_rooms_can_see_is_refused_by_the_hosts(folder: Path, word: str, message: str):
    if word == "device=cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    settings = read_job(folder / "job.yaml", [word]).settings()
    with pytest.raises(InputError) as refusal:
        check_request({"settings": encode(settings), "folder": "run", "resume": False})
    assert message in str(refusal.value)


def test_a_refused_job_starts_nothing(folder: Path):
    done = plait("train", "job.yaml", "--set", "data.kind=digts", cwd=folder)
    assert (done.returncode, done.stderr.count("Traceback")) == (2, 0), done.stderr
    assert "data.kind: unknown kind 'digts'; did you mean 'digits'?" in done.stderr
    assert not (folder / "runs").exists()


def test_a_data_file_that_is_missing_names_itself_once(folder: Path):
    words = ["--set", "data.kind=fashion-mnist", "--set", "data.path=nowhere"]
    done = plait("train", "job.yaml", "-np", "2", *words, cwd=folder)
    assert (done.returncode, done.stderr.count("Traceback")) == (2, 0), done.stderr
    assert done.stderr.count("nowhere/train-images-idx3-ubyte") == 1
    assert not (folder / "runs").exists()


# Another does so in schema/test_hosts.py.
@pytest.mark.extended
def test_a_job_trains_over_two_hosts(folder: Path, hosts: Hosts):
    hosts.make("w0", "w1")
    words = ["-H", "w0:1,w1:1", "--nic", "eth0", "--set", f"cluster.shell={hosts.shell}", "--json"]
    done = plait("train", "job.yaml", *words, cwd=folder)
    assert done.returncode == 0, done.stderr
    two = json.loads(done.stdout)
    settings = read_job(folder / "job.yaml").settings()
    one, _ = train_here(settings, folder / "one")
    assert two["workers"] == 2
    assert two["test"] == pytest.approx(one.test, rel=1e-4)


def test_a_crash_in_the_users_model_shows_its_traceback_once(folder: Path):
    (folder / "mine.py").write_text(
        "import torch\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layer = torch.nn.Linear(64, 10)\n"
        "    def forward(self, x):\n"
        "        return self.layer(x.flatten(1)) @ torch.zeros(3, 3)  # wrong on purpose\n"
    )
    done = plait("train", "job.yaml", "-np", "2", "--set", "model=mine:Net", cwd=folder)
    assert done.returncode == 1
    assert done.stderr.count("wrong on purpose") == 1
    assert "wrong on purpose" in (folder / "runs/t-001/failure.txt").read_text()
    assert re.search(r"plait: worker [01] on localhost failed: RuntimeError", done.stderr)


@pytest.mark.parametrize("how", ["ctrl-c", "plait stop"])
def test_a_stopped_run_ends_cleanly_and_goes_on_with_resume(folder: Path, how: str):
    process = start(folder)
    pids = worker_pids(folder)
    assert [w["alive"] for w in answer(folder, "status", "t")["workers"]] == [True, True]
    if how == "ctrl-c":
        process.send_signal(signal.SIGINT)
    else:
        stopped = plait("stop", "t", cwd=folder)
        assert stopped.returncode == 0, stopped.stderr
        assert "stopped at step" in stopped.stdout
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert "stopped; go on with: plait train runs/t-001/job.yaml --resume" in out
    wait_until_gone(pids)
    if how == "ctrl-c":
        _go_on(folder)


def _go_on(folder: Path) -> None:
    """Ten steps on from the checkpoint that a stopped run left."""
    (newest,) = checkpoints.list_checkpoints(folder / "runs/t-001/checkpoints")
    step = checkpoints.load(newest).step
    words = ["--resume", "--json", "--set", f"steps={step + 10}", "--set", "epochs=null"]
    resumed = plait("train", "job.yaml", *words, cwd=folder)
    assert json.loads(resumed.stdout)["step"] == step + 10


@pytest.mark.usefixtures("real_commands")
def test_a_request_to_end_is_answered_like_ctrl_c_also_where_no_workers_run():
    script = "import time, plait.cli; plait.cli.app = lambda: [print('runs', flush=True), time.sleep(60)]; "
    script += "from plait.__main__ import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "runs\n"
    process.terminate()
    assert process.communicate(timeout=60)[1] == "plait: interrupted\n"
    assert process.returncode == 130


@pytest.mark.usefixtures("real_commands")
@pytest.mark.parametrize("run", [plait, installed])
def test_a_verb_that_needs_no_code_of_ones_own_imports_none_of_the_current_folder(run: Any, tmp_path: Path):
    for name in ("csv", "typer", "plait_status", "secrets"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a module of a stranger')\n")
    done = run("status", "x", cwd=tmp_path)
    assert (done.returncode, "there is no such run" in done.stderr) == (2, True), done.stderr


def test_every_verb_has_help_with_an_example():
    listed = CliRunner().invoke(app, ["--help"]).stdout
    verbs = re.findall(r"^  (\w+)  ", listed.partition("Commands")[2], flags=re.MULTILINE)
    assert {"train", "demo", "status", "stop", "evaluate"} <= set(verbs)
    for verb in verbs:
        shown = CliRunner().invoke(app, [verb, "--help"]).stdout
        assert "Example: plait" in shown, verb
        assert "--json" in shown, verb


def test_a_run_that_is_not_there_is_answered_with_the_nearest(folder: Path):
    (folder / "runs/digits-001").mkdir(parents=True)
    done = plait("status", "digts-001", cwd=folder)
    assert done.returncode == 2
    assert "did you mean 'digits-001'?" in done.stderr


def test_torch_is_not_imported_before_it_is_needed(folder: Path):
    script = "import sys; import plait.cli; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], cwd=folder, timeout=60, check=False)
    assert done.returncode == 0
