"""Messages without a tensor on a GPU, between workers that have one each: they go over TCP."""

from __future__ import annotations

import torch
import torch.distributed as dist

from plait.comm.channels import Channels
from plait.comm.links.nccl import NcclLink, NcclPair
from support.meeting import rendezvous_of
from support.world import run_ranks


def exchange(rank: int) -> list[list[float | None]]:
    """Both send on two channels first, growing messages and nothing at all, and receive the later first."""
    world, peer = dist.group.WORLD, 1 - rank
    assert world is not None
    (connection,) = rendezvous_of(rank, ["a", "b"]).connect("test", [peer]).values()
    link = NcclLink(connection, NcclPair(peer, torch.device("cpu"), world, world))
    channels = Channels(rank, {peer: link}, deadline_s=20.0, window=8)
    for number in range(5):
        for channel in (3, 4):
            tensor = torch.full((10 ** (number + 1),), float(rank + channel)) if number != 2 else None
            channels.send(peer, channel, number, [tensor], "a test", f"note {number}")
    found: list[list[float | None]] = []
    for channel in (4, 3):
        for number in range(5):
            message = channels.receive(peer, channel, number, "a test")
            (tensor,) = message.content.tensors
            assert message.content.note == f"note {number}"
            assert tensor is None or tensor.numel() == 10 ** (number + 1)
            found.append([None if tensor is None else float(tensor[-1])])
            message.release()
    channels.close()
    return found


def test_messages_on_the_host_arrive_in_order_on_every_channel() -> None:
    for rank, found in enumerate(run_ranks(2, exchange)):
        later, earlier = [5.0 - rank], [4.0 - rank]
        assert found == [later, later, [None], later, later, earlier, earlier, [None], earlier, earlier]
