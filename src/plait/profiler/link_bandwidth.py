"""Measures the bandwidth and latency between pairs of workers, and of all-reduce."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from plait.comm.channels import Channels, connect
from plait.comm.collectives import broadcast_value
from plait.comm.rendezvous import Rendezvous
from plait.core.errors import InputError

_DEADLINE_S = 120.0


@dataclass(frozen=True)
class Link:
    """One direction between two ranks: the latency of an empty message, and the bandwidth."""

    source: int
    target: int
    bytes_per_s: float
    latency_s: float
    same_host: bool


@dataclass(frozen=True)
class Sum:
    """All-reduce over `workers`: n bytes take (1 - 1/workers)(latency_s + 4 n / bytes_per_s) seconds."""

    workers: int
    bytes_per_s: float
    latency_s: float
    same_host: bool


def sum_of_times(workers: int, same_host: bool, few: tuple[int, float], many: tuple[int, float]) -> Sum:
    """Fit the model of an all-reduce to `few` and `many` bytes, each as (bytes, seconds)."""
    share = 1 - 1 / workers
    more_bytes, more_s = many[0] - few[0], many[1] - few[1]
    # If the clock cannot resolve the difference, attribute all of the time to the bytes.
    rate = 4 * share * (more_bytes / more_s if more_bytes > 0 and more_s > 0 else many[0] / many[1])
    return Sum(workers, rate, max(0.0, few[1] / share - 4 * few[0] / rate), same_host)


def measure_links(
    rendezvous: Rendezvous,
    ranks: Sequence[int] | None = None,
    *,
    message_bytes: int = 4 << 20,
    repeats: int = 5,
    device: torch.device | str = "cpu",
) -> tuple[Link, ...]:
    """The links between all pairs of `ranks` (default: all ranks), both directions, equal on every rank.

    All ranks of the default group call it together. Tensors of `device` use the same transport as in a
    pipeline: shared memory, CUDA IPC, gloo or NCCL. Each pair is timed while the others wait, by round trips,
    as ranks have different clocks.
    """
    world = dist.get_world_size()
    chosen = list(range(world)) if ranks is None else sorted(ranks)
    _check(chosen, world, message_bytes, repeats)
    hosts = rendezvous.hosts
    small = torch.zeros(1, dtype=torch.uint8, device=device)
    large = torch.zeros(message_bytes, dtype=torch.uint8, device=device)
    rank = dist.get_rank()
    peers = chosen if rank in chosen else ()
    channels = connect(rendezvous, peers, deadline_s=_DEADLINE_S, device=small.device)
    links: list[Link] = []
    for first, second in itertools.combinations(chosen, 2):
        times = None
        if rank in (first, second):
            pair = _Pair(channels, second if rank == first else first, rank == first, repeats)
            times = pair.times(small, large)
        there, back, empty = broadcast_value(times, first)
        same_host = hosts[first] == hosts[second]
        links.append(_link(first, second, there, empty, message_bytes, same_host))
        links.append(_link(second, first, back, empty, message_bytes, same_host))
    channels.close()
    return tuple(links)


def _check(ranks: Sequence[int], world: int, message_bytes: int, repeats: int) -> None:
    if len(ranks) < 2 or len(set(ranks)) < len(ranks) or ranks[0] < 0 or ranks[-1] >= world:
        raise InputError(
            f"found ranks {list(ranks)}; expected at least two different ones of 0 to {world - 1}"
        )
    if message_bytes < 2 or repeats < 1:
        raise InputError(
            f"found messages of {message_bytes} bytes and {repeats} repeats; expected at least 2 and 1"
        )


def _link(source: int, target: int, trip_s: float, empty_s: float, count: int, same_host: bool) -> Link:
    """The link on which a round trip with `count` bytes one way took `trip_s`, an empty one `empty_s`."""
    # If the clock cannot resolve the two trips, attribute all of the time to the bytes.
    transfer_s = trip_s - empty_s if trip_s > empty_s else trip_s
    return Link(source, target, count / transfer_s, empty_s / 2, same_host)


@dataclass(frozen=True)
class _Pair:
    """This rank and a peer; the first of the two measures the time."""

    channels: Channels
    peer: int
    first: bool
    repeats: int

    def times(self, small: Tensor, large: Tensor) -> tuple[float, float, float]:
        """Seconds of round trips: large message out, large message back, empty both ways."""
        numbers = itertools.count()
        there = self._round_trip(large, small, numbers)
        back = self._round_trip(small, large, numbers)
        return there, back, self._round_trip(small, small, numbers)

    def _round_trip(self, out: Tensor, home: Tensor, numbers: Iterator[int]) -> float:
        """The minimum time from sending `out` to receiving `home`, after two warm-up trips.

        Other load on the machines only adds time, so the minimum is what the link can do.
        """
        samples = []
        for number in itertools.islice(numbers, self.repeats + 2):
            start = time.perf_counter()
            if self.first:
                self._send(out, number)
                self._receive(home, number)
            else:
                self._receive(out, number)
                self._send(home, number)
            samples.append(time.perf_counter() - start)
        return min(samples[2:])

    def _send(self, tensor: Tensor, number: int) -> None:
        self.channels.send(self.peer, _channel(tensor), number, [tensor], "a message that is timed")

    def _receive(self, like: Tensor, number: int) -> None:
        message = self.channels.receive(self.peer, _channel(like), number, "a message that is timed")
        (tensor,) = message.content.tensors
        assert tensor is not None
        tensor.to(like.device)
        message.release()
        if like.is_cuda:
            torch.cuda.synchronize(like.device)


def _channel(tensor: Tensor) -> int:
    """A separate channel for each size, as over gloo all messages of a channel have the same size."""
    return int(tensor.numel() > 1)
