"""The harness itself: worlds return, fail, hang and die, and each case is reported."""

from __future__ import annotations

import os
import sys
import threading

import pytest
import torch
import torch.distributed as dist

from support.world import WorldError, run_ranks


def add_up(rank: int, extra: int) -> tuple[int, float]:
    x = torch.tensor([float(rank + extra)])
    dist.all_reduce(x)
    return torch.get_num_threads(), x.item()


def fail_on_one(rank: int) -> None:
    if rank == 1:
        raise ValueError("rank one has had enough")
    dist.barrier()


def wait_on_two(rank: int) -> None:
    if rank == 2:
        threading.Event().wait()


def die_on_zero(rank: int) -> str:
    if rank == 0:
        os._exit(3)
    return "alive"


def is_warm(rank: int) -> bool:
    needed = ["plait.training.engines.pipeline"] + ["support.traces"] * (torch.version.cuda is None)
    return all(name in sys.modules for name in needed)


def test_ranks_are_forked_from_a_server_that_has_imported_and_traced_what_they_need():
    assert run_ranks(1, is_warm) == [True]


def test_every_rank_returns_its_result_with_one_thread():
    assert run_ranks(3, add_up, 10) == [(1, 33.0)] * 3


def test_a_failing_rank_shows_its_traceback_without_waiting_for_the_others():
    with pytest.raises(WorldError, match=r"(?s)rank 1 raised:.*rank one has had enough"):
        run_ranks(2, fail_on_one, deadline_s=3600.0)


def test_a_silent_rank_is_named_at_the_deadline():
    with pytest.raises(WorldError, match=r"(?s)no answer from ranks \[2\] within 4.*in wait_on_two"):
        run_ranks(3, wait_on_two, deadline_s=4.0)


def test_a_rank_that_dies_is_named_unless_it_may():
    with pytest.raises(WorldError, match="rank 0 died with exit code 3"):
        run_ranks(2, die_on_zero)
    assert run_ranks(2, die_on_zero, may_die=(0,)) == [None, "alive"]
