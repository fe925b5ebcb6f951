"""Trials as processes that share a device, with the driver's time slices or under MPS."""

from __future__ import annotations

import os
from collections.abc import Sequence
from multiprocessing.synchronize import Barrier
from typing import Any

import torch
import torch.multiprocessing as multiprocessing

from plait.core.errors import InputError
from plait_bench.fusion.cases import Step, cases_on, seconds_of, serial_step
from plait_bench.fusion.nvml import GpuWatch

PROCESS_MODES = ("processes", "mps")
_DEADLINE_S = 300.0
# Seconds of each round, or what went wrong.
Times = list[float] | str


def times_of_processes(
    names: Sequence[str], mode: str, width: int, device: torch.device, repeats: int
) -> dict[str, tuple[Times, GpuWatch]]:
    """For each model, seconds in which each of `width` processes makes a step, all at once."""
    if mode == "mps" and "CUDA_MPS_PIPE_DIRECTORY" not in os.environ:
        raise InputError("CUDA_MPS_PIPE_DIRECTORY is not set; start nvidia-cuda-mps-control first")
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(width + 1), context.Queue()
    arguments = (list(names), str(device), repeats, barrier, results)
    workers = [context.Process(target=_one_process, args=arguments, daemon=True) for _ in range(width)]
    for worker in workers:
        worker.start()
    watches = {name: GpuWatch(device) for name in names}
    try:
        for name in names:
            barrier.wait(_DEADLINE_S)
            with watches[name]:
                for _ in range(2 * repeats):
                    barrier.wait(_DEADLINE_S)
        found = [results.get(timeout=_DEADLINE_S) for _ in workers]
    finally:
        for worker in workers:
            worker.join(5.0)
            worker.terminate()
    return {name: (together([own[name] for own in found]), watches[name]) for name in names}


def together(times: Sequence[Times]) -> Times:
    """All began together at each round, so the slowest says how long the round took."""
    failures = [own for own in times if isinstance(own, str)]
    if failures:
        return failures[0]
    return [max(own) for own in zip(*(own for own in times if not isinstance(own, str)))]


def _one_process(names: list[str], device: str, repeats: int, barrier: Barrier, results: Any) -> None:
    torch.set_num_threads(1)
    place = torch.device(device)
    found: dict[str, Times] = {}
    for name in names:
        times: list[float] = []
        failure = ""
        try:
            step: Step | None = _prepared(name, place)
        except Exception as error:  # the others wait for this process, whatever became of it
            step, failure = None, f"{type(error).__name__}: {str(error)[:80]}"
        barrier.wait(_DEADLINE_S)
        for _ in range(repeats):
            barrier.wait(_DEADLINE_S)
            if step is not None:
                times.append(seconds_of(step, place, inner=10))
            barrier.wait(_DEADLINE_S)
        found[name] = failure or times
        del step
        if place.type == "cuda":
            torch.cuda.empty_cache()
    results.put(found)


def _prepared(name: str, place: torch.device) -> Step:
    step = serial_step(cases_on(place)[name], place)
    seconds_of(step, place)
    return step
