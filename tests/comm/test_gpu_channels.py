"""Channels between workers on GPUs: tensors stay on the GPU on their way; runs where there is one.

Two workers on one GPU stand for two hosts where NCCL is configured that way: it then goes by sockets.
"""

from __future__ import annotations

import os
import time

import pytest
import torch

from plait.comm.channels import Channels, connect
from plait.core.errors import PeerError
from support.meeting import rendezvous_of
from support.world import run_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

KINDS = (torch.float32, torch.bfloat16, torch.int64, torch.bool)


def examples(number: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    rows = 1 + number * 37 % 300
    return (torch.randint(0, 100, (rows, 257), generator=generator) + rank).to(KINDS[number % 4]).cuda()


def open_channels(rank: int, way: str, deadline_s: float = 20.0) -> Channels:
    """Channels between two workers: by the memory of the GPU, of the host, or NCCL."""
    os.environ["NCCL_HOSTID"] = f"host {rank}"
    os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    hosts = ["a", "b"] if way == "nccl" else ["a", "a"]
    device = None if way == "host" else torch.device("cuda", 0)
    return connect(rendezvous_of(rank, hosts), [0, 1], deadline_s=deadline_s, window=8, device=device)


def exchange(rank: int, way: str) -> list[bool]:
    """Both send messages that change at once afterwards, and read each one three messages later."""
    channels = open_channels(rank, way)
    held, right = [], []

    def look() -> None:
        message, tensor, expected = held.pop(0)
        right.append(tensor.is_cuda == (way != "host") and torch.equal(tensor.cuda(), expected))
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


@pytest.mark.parametrize("way", ["gpu", "host", "nccl"])
def test_tensors_of_two_workers_on_one_gpu_arrive_as_they_were(way: str) -> None:
    for right in run_ranks(2, exchange, way):
        assert right == [True] * 100


def send_before_anyone_receives(rank: int, way: str) -> float:
    """Both send on two channels first, and receive the later channel first; some messages are empty."""
    channels = open_channels(rank, way)
    other = 1 - rank
    big = torch.arange(1 << 18, dtype=torch.float32, device="cuda") + rank
    for number in range(6):
        for channel in (1, 2):
            channels.send(other, channel, number, [big * channel] if number != 3 else [None], "a test")
    total = 0.0
    for channel in (2, 1):
        for number in range(6):
            message = channels.receive(other, channel, number, "a test")
            (tensor,) = message.content.tensors
            assert (tensor is None) == (number == 3)
            total += 0.0 if tensor is None else float(tensor[1]) / channel
            message.release()
    channels.close()
    return total


@pytest.mark.parametrize("way", ["gpu", "nccl"])
def test_channels_between_gpus_do_not_wait_for_each_other(way: str) -> None:
    assert run_ranks(2, send_before_anyone_receives, way) == [20.0, 10.0]


def wait_for_one_that_leaves(rank: int, silent: bool) -> str:
    channels = open_channels(rank, "nccl", deadline_s=3.0)
    x = torch.ones(1000, device="cuda")
    if rank == 1:
        channels.send(0, 4, 0, [x], "a test")
        # A socket that is reset loses what its peer has not read yet.
        channels.receive(0, 5, 0, "that it has arrived").release()
        if silent:
            time.sleep(6.0)  # a worker that hangs
        os._exit(0)
    channels.receive(1, 4, 0, "the forward of microbatch 0").release()
    channels.send(1, 5, 0, [x], "that it has arrived")
    with pytest.raises(PeerError) as caught:
        channels.receive(1, 4, 1, "the forward of microbatch 1")
    return str(caught.value)


@pytest.mark.parametrize("silent", [False, True])
def test_a_gpu_worker_of_another_host_that_dies_or_hangs_is_named(silent: bool) -> None:
    words, _ = run_ranks(2, wait_for_one_that_leaves, silent, may_die=(1,))
    assert "worker 1" in words
    assert "the forward of microbatch 1" in words
    assert ("waited 3 s" in words) == silent
