"""Links are measured between real processes."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from plait.comm.channels import Channels
from plait.core.errors import InputError
from plait.profiler.link_bandwidth import Link, measure_links
from support.meeting import rendezvous_of
from support.world import run_ranks


def links_of(rank: int, **options: Any) -> tuple[Link, ...]:
    return measure_links(rendezvous_of(rank, ["here"] * dist.get_world_size()), repeats=3, **options)


def test_every_pair_is_measured_both_ways_and_all_ranks_agree() -> None:
    results = run_ranks(3, links_of, message_bytes=1 << 20)
    assert results[0] == results[1] == results[2]
    pairs = [(link.source, link.target) for link in results[0]]
    assert sorted(pairs) == [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
    for link in results[0]:
        assert link.same_host
        assert 1e6 < link.bytes_per_s < 1e12
        assert 1e-6 < link.latency_s < 0.5


def slow_one_direction(rank: int) -> tuple[Link, ...]:
    """Rank 1 sends slowly: 300 ms for each large message, longer than a busy machine holds one up."""
    send = Channels.send

    def slow(self: Channels, peer: int, channel: int, number: int, tensors: Any, what: str) -> None:
        if rank == 1 and tensors[0].numel() > 1:
            time.sleep(0.3)
        send(self, peer, channel, number, tensors, what)

    with mock.patch.object(Channels, "send", slow):
        return measure_links(rendezvous_of(rank, ["here"] * 2), repeats=3, message_bytes=1 << 20)


def test_a_slow_direction_is_distinguished_from_the_fast_one() -> None:
    there, back = run_ranks(2, slow_one_direction)[0]
    assert (there.source, there.target) == (0, 1)
    assert back.bytes_per_s < 2 * (1 << 20) / 0.3
    assert there.bytes_per_s > 3 * back.bytes_per_s


def two_hosts(rank: int) -> tuple[Link, ...]:
    return measure_links(rendezvous_of(rank, ["a", "a", "b"]), repeats=1, message_bytes=1024)


def test_links_within_a_host_are_distinguished_from_links_between_hosts() -> None:
    links = run_ranks(3, two_hosts)[0]
    assert [(x.source, x.target) for x in links if x.same_host] == [(0, 1), (1, 0)]


def unknown_rank(rank: int) -> str:
    with pytest.raises(InputError) as caught:
        measure_links(rendezvous_of(rank, ["here"] * 2), [0, 7])
    return str(caught.value)


def test_a_rank_that_does_not_exist_is_refused() -> None:
    assert run_ranks(2, unknown_rank)[0] == (
        "found ranks [0, 7]; expected at least two different ones of 0 to 1"
    )
