"""`plait.Elastic` on a GPU: NCCL sums gradients among workers that are killed, join, leave and end.

Workers on one GPU stand for several hosts where NCCL is configured that way: it then goes by sockets.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import plait
from plait.comm.data_group import DataGroup
from plait.comm.store import StoreServer
from plait.schema.settings import DataSettings, ModelSettings, TrainSettings
from support.elastic import Versions, membership, train_elastic
from support.elastic_loop import ENDED, LEFT, STEPS, Loop, eventful, run_alone
from support.meeting import SECRET
from support.training import largest_difference, train_here, unverified_job
from support.world import run_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

# Of a whole launch, start of its processes included.
LAUNCH_S = 90.0


def be_a_host() -> None:
    """Let NCCL take this process for a host of its own, reached by sockets."""
    os.environ |= {
        "NCCL_HOSTID": f"host {os.getpid()}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
    }


def count_sums() -> list[int]:
    """The workers that each sum by NCCL has, in the order of the sums."""
    sizes: list[int] = []
    before = DataGroup.all_reduce

    def counted(group: DataGroup, tensor: Tensor) -> Any:
        sizes.append(len(group.ranks))
        return before(group, tensor)

    DataGroup.all_reduce = counted  # type: ignore[method-assign]
    return sizes


def eventful_on_gpu() -> tuple[dict[str, Any] | None, list[int]]:
    be_a_host()
    sizes = count_sums()
    return eventful("cuda:0"), sizes


def close_to(expected: dict[str, Any], found: dict[str, Any]) -> bool:
    pairs = zip(expected["weights"], found["weights"], strict=True)
    return max((torch.tensor(one) - torch.tensor(two)).abs().max().item() for one, two in pairs) < 1e-10


def test_workers_on_a_gpu_that_are_killed_join_leave_and_end_change_no_step() -> None:
    alone = run_alone()
    answers = plait.launch(eventful_on_gpu, workers=3, elastic="1:3", timeout_s=LAUNCH_S)
    ((last, sizes),) = [each for each in answers if each[0] is not None]
    assert last is not None
    assert close_to(alone, last)
    assert (last["steps"], last["rate"]) == (alone["steps"], alone["rate"])
    assert last["changes"] == [(LEFT, (0, 3), (), (2,), ()), (ENDED, (3,), (), (0,), ())]
    print("seconds of pause:", last["stalls"])
    assert all(0 < seconds < 20 for seconds in last["stalls"])
    # Worker 3 has summed with two others, and with one; alone it sums nothing.
    assert sorted(set(sizes)) == [2, 3]


def stopped() -> dict[str, Any]:
    """The loop of three workers of which one dies while the GPUs of the others wait for its part of a sum."""
    be_a_host()
    sizes = count_sums()
    loop = Loop("cuda:0")
    elastic, worker = loop.elastic, loop.elastic.worker
    for batch in loop.batches():
        if (worker, elastic.step) == (1, 7):
            # The others have begun their sums by then, and their GPUs wait.
            time.sleep(1.0)
            os.kill(os.getpid(), signal.SIGKILL)
        loop.step(*batch)
    return {**loop.result(), "sizes": sorted(set(sizes)), "worker": worker}


def test_a_sum_on_the_gpu_that_waits_for_a_killed_worker_is_aborted_and_taken_again() -> None:
    alone = run_alone()
    found = plait.launch(stopped, workers=2, elastic="1:2", timeout_s=LAUNCH_S)
    assert found
    for each in found:
        assert close_to(alone, each)
        assert each["steps"][0] == STEPS
    (first,) = [each for each in found if each["worker"] == 0]
    print("seconds of pause:", first["stalls"])
    lost = first["changes"][0]
    assert lost[-1] == (1,)
    assert first["sizes"] == [2]
    assert all(seconds < 20 for seconds in first["stalls"])


def job_on_gpu(rank: int, *arguments: Any, **more: Any) -> dict[str, Any]:
    be_a_host()
    torch.cuda.set_device(0)
    sizes = count_sums()
    return {**train_elastic(rank, *arguments, **more), "sizes": sorted(set(sizes))}


def run_job(settings: TrainSettings, folder: Path, versions: Versions, **more: Any) -> list[dict[str, Any]]:
    store = StoreServer(SECRET)
    may_die = (more["victim"],) if "victim" in more else ()
    try:
        arguments = (replace(settings, device="cuda"), folder, store.address.text, versions)
        return run_ranks(3, job_on_gpu, *arguments, may_die=may_die, deadline_s=LAUNCH_S, **more)
    finally:
        store.close()


def test_the_step_of_a_job_in_which_a_worker_dies_is_taken_again_on_the_gpus_of_the_rest(
    tmp_path: Path,
) -> None:
    model = ModelSettings("support.elastic:MortalNet", {"dies_at": 12})
    settings = unverified_job(model=model, steps=20, data=DataSettings("digits", 60))
    after = membership(2, (0, 1), lost=(2,))
    found = run_job(settings, tmp_path / "gpu", [(0, (0, 1, 2))], victim=2, after_loss=after)
    _, alone = train_here(settings, tmp_path / "alone")
    for each in found[:2]:
        assert largest_difference(each["weights"], alone) < 1e-9
        assert each["sizes"] == [2, 3]


def test_workers_that_join_and_leave_a_job_on_gpus_change_no_step(tmp_path: Path) -> None:
    settings = unverified_job(steps=20, data=DataSettings("digits", 60))
    found = run_job(settings, tmp_path / "gpu", [(0, (0, 1)), (5, (0, 1, 2)), (12, (1, 2))])
    _, alone = train_here(settings, tmp_path / "alone")
    for each in found[1:]:
        assert largest_difference(each["weights"], alone) < 1e-9
        assert each["sizes"] == [2, 3]
