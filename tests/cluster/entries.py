"""What test workers run: functions that the launcher finds by name."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from plait.core.errors import InputError, JobError


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
    """Worker 1 fails as told while the others wait for it."""
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


def refuse(settings: dict[str, Any]) -> None:
    raise InputError("model: no such thing")
