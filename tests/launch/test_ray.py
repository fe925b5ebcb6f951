"""Runs and sweeps on the nodes of a Ray cluster, whose raylets are in network namespaces; `make test-ray`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from support.ray_nodes import HEAD, RayNodes, missing_for_ray

pytestmark = [
    pytest.mark.extended,
    pytest.mark.skipif(missing_for_ray() is not None, reason=missing_for_ray() or ""),
    pytest.mark.timeout(600),
]
DEADLINE_S = 240
EXAMPLE = Path(__file__).parents[2] / "examples" / "data_parallel.py"
JOB = """
name: digits
model: plait.workloads.mlp:mlp_tiny
data: {kind: digits, batch_size: 32}
optimizer: {kind: sgd, lr: 0.05, momentum: 0.9}
precision: fp64
steps: 60
checkpoint: {every_steps: 10}
verify: "off"
cluster: {on: ray, nodes: 2}
"""
# Each step takes a tenth of a second longer, and computes the same.
SLOWLY = ["--jitter", "1.0:0.1"]


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    cluster = RayNodes("w0", "w1", "w2")
    yield cluster
    cluster.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ray")
    (folder / "job.yaml").write_text(JOB)
    return folder


@pytest.fixture(scope="module")
def uninterrupted(nodes: RayNodes, folder: Path) -> dict[str, torch.Tensor]:
    """The weights of a run on two nodes that nothing happens to."""
    out = finish(start(nodes, folder, "train", "job.yaml", "--run", "whole"))
    assert len(hosts_of(out)) == 2
    return weights(folder / "whole")


def start(nodes: RayNodes, folder: Path, *words: str) -> subprocess.Popen[str]:
    return nodes.start_driver([sys.executable, "-m", "plait", *words], folder)


def finish(driver: subprocess.Popen[str], status: int = 0) -> str:
    out, _ = driver.communicate(timeout=DEADLINE_S)
    assert driver.returncode == status, out
    return out


def hosts_of(out: str) -> list[str]:
    """The addresses of a run's hosts, as it last named them."""
    return re.findall(r"workers on (.*)", out)[-1].split(", ")


