"""Channels between workers on GPUs: tensors stay on the GPU on their way; runs where there is one."""

from __future__ import annotations

import pytest
import torch

from plait.cluster.channels import connect
from support.world import run_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

KINDS = (torch.float32, torch.bfloat16, torch.int64, torch.bool)


def examples(number: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    rows = 1 + number * 37 % 300
    return (torch.randint(0, 100, (rows, 257), generator=generator) + rank).to(KINDS[number % 4]).cuda()


def exchange(rank: int, shared: bool) -> list[bool]:
    """Both send messages that change at once afterwards, and read each one three messages later."""
    device = torch.device("cuda", 0)
    channels = connect(rank, ["a", "a"], [0, 1], deadline_s=20, window=8, device=device if shared else None)
    held, right = [], []

    def look() -> None:
        message, tensor, expected = held.pop(0)
        right.append(tensor.is_cuda == shared and torch.equal(tensor.to(device), expected))
        message.release()

    for number in range(100):
        sent = examples(number, rank)
        channels.send(1 - rank, 1, number, [sent, None], "a test", note=str(number % 3))
        sent.zero_()
        message = channels.receive(1 - rank, 1, number, "a test")
        assert message.content.note == str(number % 3)
        held.append((message, message.content.tensors[0], examples(number, 1 - rank)))
        if len(held) > 3:
            look()
    while held:
        look()
    channels.close()
    return right


@pytest.mark.parametrize("shared", [True, False])
def test_tensors_of_two_workers_on_one_gpu_arrive_as_they_were(shared: bool) -> None:
    for right in run_ranks(2, exchange, shared):
        assert right == [True] * 100
