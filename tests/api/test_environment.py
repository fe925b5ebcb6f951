"""`plait.init` and `launch`: who started a process, what is missing, and what becomes of failing workers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import plait
from plait.api.launching import launch
from plait.api.world import choose_backend, choose_device, name_hosts
from plait.core.errors import InputError, LaunchError
from plait.launcher.environment import Environment, find_environment, first_node
from support.commands import forked_commands

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
SRUN = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NODELIST": "gpu[07-09]"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "1", "MASTER_ADDR": "node1"}


def test_the_launcher_is_known_by_its_variables():
    assert find_environment({"HOME": "/"}) == Environment("python")
    assert find_environment(TORCHRUN) == Environment("torchrun", 1, 2, "node1", 29500)
    # torchrun within a Slurm job.
    assert find_environment(SRUN | TORCHRUN).launcher == "torchrun"
    # A batch script has a rank, but no step of several tasks.
    assert find_environment({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}) == Environment("python")
    started = find_environment({"RANK": "0", "WORLD_SIZE": "2", "PLAIT_STORE": "/tmp/x"})
    assert started == Environment("plait.launch", 0, 2, store="/tmp/x")
    srun = find_environment(SRUN)
    assert (srun.launcher, srun.rank, srun.world_size, srun.address) == ("srun", 3, 4, "gpu07")
    mpi = find_environment(OPEN_MPI)
    assert (mpi.launcher, mpi.rank, mpi.world_size, mpi.address) == ("Open MPI", 1, 2, "127.0.0.1")
    mpich = find_environment(MPICH | {"MASTER_PORT": "1234"})
    assert mpich == Environment("MPICH", 1, 2, "node1", 1234)


def test_the_steps_of_a_job_meet_at_ports_of_their_own():
    def port(step: str) -> int:
        return find_environment(SRUN | {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": step}).port

    assert port("0") == port("0") != port("1")
    assert 1024 < port("0") < 32768


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "0"}, "has RANK, but no WORLD_SIZE and no MASTER_ADDR and no MASTER_PORT: .*torchrun"),
        (TORCHRUN | {"RANK": "2"}, r"RANK: found 2, expected 0 to 1 \(WORLD_SIZE is 2\)"),
        (TORCHRUN | {"WORLD_SIZE": "two"}, "WORLD_SIZE: found 'two', expected a whole number"),
        (TORCHRUN | {"RANK": "-1"}, "RANK: found '-1'"),
        ({"SLURM_STEP_NUM_TASKS": "2"}, "SLURM_PROCID is not set, but srun sets it"),
        (
            SRUN | {"SLURM_STEP_NODELIST": "[1-2]"},
            "expected a list of hosts; set MASTER_ADDR",
        ),
        ({"PMI_SIZE": "2"}, "PMI_RANK is not set, but MPICH sets it"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, "Open MPI started 2 processes.*MASTER_ADDR"),
        ({"RANK": "0", "PLAIT_STORE": "/tmp/x"}, "WORLD_SIZE is not set, but plait.launch sets it"),
    ],
)
def test_missing_and_wrong_variables_are_named(variables: dict[str, str], message: str):
    with pytest.raises(InputError, match=message):
        find_environment(variables)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"),
        ("gpu[07-09,12],cpu1", "gpu07"),
        ("gpu[3]", "gpu3"),
        ("a1,b[2-3]", "a1"),
        ("rack[1-2]-node", "rack1-node"),
        ("gpu-[001,004-007].cluster", "gpu-001.cluster"),
        ("rack[1-2]n[05-09]", "rack1n05"),
        ("10.0.0.[5-6]", "10.0.0.5"),
    ],
)
def test_the_first_host_of_slurms_list(nodes: str, first: str):
    assert first_node(nodes) == first


def test_hosts_of_one_name_that_share_no_memory_are_told_apart():
    assert name_hosts(["m a", "m a", "n b", "k a", "m a"]) == ("a", "a", "b", "a#2", "a")


def test_devices_are_chosen_in_words():
    assert choose_device("cpu", 3) == torch.device("cpu")
    assert choose_device(torch.device("cuda", 1), 0) == torch.device("cuda", 1)
    if not torch.cuda.is_available():
        assert choose_device("auto", 1) == torch.device("cpu")
        with pytest.raises(InputError, match="torch sees no GPU here; use device: cpu or auto"):
            choose_device("cuda", 0)
    for wrong in ("gpu", None):
        with pytest.raises(InputError, match=f"device: found {wrong!r}, expected auto, cpu, cuda or"):
            choose_device(wrong, 0)


@pytest.mark.parametrize("wrong", [0, -1.0, float("nan"), "x"])
def test_a_limit_of_waits_is_a_time(wrong):
    with pytest.raises(InputError, match=r"timeout_s: found .*, expected seconds, more than 0"):
        plait.init(timeout_s=wrong)


class FakeStore:
    """The keys that the other workers have set, of whose GPUs two may be the same."""

    def __init__(self, gpus: list[str]) -> None:
        self.keys = {f"plait/gpu/{rank}": gpu.encode() for rank, gpu in enumerate(gpus)}

    def set(self, key: str, value: str) -> None:
        self.keys[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.keys[key]


@pytest.mark.parametrize(
    ("gpus", "visible", "backend"),
    [
        # Two hosts with two GPUs each, all visible; and each worker sees only its own.
        (["a0", "a1", "b0", "b1"], 2, "cpu:gloo,cuda:nccl"),
        (["a0", "a1", "b0", "b1"], 1, "cpu:gloo,cuda:nccl"),
        (["a0", "a0", "b0", "b1"], 1, "gloo"),  # two workers share a GPU
        (["a0", "", "b0", "b1"], 2, "gloo"),  # one has none
    ],
)
def test_workers_take_the_visible_gpus_of_their_host_in_turn_and_nccl_if_each_has_its_own(
    gpus: list[str], visible: int, backend: str, monkeypatch: pytest.MonkeyPatch
):
    hosts = ("a", "a", "b", "b")
    for rank in range(4):
        # What CUDA_VISIBLE_DEVICES leaves is what torch counts.
        monkeypatch.setattr(torch.cuda, "is_available", lambda rank=rank: bool(gpus[rank]))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
        device = choose_device("auto", local_rank=rank % 2)
        expected = torch.device("cuda", rank % 2 % visible) if gpus[rank] else torch.device("cpu")
        assert device == expected
        monkeypatch.setattr("plait.api.world.name_of", lambda device, rank=rank: gpus[rank])
        meeting: Any = SimpleNamespace(store=FakeStore(gpus), rank=rank, hosts=hosts)
        assert choose_backend(meeting, device) == backend


def test_a_process_that_nobody_launched_is_a_world_of_one():
    with plait.init("cpu") as world:
        assert (world.rank, world.world_size, world.is_first, world.launcher) == (0, 1, True, "python")
        assert plait.init() is world
        assert plait.init("cpu", timeout_s=300) is world
        with pytest.raises(InputError, match="found timeout_s=7, but these processes are connected already"):
            plait.init(timeout_s=7)
        with pytest.raises(InputError, match="found device cuda:1, .* with cpu"):
            plait.init("cuda:1")
    with plait.init("cpu") as other:
        assert other is not world


def test_a_process_group_without_the_cpu_is_refused():
    """As that of NCCL alone is."""
    torch.distributed.init_process_group(
        "cuda:gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        with pytest.raises(InputError, match="with 'cuda:gloo', which sends no tensors of the CPU"):
            plait.init()
    finally:
        torch.distributed.destroy_process_group()


def sum_ranks(base: int) -> tuple[int, int, float]:
    with plait.init() as world:
        total = torch.tensor(float(world.rank + base))
        torch.distributed.all_reduce(total)
        return world.rank, world.world_size, total.item()


def fail_on_one() -> None:
    if plait.init().rank == 1:
        raise KeyError("the reason")
    plait.init().rendezvous.store.get("never set")


def die_on_one() -> None:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


def join_again() -> list[float]:
    """Sums over worlds of the same workers, one after the other."""
    sums = []
    for number in range(4):
        with plait.init("cpu", timeout_s=20.0):
            torch.distributed.all_reduce(x := torch.tensor(1.0 + number))
            sums.append(x.item())
    return sums


def test_launch_returns_what_each_worker_returned():
    with forked_commands():
        assert launch(join_again, timeout_s=60.0) == [[2.0, 4.0, 6.0, 8.0]] * 2
        assert launch(sum_ranks, 10, workers=2) == [(0, 2, 21.0), (1, 2, 21.0)]
        # Functions that exist only here are sent by value.
        assert launch(lambda: int(os.environ["RANK"]) * 2, workers=1) == [0]
    with pytest.raises(InputError, match="workers: found 0"):
        launch(sum_ranks, 10, workers=0)


def test_launch_raises_what_a_worker_raised_and_ends_the_others():
    with forked_commands():
        with pytest.raises(LaunchError, match="worker 1 of 2 failed:\n") as failure:
            launch(fail_on_one)
        assert "in fail_on_one" in str(failure.value)
        assert "KeyError: 'the reason'" in str(failure.value)
        with pytest.raises(LaunchError, match="worker 1 of 2 failed:\nit ended without an answer"):
            launch(die_on_one)
        with pytest.raises(LaunchError, match="no answer from worker 0 within 0.2 s"):
            launch(signal.pause, workers=1, timeout_s=0.2)


SCRIPT = """
import plait
from plait.api.launching import launch

class Answer:
    def __init__(self, rank):
        self.rank = rank

def work():
    return Answer(plait.init().rank)

print([answer.rank for answer in launch(work)])
"""


def test_launch_takes_functions_and_classes_of_a_script(tmp_path: Path):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "script.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "[0, 1]\n", done.stderr