def weights(run: Path) -> dict[str, torch.Tensor]:
    newest = max((run / "checkpoints").glob("step-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    return load_file(newest / "model.safetensors")


def are_equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def await_checkpoint(run: Path, driver: subprocess.Popen[str]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not list(run.glob("checkpoints/step-*")):
        assert driver.poll() is None, driver.communicate()[0]
        assert time.monotonic() < end
        time.sleep(0.1)


def hosts_now(run: Path) -> list[str]:
    return [worker["host"] for worker in json.loads((run / "status.json").read_text())["workers"]]


def name_of(nodes: RayNodes, address: str) -> str:
    return next(name for name, own in nodes.addresses.items() if own == address)


def test_a_run_that_was_stopped_goes_on_to_the_weights_of_an_uninterrupted_one(
    nodes: RayNodes, folder: Path, uninterrupted: dict[str, torch.Tensor]
):
    driver = start(nodes, folder, "train", "job.yaml", "--run", "stopped", *SLOWLY)
    await_checkpoint(folder / "stopped", driver)
    driver.terminate()
    finish(driver, status=130)
    assert not are_equal(weights(folder / "stopped"), uninterrupted)
    finish(start(nodes, folder, "train", "job.yaml", "--run", "stopped", "--resume"))
    assert are_equal(weights(folder / "stopped"), uninterrupted)


def test_a_run_whose_node_is_killed_is_finished_on_the_spare(
    nodes: RayNodes, folder: Path, uninterrupted: dict[str, torch.Tensor]
):
    run = folder / "killed"
    driver = start(nodes, folder, "train", "job.yaml", "--run", "killed", *SLOWLY)
    await_checkpoint(run, driver)
    _, lost = hosts_now(run)
    nodes.kill(name_of(nodes, lost))
    out = finish(driver)
    assert "going on from the newest checkpoint" in out
    assert lost not in hosts_of(out)
    assert len(hosts_of(out)) == 2
    assert are_equal(weights(run), uninterrupted)
    nodes.restart(name_of(nodes, lost))


def test_a_run_whose_node_is_drained_goes_on_elsewhere(
    nodes: RayNodes, folder: Path, uninterrupted: dict[str, torch.Tensor]
):
    run = folder / "drained"
    # Telling Ray takes a while.
    driver = start(nodes, folder, "train", "job.yaml", "--run", "drained", "--jitter", "1.0:1.0")
    await_checkpoint(run, driver)
    _, away = hosts_now(run)
    nodes.drain(name_of(nodes, away))
    out = finish(driver)
    assert "the run is to end within" in out
    assert "going on from the checkpoint on" in out
    assert away not in hosts_of(out)
    assert are_equal(weights(run), uninterrupted)
    nodes.kill(name_of(nodes, away))
    nodes.restart(name_of(nodes, away))


def test_a_driver_that_is_killed_leaves_nothing_on_the_nodes(nodes: RayNodes, folder: Path):
    run = folder / "orphan"
    driver = start(nodes, folder, "train", "job.yaml", "--run", "orphan", *SLOWLY)
    await_checkpoint(run, driver)
    pids = [worker["pid"] for worker in json.loads((run / "status.json").read_text())["workers"]]
    assert all(Path(f"/proc/{pid}").exists() for pid in pids)
    driver.kill()
    driver.communicate(timeout=DEADLINE_S)
    end = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < end
        time.sleep(0.1)


def test_an_elastic_run_takes_a_node_that_comes(nodes: RayNodes, folder: Path):
    nodes.kill("w2")
    run = folder / "elastic"
    options = ["--nodes", "1:3", "--set", "parallel.elastic=true", "--set", "steps=600"]
    driver = start(nodes, folder, "train", "job.yaml", "--run", "elastic", *options, *SLOWLY)
    await_checkpoint(run, driver)
    before = hosts_now(run)
    nodes.restart("w2")
    end = time.monotonic() + DEADLINE_S
    while nodes.addresses["w2"] not in hosts_now(run):
        assert driver.poll() is None, driver.communicate()[0]
        assert time.monotonic() < end
        time.sleep(0.2)
    assert nodes.addresses["w2"] not in before
    driver.terminate()
    finish(driver, status=130)


def test_a_sweep_has_its_workers_on_the_nodes(nodes: RayNodes, folder: Path):
    over = ["--over", "optimizer.lr=0.01,0.02,0.05,0.1", "--set", "steps=20", "--json"]
    found = json.loads(finish(start(nodes, folder, "sweep", "job.yaml", "--run", "sweep", *over)))
    alone = ["--on", "local", "--set", "cluster.nodes=null", "--run", "sweep-here"]
    expected = json.loads(finish(start(nodes, folder, "sweep", "job.yaml", *over, *alone)))
    assert {array["worker"] for array in found["arrays"]} == {0, 1}
    assert results(found) == pytest.approx(results(expected), rel=1e-9)


def results(sweep: dict[str, Any]) -> dict[int, float]:
    return {row["trial"]: row["metrics"]["loss"] for row in sweep["trials"]}


def test_a_profile_is_measured_on_the_nodes(nodes: RayNodes, folder: Path):
    finish(start(nodes, folder, "profile", "job.yaml", "--set", "data.batch_size=8"))
    profile = json.loads((folder / "digits.profile.json").read_text())
    assert "links" in json.dumps(profile)


SCRIPT = """
import os, runpy, socket, sys
import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

@ray.remote(num_cpus=1)
class Worker:
    def address(self):
        with socket.socket() as free:
            free.bind(("", 0))
            return ray.util.get_node_ip_address(), free.getsockname()[1]

    def run(self, environment, path):
        import contextlib, io
        os.environ.update(environment)
        sys.argv = [path, environment["SAVED"]]
        with contextlib.redirect_stdout(io.StringIO()) as out:
            runpy.run_path(path)
        return out.getvalue()

ray.init(address="auto", logging_level="ERROR", log_to_driver=False)
size = int(sys.argv[2])
group = placement_group([{"CPU": 1}] * size, strategy="SPREAD")
workers = [
    Worker.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group, i)).remote()
    for i in range(size)
]
address, port = ray.get(workers[0].address.remote())
shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": address, "MASTER_PORT": str(port), "LOCAL_RANK": "0"}
shared["SAVED"] = os.path.abspath("saved.pt")
print(*ray.get([w.run.remote({**shared, "RANK": str(i)}, sys.argv[1]) for i, w in enumerate(workers)]))
"""


def test_a_script_whose_processes_are_actors_has_the_loss_of_one_process(nodes: RayNodes, tmp_path: Path):
    (tmp_path / "actors.py").write_text(SCRIPT)

    def loss(size: int) -> float:
        driver = nodes.start_driver([sys.executable, "actors.py", str(EXAMPLE), str(size)], tmp_path)
        return float(finish(driver).split("loss ")[1])

    here = nodes.start_driver([sys.executable, str(EXAMPLE), str(tmp_path / "here.pt")], tmp_path)
    assert loss(2) == pytest.approx(float(finish(here).split("loss ")[1]), abs=1e-10)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--set", "cluster.options={bundle: 3}"], "expected what each host reserves"),
        (["--set", "cluster.options={addres: auto}"], "ray.init refuses"),
        (["--set", "cluster.options={address: '10.77.0.1:1'}"], "no cluster answers"),
    ],
)
def test_options_that_ray_does_not_take_are_refused(
    nodes: RayNodes, folder: Path, options: list[str], message: str
):
    out = finish(start(nodes, folder, "train", "job.yaml", "--run", "refused", *options), status=2)
    assert message in out
    assert not (folder / "refused").exists()


def test_the_head_has_no_worker_processes_of_the_job_left(nodes: RayNodes):
    """All drivers have ended, and the groups that they reserved nodes with are gone."""
    code = "import ray; ray.init(address='auto', logging_level='ERROR'); print(ray.available_resources())"
    assert "'CPU': 3.0" in nodes.run(HEAD, [sys.executable, "-c", code])
