"""Runs on a real Slurm cluster of three nodes: `make test-slurm` (root, Debian's slurm-wlm and munge)."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import plait
from support.slurm import NODES, SlurmCluster, missing_for_slurm, wait_until

# Started by `make test-slurm`, not by `make test`.
pytestmark = [pytest.mark.extended, pytest.mark.timeout(300)]

JOB = """\
name: tiny
model: plait.workloads.mlp:mlp_tiny
data: {kind: digits, batch_size: 24}
optimizer: {kind: adam, lr: 0.01}
steps: 60
checkpoint: {every_steps: 10}
verify: "off"
parallel: {jitter: [1.0, 0.1]}
"""
PLAIT = [sys.executable, "-P", "-m", "plait"]
# One run in peace, and one of its steps by itself takes 0.1 s.
LONGEST_S = 120


@pytest.fixture
def cluster(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[SlurmCluster]:
    if reason := missing_for_slurm():
        pytest.skip(reason)
    made = SlurmCluster(tmp_path_factory.mktemp("slurm"))
    made.environment |= {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "OMP_NUM_THREADS": "1",
    }
    work = made.folder / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    (work / "job.yaml").write_text(JOB)
    try:
        made.start()
        yield made
    finally:
        made.stop()


def submit(cluster: SlurmCluster, run: str, *words: str) -> str:
    command = [*PLAIT, "train", "job.yaml", "--on", "slurm", "--submit", "--json", "--run", run, *words]
    return str(json.loads(cluster.run(command))["job"])


def step_of(run: str) -> int:
    try:
        return int(json.loads(Path(run, "status.json").read_text())["progress"].get("step", 0))
    except (OSError, ValueError, KeyError):
        return 0


def output(run: str, job: str) -> str:
    path = Path(run, f"slurm-{job}.out")
    return path.read_text() if path.exists() else ""


def await_end(cluster: SlurmCluster, run: str, job: str) -> None:
    wait_until(lambda: Path(run, "result.json").exists(), LONGEST_S, f"{run} ends; {output(run, job)}")
    assert json.loads(Path(run, "result.json").read_text())["step"] == 60, output(run, job)


def weights(run: str) -> dict[str, torch.Tensor]:
    return dict(plait.open_run(run).model().state_dict())


def train_in_peace(cluster: SlurmCluster) -> dict[str, torch.Tensor]:
    """The weights of a run on two nodes that is never interrupted, in a shell of salloc."""
    command = ["salloc", "-N2", *PLAIT, "train", "job.yaml", "--on", "slurm", "--run", "peace", "-q"]
    cluster.run([*command, "--set", "parallel.jitter=null"], timeout=LONGEST_S)
    return weights("peace")


def test_a_preempted_run_is_queued_again_and_ends_with_the_weights_of_one_in_peace(cluster: SlurmCluster):
    job = submit(cluster, "run", "--nodes", "2")
    wait_until(lambda: step_of("run") >= 15, LONGEST_S, f"training; {output('run', job)}")
    # It gets all nodes, and the run half a minute to end.
    cluster.run(["sbatch", "-p", "urgent", "-N3", "--exclusive", "--wrap", "sleep 1"])
    wait_until(lambda: cluster.state(job) == "PENDING", 40, f"queued again; {output('run', job)}")
    text = output("run", job)
    assert "the run is to end within" in text
    assert "queued again; it goes on from the newest checkpoint" in text
    stopped_at = json.loads(Path("run/result.json").read_text())
    assert stopped_at["reason"] == "stopped"
    assert stopped_at["step"] < 60
    # Slurm itself would wait two minutes.
    cluster.run(["scontrol", "update", f"JobId={job}", "StartTime=now"])
    wait_until(lambda: json.loads(Path("run/result.json").read_text())["step"] == 60, LONGEST_S, "goes on")
    in_peace, resumed = train_in_peace(cluster), weights("run")
    assert in_peace.keys() == resumed.keys()
    assert all(torch.equal(in_peace[name], resumed[name]) for name in in_peace)


def test_a_run_goes_on_without_a_node_that_is_lost(cluster: SlurmCluster):
    job = submit(cluster, "run", "--nodes", "1:3")
    wait_until(lambda: step_of("run") >= 15, LONGEST_S, f"training; {output('run', job)}")
    cluster.kill_node("w2")
    began = time.monotonic()
    wait_until(lambda: "going on from the newest" in output("run", job), 30, "the loss is noticed")
    noticed_s = time.monotonic() - began
    await_end(cluster, "run", job)
    text = output("run", job)
    assert re.search("going on from the newest checkpoint on w0, w1\n", text), text
    assert noticed_s < 15, text


def test_a_job_that_loses_the_node_of_its_supervisor_is_queued_again_by_the_others(cluster: SlurmCluster):
    """Slurm itself would keep the other node, with nothing to do there."""
    job = submit(cluster, "run", "--nodes", "1:2")
    wait_until(lambda: step_of("run") >= 15, LONGEST_S, f"training; {output('run', job)}")
    cluster.kill_node("w0")
    wait_until(lambda: cluster.state(job) == "PENDING", 120, f"queued again; {output('run', job)}")
    cluster.run(["scontrol", "update", f"JobId={job}", "StartTime=now"])
    await_end(cluster, "run", job)
    assert "2 workers on w1, w2" in output("run", job)


def test_nothing_is_left_of_a_cancelled_job_or_without_its_supervisor(cluster: SlurmCluster):
    for end in ("scancel", "kill"):
        job = submit(cluster, end, "--nodes", "2")
        wait_until(lambda: step_of(end) >= 2, LONGEST_S, f"training; {output(end, job)}")  # noqa: B023
        assert len(cluster.processes()) > 6
        if end == "scancel":
            cluster.run(["scancel", job])
        else:
            holder = json.loads(Path(end, ".lock").read_text())
            assert holder["host"] in NODES
            os.kill(holder["pid"], signal.SIGKILL)
        wait_until(lambda: cluster.processes() == [], 2, f"all processes end after {end}")
        wait_until(lambda: cluster.state(job) in ("CANCELLED", "FAILED", ""), 30, "the job ends")  # noqa: B023
        # It is not queued again by itself.
        assert "queued again" not in output(end, job)


SCRIPT = """\
import sys, torch, plait
world = plait.init()
torch.manual_seed(0)
model = torch.nn.Linear(4, 2).double()
inputs, target = torch.randn(8, 4).double(), torch.randn(8, 2).double()
if world.world_size > 1:
    model = plait.DataParallel(model)
    inputs, target = (part.chunk(world.world_size)[world.rank] for part in (inputs, target))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(inputs), target).backward()
    optimizer.step()
if world.rank == 0:
    print("weights", world.launcher, world.world_size, [p.tolist() for p in model.parameters()], flush=True)
"""


def test_a_script_under_srun_has_the_weights_of_one_process(cluster: SlurmCluster):
    Path("script.py").write_text(SCRIPT)

    def trained(*command: str) -> tuple[str, list[list[float]]]:
        text = cluster.run([*command, sys.executable, "script.py"], timeout=LONGEST_S)
        (line,) = [line for line in text.splitlines() if line.startswith("weights")]
        _, launcher, size, values = line.split(" ", 3)
        numbers = [float(number) for number in re.findall(r"-?[\d.]+(?:e-?\d+)?", values)]
        return f"{launcher} {size}", numbers

    (alone, expected), (together, found) = trained(), trained("srun", "-N", "2", "-n", "2")
    assert (alone, together) == ("python 1", "srun 2")
    assert max(abs(a - b) for a, b in zip(expected, found, strict=True)) < 1e-10
