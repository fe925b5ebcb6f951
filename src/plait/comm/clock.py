"""The offset of a host's clock to the clock of the first worker's host."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

_ROUNDS = 8


def clock_offset(rank: int, hosts: Sequence[str]) -> float:
    """Seconds to add to this worker's clock to get the first worker's; all ranks call it together.

    `hosts` names the host of each rank; workers on the first one's host share its clock. Of several round
    trips the fastest is used, and its answer is assumed to be from half way.
    """
    remote = [peer for peer, host in enumerate(hosts) if host != hosts[0]]
    if rank == 0:
        for peer in remote:
            _answer(peer)
    return _ask() if rank in remote else 0.0


def _answer(peer: int) -> None:
    question = torch.zeros(1, dtype=torch.float64)
    for _ in range(_ROUNDS):
        dist.recv(question, peer)
        dist.send(torch.tensor([time.time()], dtype=torch.float64), peer)


def _ask() -> float:
    fastest, offset = float("inf"), 0.0
    answer = torch.zeros(1, dtype=torch.float64)
    for _ in range(_ROUNDS):
        asked = time.time()
        dist.send(answer, 0)
        dist.recv(answer, 0)
        now = time.time()
        if now - asked < fastest:
            fastest, offset = now - asked, float(answer) - (asked + now) / 2
    return offset
