"""What test workers run: functions that the launcher finds by name."""

from __future__ import annotations

import errno
import gc
import os
import signal
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from plait.core.errors import InputError, JobError
from plait.schema.topology import make_topology
from plait.sync.allreduce.buckets import AllReduce
from plait.sync.allreduce.reducers import whole_world


def add_ranks(worker: Any, settings: dict[str, Any]) -> dict[str, Any]:
    worker.join("gloo")
    x = torch.tensor([float(worker.rank)])
    dist.all_reduce(x)
    print(f"out of {worker.rank}")
    print(f"err of {worker.rank}", file=sys.stderr)
    return {
        "sum": x.item(),
        "host": worker.host,
        "pid": os.getpid(),
        "threads": os.environ["OMP_NUM_THREADS"],
        "store": worker.store.address,
        "kept": gc.get_freeze_count(),
        "preloaded": "wave" in sys.modules,
    }


def fail(worker: Any, settings: dict[str, Any]) -> None:
    """Worker 1 fails in that way while the others wait for it."""
    worker.join("gloo")
    if worker.rank == 1:
        if settings["how"] == "raise":
            raise ZeroDivisionError("a fault of the model's")
        if settings["how"] == "input":
            raise JobError("data.path: found nothing, expected a folder")
        if settings["how"] == "exit":
            os._exit(7)
        os.kill(os.getpid(), signal.SIGTERM if settings["how"] == "terminate" else signal.SIGKILL)
    dist.all_reduce(torch.zeros(1))


def work_until_stopped(worker: Any, settings: dict[str, Any]) -> dict[str, Any]:
    worker.join("gloo")
    print(f"worker {worker.rank} starts")
    steps = 0
    end = time.monotonic() + 60
    stop = torch.zeros(1)
    while not stop.item() and time.monotonic() < end:
        stop = torch.tensor([float(worker.stop_requested())])
        dist.all_reduce(stop)
        steps += 1
        time.sleep(0.02)
        if worker.rank == 0:
            worker.report({"step": steps})
    return {"steps": steps, "stopped": bool(stop.item()), "store": worker.store.address}


def work_elastic(worker: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """As a member of an elastic job; whoever is to join it lacks the data."""
    if worker.rank < 0:
        raise FileNotFoundError("no such folder: /data/digits")
    worker.join("gloo")
    worker.report_joined()
    while not worker.stop_requested():
        worker.store.add("steps", 1)
        if worker.rank == 0:
            worker.report({"step": worker.store.add("steps", 0)})
        time.sleep(0.02)
    print(f"worker {worker.rank} stops")
    return {"rank": worker.rank}


def refuse(settings: dict[str, Any]) -> None:
    raise InputError("model: no such thing")


def hang(worker: Any, settings: dict[str, Any]) -> None:
    """Worker `who` hangs while the others wait for it: in a sum of gloo's, in one over a tree, or nowhere."""
    worker.join("gloo")
    parameter = torch.nn.Parameter(torch.zeros(1000))
    sums = None
    if settings["where"] == "tree":
        members = whole_world(worker.rendezvous)
        sums = AllReduce([parameter], members=members)
        sums.switch(make_topology("binary-tree", members.hosts))
    for step in range(10**9):
        if worker.rank == settings["who"] and step == 3:
            if settings["how"] == "stops":
                os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(1000)
        if sums is not None:
            sums.begin()
            parameter.grad = torch.ones(1000)
            sums.sum_gradients(torch.zeros(0, dtype=torch.float64))
        elif settings["where"] == "gloo":
            dist.all_reduce(torch.zeros(1))
        else:
            time.sleep(0.05)


def go_on_without(worker: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """Workers may be lost; worker `who` is, in that way, and worker 0 takes longer than all others."""
    worker.report_joined()
    worker.join("gloo")
    dist.barrier()
    if worker.rank == settings["who"]:
        if settings["how"] == "input":
            raise JobError("data.path: found nothing, expected a folder")
        if settings["how"] == "disk":
            raise OSError(errno.ENOSPC, "No space left on device", "/somewhere")
        if settings["how"] == "raise":
            raise ZeroDivisionError("a fault of one worker's")
        os.kill(os.getpid(), signal.SIGSTOP if settings["how"] == "stop" else signal.SIGKILL)
    if worker.rank == 0:
        time.sleep(settings["longer_s"])
    return {"rank": worker.rank}


def coordinate(process: Any, settings: dict[str, Any]) -> str:
    """Doubles numbers until all workers have ended, or fails in that way."""

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        if settings.get("how") == "refuse":
            raise InputError("--over: found nothing")
        if settings.get("how") == "raise":
            os._exit(7)
        return {"twice": 2 * question["number"], "text": question["text"]}

    process.serve(answer, lambda membership: None)
    return f"for {len(process.membership.members)} workers"


def ask(worker: Any, settings: dict[str, Any]) -> list[int]:
    # More than the socket to the coordinator or to the worker takes at once.
    text = "x" * (1 << 20)
    answers = [worker.ask({"number": number, "text": text}) for number in range(worker.rank, 6)]
    assert all(each["text"] == text for each in answers)
    return [each["twice"] for each in answers]
