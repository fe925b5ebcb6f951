"""Channels: what one worker sends, another receives, whatever its type, and no wait is silent."""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from plait.comm.channels import Channels, connect
from plait.comm.links.shm import SharedLink
from plait.core.errors import PeerError
from support.further import but_further
from support.meeting import rendezvous_of
from support.world import run_ranks

FAR = ("a", "b", "c")
NEAR = ("a", "a", "a")

KINDS = [
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.bool, torch.int64, torch.uint8,
    torch.complex64,
]  # fmt: skip


def open_channels(rank: int, hosts: tuple[str, ...], deadline_s: float = 20.0, window: int = 8) -> Channels:
    return connect(rendezvous_of(rank, hosts), range(len(hosts)), deadline_s=deadline_s, window=window)


def examples(number: int) -> list[torch.Tensor | None]:
    torch.manual_seed(number)
    whole = torch.randn(3 + number % 4, 5) * 10
    kinds: list[torch.Tensor | None] = [whole.to(kind) for kind in KINDS]
    return [*kinds, None, torch.tensor(3.5), whole.t(), torch.empty(0, 4)]


def pass_on(rank: int, hosts: tuple[str, ...]) -> bool:
    """Rank 0 sends to 1, which sends on to 2, which checks; shapes change from message to message."""
    channels = open_channels(rank, hosts)
    good = True
    for number in range(12):
        sent = examples(number)
        if rank > 0:
            message = channels.receive(rank - 1, 7, number, "a test")
            good = good and message.content.note == f"note {number // 5}"
            good = good and all(
                (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
                for a, b in zip(message.content.tensors, sent, strict=True)
            )
            sent = list(message.content.tensors)
        if rank < 2:
            channels.send(rank + 1, 7, number, sent, "a test", note=f"note {number // 5}")
        if rank > 0:
            message.release()
    channels.close()
    return good


@pytest.mark.parametrize("hosts", [NEAR, FAR, ("a", "a", "b")])
def test_tensors_of_any_type_and_changing_shape_arrive_as_they_were(hosts: tuple[str, ...]) -> None:
    assert run_ranks(3, pass_on, hosts) == [True, True, True]


def send_before_anyone_receives(rank: int, hosts: tuple[str, ...]) -> float:
    """Both send several messages on several channels first, and receive the later channel first."""
    channels = open_channels(rank, hosts)
    other = 1 - rank
    big = torch.arange(1 << 18, dtype=torch.float32) + rank
    for number in range(6):
        for channel in (1, 2):
            channels.send(other, channel, number, [big * channel], "a test")
    total = 0.0
    for channel in (2, 1):
        for number in range(6):
            message = channels.receive(other, channel, number, "a test")
            (tensor,) = message.content.tensors
            assert tensor is not None
            total += float(tensor[1]) / channel
            message.release()
    channels.close()
    return total


@pytest.mark.parametrize("hosts", [NEAR[:2], FAR[:2]])
def test_sending_waits_for_nobody_and_channels_are_apart(hosts: tuple[str, ...]) -> None:
    assert run_ranks(2, send_before_anyone_receives, hosts) == [24.0, 12.0]


def buffer_count(channels: Channels, peer: int) -> int:
    """The buffers for messages to and from `peer`, used or free; over TCP the messages on their way."""
    link = channels.links[peer]
    if isinstance(link, SharedLink):
        return len(link._ours) + len(link._theirs)
    return sum(link.under_way.values())


def hold_a_message(rank: int) -> tuple[float, float]:
    """What is received stays as it is until it is released, and memory is used again after that."""
    channels = open_channels(rank, NEAR[:2])
    if rank == 0:
        for number in range(40):
            channels.send(1, 0, number, [torch.full((4096,), float(number))], "a test")
        return 0.0, 0.0
    first = channels.receive(0, 0, 0, "a test")
    for number in range(1, 40):
        message = channels.receive(0, 0, number, "a test")
        message.release()
    tensor = first.content.tensors[0]
    assert tensor is not None
    return float(tensor.sum()), buffer_count(channels, 0)


def test_a_message_keeps_its_memory_until_released_and_no_more_than_a_window_is_used() -> None:
    held, buffers = run_ranks(2, hold_a_message)[1]
    assert held == 0.0
    assert buffers <= 8


def send_back_and_forth(rank: int) -> int:
    """Two channels there and two back, of messages that grow now and then; the buffers that they leave."""
    channels = open_channels(rank, FAR[:2], window=64)
    for number in range(40):
        for channel in (2 * rank, 2 * rank + 1):
            sent = [torch.full((1 << (4 + number // 4),), float(number))]
            channels.send(1 - rank, channel, number, sent, "a test")
        for channel in (2 - 2 * rank, 3 - 2 * rank):
            message = channels.receive(1 - rank, channel, number, "a test")
            assert message.content.tensors[0] is not None
            assert float(message.content.tensors[0][-1]) == number
            message.release()
    buffers = buffer_count(channels, 1 - rank)
    channels.close()
    return buffers


def test_messages_that_another_host_has_received_leave_their_buffers() -> None:
    assert max(run_ranks(2, send_back_and_forth)) <= 4 * 2


def wait_for_the_silent(rank: int, hosts: tuple[str, ...]) -> Any:
    channels = open_channels(rank, hosts, deadline_s=1.0)
    if rank == 1:
        threading.Event().wait(30)
        return None
    try:
        channels.receive(1, 0, 5, "the forward of microbatch 5 in stage 2")
    except PeerError as failure:
        return str(failure)
    return None


@pytest.mark.parametrize("hosts", but_further((NEAR[:2], FAR[:2]), NEAR[:2]))
def test_a_silent_peer_is_named_with_what_was_waited_for(hosts: tuple[str, ...]) -> None:
    words = run_ranks(2, wait_for_the_silent, hosts, may_die=(1,), deadline_s=25)[0]
    assert "worker 0 waited 1 s for worker 1" in words
    assert "forward of microbatch 5 in stage 2" in words


def wait_beside_the_dead(rank: int) -> Any:
    # Longer than the world's: nobody may wait for its end.
    channels = open_channels(rank, NEAR, deadline_s=60.0)
    if rank == 2:
        time.sleep(0.3)
        os._exit(9)
    # Rank 1 waits for the dead; rank 0 only for rank 1, which raises and sends nothing.
    try:
        channels.receive(1 if rank == 0 else 2, 0, 0, "the backward of microbatch 3 in stage 1")
    except PeerError as failure:
        # Each stays until both have spoken, or it would be the one that is gone.
        store = dist.distributed_c10d._get_default_store()
        store.set(f"spoken{rank}", "")
        store.wait(["spoken0", "spoken1"], timedelta(seconds=20))
        return str(failure)
    return None


def test_a_peer_that_died_is_named_at_once_even_by_those_who_wait_for_others() -> None:
    answers = run_ranks(3, wait_beside_the_dead, may_die=(2,), deadline_s=25)
    for words in answers[:2]:
        assert "worker 2 is gone" in words
        assert "backward of microbatch 3 in stage 1" in words


def end_early(rank: int) -> float:
    channels = open_channels(rank, NEAR)
    if rank == 2:
        channels.close()
        return 0.0
    time.sleep(0.3)
    if rank == 0:
        channels.send(1, 0, 0, [torch.ones(3)], "a test")
        return 0.0
    message = channels.receive(0, 0, 0, "a test")
    assert message.content.tensors[0] is not None
    return float(message.content.tensors[0].sum())


def test_a_peer_that_ended_on_purpose_disturbs_nobody() -> None:
    assert run_ranks(3, end_early) == [0.0, 3.0, 0.0]


def send_growing(rank: int) -> tuple[int, int]:
    """Files and buffers that there are after many messages, each larger than the one before."""
    channels = connect(rendezvous_of(rank, NEAR[:2]), range(2), deadline_s=20, window=8)
    before = len(os.listdir("/proc/self/fd"))
    for number in range(300):
        if rank == 0:
            channels.send(1, 0, number, [torch.zeros(1024 * (number + 1))], "a test")
            channels.receive(1, 1, number, "a test").release()
        else:
            channels.receive(0, 0, number, "a test").release()
            channels.send(0, 1, number, [torch.zeros(1)], "a test")
    files = len(os.listdir("/proc/self/fd")) - before
    buffers = buffer_count(channels, 1 - rank)
    dist.barrier()
    channels.close()
    return files, buffers


def test_messages_of_many_sizes_share_buffers_and_hold_no_files_open() -> None:
    for files, buffers in run_ranks(2, send_growing):
        assert files <= 1
        assert buffers < 40


def send_to_one_who_does_not_read(rank: int) -> str:
    channels = connect(rendezvous_of(rank, NEAR[:2]), range(2), deadline_s=1, window=900)
    dist.barrier()
    words = ""
    if rank == 0:
        for number in range(900):
            channels.send(1, 0, number, [torch.zeros(1)], "a test")
        with pytest.raises(PeerError) as failure:
            channels.send(1, 0, 900, [torch.zeros(1)], "the last one")
        words = str(failure.value)
    dist.barrier()
    return words


def test_a_peer_that_reads_nothing_holds_nobody_up_beyond_the_deadline() -> None:
    assert (
        "worker 0 waited 1 s for worker 1 to take the last one"
        in run_ranks(2, send_to_one_who_does_not_read)[0]
    )
