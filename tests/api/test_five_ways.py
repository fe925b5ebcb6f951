"""One script and one job, started in every way: the weights of one process, to 1e-10."""

from __future__ import annotations

import os
import runpy
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from plait.jobs.manifest import PodSettings, make_manifests
from plait.schema.job import make_job
from support import five_ways
from support.hosts import Hosts
from support.server import Forked

SCRIPT = Path(five_ways.__file__)
Variables = dict[str, str]
HERE = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "PYTHONPATH": os.pathsep.join([str(SCRIPT.parent), *filter(None, sys.path)]),
}


def torchrun(rank: int, port: int) -> Variables:
    return {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def srun(rank: int, port: int) -> Variables:
    """As srun sets them for a step of two tasks: the port is derived from the numbers of job and step."""
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_JOB_ID": str(port),
        "SLURM_STEP_ID": "0",
    }


def open_mpi(rank: int, port: int) -> Variables:
    names = {"RANK": rank, "SIZE": 2, "LOCAL_RANK": rank, "LOCAL_SIZE": 2}
    return {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in names.items()} | {
        "PMIX_NAMESPACE": f"prterun-{port}@1"
    }


def mpich(rank: int, port: int) -> Variables:
    return {"PMI_RANK": str(rank), "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2", "MASTER_PORT": str(port)}


def job_container() -> dict[str, Any]:
    """The container of `plait manifest --kind job` for two pods."""
    *_, job = make_manifests(make_job(five_ways.JOB), PodSettings(kind="job", image="plait:1", nodes=2))
    (container,) = job["spec"]["template"]["spec"]["containers"]
    return dict(container)


def pod(rank: int, port: int, first: str = "127.0.0.1") -> Variables:
    """The variables of a pod; the name of the first one is no name outside of a cluster."""
    here = {"MASTER_ADDR": first, "MASTER_PORT": str(port)}
    return {
        each["name"]: here.get(each["name"], each.get("value", str(rank))) for each in job_container()["env"]
    }


def run(variables: Variables, words: Sequence[str]) -> None:
    """The script, or a module after `-m`, in this process as Python would run it in that environment."""
    os.environ.update(HERE | variables)
    sys.path.insert(0, str(SCRIPT.parent))
    sys.argv = list(words[words[0] == "-m" :])
    try:
        if words[0] == "-m":
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as ended:
        if ended.code:
            raise


def run_all(environments: Sequence[Variables], *words: str) -> None:
    """Processes of these environments, forked from one that has torch; all have to end well."""
    processes = [Forked(run, (variables, words), 2) for variables in environments]
    try:
        for process in processes:
            process.join(60)
        assert [process.exitcode for process in processes] == [0] * len(processes)
    finally:
        for process in processes:
            process.kill()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def difference(one: Path, other: Path) -> float:
    here, there = load_file(one), load_file(other)
    assert here.keys() == there.keys()
    return max(float((here[name] - there[name]).abs().max()) for name in here)


@pytest.fixture(name="alone", scope="module")
def _alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The weights of the script as a single process."""
    path = tmp_path_factory.mktemp("alone") / "weights"
    run_all([{}], str(SCRIPT), "--out", str(path))
    return path


@pytest.mark.parametrize("launcher", [torchrun, srun, open_mpi, mpich, pod])
def test_a_script_has_the_weights_of_one_process_under_every_launcher(
    launcher: Any, alone: Path, tmp_path: Path
):
    port = free_port()
    run_all([launcher(rank, port) for rank in range(2)], str(SCRIPT), "--out", str(tmp_path / "weights"))
    assert difference(tmp_path / "weights", alone) < 1e-10


def final_weights(run: Path) -> Path:
    return max(run.glob("checkpoints/*/model.safetensors"), key=lambda path: int(path.parent.name[5:]))


def command_of(folder: Path) -> list[str]:
    """The arguments of the container's command, with folders of this host as its mounts."""
    container = job_container()
    mounts = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
    words = [str(word) for word in container["command"]]
    for path, name in mounts.items():
        words = [
            word.replace(path, str(folder / name), 1) if word.startswith(path) else word for word in words
        ]
    (folder / "files").mkdir()
    files, *_ = make_manifests(make_job(five_ways.JOB), PodSettings(kind="job", image="plait:1", nodes=2))
    for name, text in files["data"].items():
        (folder / "files" / name).write_text(text)
    return words


def test_the_command_of_a_kubernetes_job_has_the_weights_of_the_script(alone: Path, tmp_path: Path):
    port, (_, *words) = free_port(), command_of(tmp_path)
    run_all([pod(rank, port) for rank in range(2)], *words)
    assert difference(final_weights(tmp_path / "runs" / "five-ways"), alone) < 1e-10


def start(words: Sequence[str], variables: Variables) -> subprocess.Popen[str]:
    environment = {**os.environ, **HERE, **variables}
    return subprocess.Popen(words, env=environment, stdout=-1, stderr=subprocess.STDOUT, text=True)


def finish(*processes: subprocess.Popen[str]) -> None:
    try:
        printed = [process.communicate(timeout=100)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * len(processes), printed


STARTS = {
    "python": [sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    "mpirun": ["mpirun", "-n", "2", sys.executable],
}
# Open MPI's, for root and for machines with one core.
AS_ROOT = {f"OMPI_ALLOW_RUN_AS_ROOT{end}": "1" for end in ("", "_CONFIRM")}
CROWDED = {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}


@pytest.mark.extended  # the tests above run the same in processes that have torch
@pytest.mark.parametrize("command", STARTS)
def test_the_commands_themselves(command: str, alone: Path, tmp_path: Path):
    if shutil.which(STARTS[command][0]) is None:
        pytest.skip(f"{command} is not installed")
    finish(start([*STARTS[command], str(SCRIPT), "--out", str(tmp_path / "weights")], AS_ROOT | CROWDED))
    assert difference(tmp_path / "weights", alone) < 1e-10


@pytest.mark.extended
def test_the_command_of_a_kubernetes_job_on_two_hosts(hosts: Hosts, alone: Path, tmp_path: Path):
    hosts.make("w0", "w1")
    words = [sys.executable, *command_of(tmp_path)[1:]]
    finish(
        *(
            start(
                [*hosts.shell.format(host=f"w{rank}").split(), *words],
                pod(rank, 29500, "10.77.0.1") | {"GLOO_SOCKET_IFNAME": "eth0"},
            )
            for rank in range(2)
        )
    )
    assert difference(final_weights(tmp_path / "runs" / "five-ways"), alone) < 1e-10
