"""Pipelines on a GPU take the same steps as one process there, whichever way tensors go between workers.

Two workers on one GPU stand for two hosts where NCCL is configured that way: it then goes by sockets.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist

from plait.jobs.train import train
from plait.launcher.display import Silent
from plait.planner.schedules.in_flight import Schedule
from plait.schema.job import make_job
from plait.sync.allreduce.buckets import AllReduce
from plait.sync.allreduce.reducers import Members
from support.meeting import rendezvous_of
from support.pipelines import Case, Delayed, train_many, train_plainly
from support.world import run_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

TWO = (((0,), (1,)),)
NEAR, FAR = ("a", "a"), ("a", "b")
KINDS = (
    Schedule.FLUSH, Schedule.GPIPE, Schedule.ZERO_BUBBLE, Schedule.STASH, Schedule.TWO_BUFFERED
)  # fmt: skip


def be_a_host(rank: int) -> None:
    os.environ["NCCL_HOSTID"] = f"host {rank}"
    os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    torch.cuda.set_device(0)


def train_on_hosts(rank: int, cases: tuple[Case, ...]) -> Any:
    be_a_host(rank)
    return train_many(rank, cases)


@pytest.mark.parametrize("hosts", [NEAR, FAR])
@pytest.mark.parametrize("model", ["cnn", "lstm", "transformer"])
def test_pipelines_on_a_gpu_equal_plain_training(model: str, hosts: tuple[str, ...]) -> None:
    common = {"steps": 5, "hosts": hosts, "device": "cuda:0"}
    cases = tuple(Case(model, TWO, kind, **common) for kind in KINDS)
    cases += (Case(model, (((0,), (1,), (0,), (1,)),), Schedule.INTERLEAVED, **common),)
    answers = run_ranks(2, train_on_hosts, cases, deadline_s=120.0)
    for number, case in enumerate(cases):
        expected = train_plainly(case) if case.schedule.synchronous else Delayed(case).train()
        for weights, _ in (answer[number] for answer in answers):
            for name, value in weights.items():
                assert numpy.abs(value - expected[name]).max() < 1e-10, f"{case}: {name}"


def sum_by_nccl(rank: int, steps: int) -> list[float]:
    be_a_host(rank)
    group = dist.new_group([0, 1], backend="nccl")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 700), torch.nn.ReLU(), torch.nn.Linear(700, 8)).cuda()
    members = Members(rendezvous_of(rank, ["a", "a"]), (0, 1), group)
    sync = AllReduce(list(model.parameters()), members)
    losses = []
    for step in range(steps):
        sync.begin()
        torch.manual_seed(100 + step)
        inputs = torch.randn(6, 64).cuda()[3 * rank : 3 * rank + 3]
        loss = model(inputs).square().mean() / 2
        sync.before_backward(last=True)
        loss.backward()
        losses.append(float(sync.sum_gradients(loss.detach().reshape(1))))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
    return losses


def test_workers_that_sum_by_nccl_take_the_steps_of_one_process() -> None:
    first, second = run_ranks(2, sum_by_nccl, 8)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 700), torch.nn.ReLU(), torch.nn.Linear(700, 8))
    for step, found in enumerate(first):
        torch.manual_seed(100 + step)
        loss = model(torch.randn(6, 64)).square().mean()
        assert abs(found - float(loss)) < 1e-4 * float(loss)
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
    assert first == second
    assert first[-1] < 0.9 * first[0]


class KeepsWorkers(Silent):
    def started(self, workers: Any) -> None:
        self.pids = [worker.pid for worker in workers]


def test_a_run_on_a_gpu_leaves_no_shared_memory_behind(tmp_path: Path) -> None:
    job = {
        "name": "shared",
        "model": "plait.workloads.mlp:mlp_tiny",
        "data": {"kind": "digits", "batch_size": 32},
        "optimizer": {"kind": "sgd", "lr": 0.02},
        "steps": 5,
        "parallel": {"workers": 2, "plan": "model-parallel", "schedule": "stash"},
        "run_dir": str(tmp_path / "runs"),
    }
    display = KeepsWorkers()
    train(make_job(job), display=display)
    assert len(display.pids) == 2
    # Other tests may run at the same time: a file is named after the process that made it.
    marks = [mark for pid in display.pids for mark in (f"torch_{pid}_", f".{pid:x}.")]
    assert [name for name in os.listdir("/dev/shm") if any(mark in name for mark in marks)] == []
