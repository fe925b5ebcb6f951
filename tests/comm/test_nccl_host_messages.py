"""Messages without a tensor on a GPU, between workers that have one each: they go over gloo."""

from __future__ import annotations

import torch
import torch.distributed as dist

from plait.comm.links.nccl import NcclLink
from support.world import run_ranks


def exchange(rank: int) -> list[list[float | None]]:
    """Both send on two channels first, growing messages and nothing at all, and receive the later first."""
    world = dist.group.WORLD
    assert world is not None
    link = NcclLink(1 - rank, 8, torch.device("cpu"), world, world)
    for number in range(5):
        for channel in (3, 4):
            tensor = torch.full((10 ** (number + 1),), float(rank + channel)) if number != 2 else None
            link.send(channel, number, [tensor], f"note {number}", 20.0)
    found: list[list[float | None]] = []
    for channel in (4, 3):
        for number in range(5):
            message = link.receive(channel, 20.0)
            (tensor,) = message.content.tensors
            assert (message.content.number, message.content.note) == (number, f"note {number}")
            assert tensor is None or tensor.numel() == 10 ** (number + 1)
            found.append([None if tensor is None else float(tensor[-1])])
            message.release()
    link.close(20.0)
    return found


def test_messages_on_the_host_arrive_in_order_on_every_channel() -> None:
    for rank, found in enumerate(run_ranks(2, exchange)):
        later, earlier = [5.0 - rank], [4.0 - rank]
        assert found == [later, later, [None], later, later, earlier, earlier, [None], earlier, earlier]
