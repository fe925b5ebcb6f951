"""All-reduce of gradients in buckets, sent while backward still runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20


@dataclass
class Bucket:
    """Gradients that travel together: one flat buffer, and each parameter's view of it."""

    parameters: list[Parameter]
    flat: Tensor
    views: list[Tensor]
    waiting: int = 0
    filled: list[bool] = field(default_factory=list)


class AllReduce:
    """Sums the gradients of all workers; each worker has weighted its loss by its share of the batch.

    Backward fills buckets from the last layer to the first, and each goes out as soon as it is full. All
    ranks send them in the same order, whatever order their backward had. Between `begin` and `agree` every
    rank runs the same number of backward passes or none; only the last one (`last=True`) sends.
    """

    def __init__(self, parameters: Sequence[Parameter], group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self._buckets = make_buckets(parameters)
        self._sending: list[dist.Work] = []
        self._next = 0
        self._armed = False
        for index, bucket in enumerate(self._buckets):
            for place, parameter in enumerate(bucket.parameters):
                parameter.register_post_accumulate_grad_hook(self._hook(index, place))

    def begin(self) -> None:
        """Forget the gradients of the step before."""
        for bucket in self._buckets:
            bucket.waiting = len(bucket.parameters)
            bucket.filled = [False] * len(bucket.parameters)
            for parameter in bucket.parameters:
                parameter.grad = None
        self._next = 0
        self._armed = False

    def before_backward(self, last: bool) -> None:
        """Whether the backward pass that follows completes the gradients of this step."""
        self._armed = last

    def agree(self, notes: Tensor) -> Tensor:
        """Every rank's gradients now hold the sum over all ranks; returns the sum of `notes` likewise.

        `notes` is a small vector on the gradients' device (loss, flags) that travels along as float64. A
        parameter that no rank used keeps no gradient, as in one process.
        """
        self._take_rest()
        marks = [f for b in self._buckets for f in b.filled]
        carried = torch.cat([notes.detach().double(), torch.tensor(marks, device=notes.device).double()])
        note_work = dist.all_reduce(carried, group=self._group, async_op=True)
        for work in [*self._sending, note_work]:
            work.wait()
        self._sending.clear()
        # What this rank filled was used; only for the rest must it look at what the others say.
        used = marks if all(marks) else [count > 0 for count in carried[len(notes) :].tolist()]
        self._hand_back(used)
        return carried[: len(notes)]

    def _hook(self, index: int, place: int) -> Callable[[Tensor], None]:
        def take(parameter: Tensor) -> None:
            if self._armed:
                self._take(index, place, parameter)
                self._send_full()

        return take

    def _take(self, index: int, place: int, parameter: Tensor) -> None:
        bucket = self._buckets[index]
        assert parameter.grad is not None
        bucket.views[place].copy_(parameter.grad)
        parameter.grad = None
        bucket.filled[place] = True
        bucket.waiting -= 1

    def _send_full(self) -> None:
        while self._next < len(self._buckets) and self._buckets[self._next].waiting == 0:
            flat = self._buckets[self._next].flat
            work = dist.all_reduce(flat, group=self._group, async_op=True)
            self._sending.append(work)
            self._next += 1

    def _take_rest(self) -> None:
        """Fill what the last backward pass did not reach: gradients of earlier passes, or zeros."""
        for index, bucket in enumerate(self._buckets):
            for place, parameter in enumerate(bucket.parameters):
                if not bucket.filled[place] and parameter.grad is not None:
                    self._take(index, place, parameter)
                elif not bucket.filled[place]:
                    bucket.views[place].zero_()
                    bucket.waiting -= 1
        self._send_full()

    def _hand_back(self, used: Sequence[bool]) -> None:
        marks = iter(used)
        for bucket in self._buckets:
            for parameter, view in zip(bucket.parameters, bucket.views):
                parameter.grad = view if next(marks) else None


def make_buckets(parameters: Sequence[Parameter]) -> list[Bucket]:
    """Parameters from last to first in buckets of one type and device; the first is small, to start early."""
    buckets: list[Bucket] = []
    members: list[Parameter] = []
    limit = FIRST_BUCKET_BYTES
    size = 0
    for parameter in reversed([p for p in parameters if p.requires_grad]):
        other = bool(members) and (parameter.dtype, parameter.device) != (members[0].dtype, members[0].device)
        if members and (other or size >= limit):
            buckets.append(_bucket(members))
            members, size, limit = [], 0, BUCKET_BYTES
        members.append(parameter)
        size += parameter.numel() * parameter.element_size()
    if members:
        buckets.append(_bucket(members))
    return buckets


def _bucket(members: list[Parameter]) -> Bucket:
    flat = torch.zeros(sum(p.numel() for p in members), dtype=members[0].dtype, device=members[0].device)
    pieces = flat.split([p.numel() for p in members])
    return Bucket(list(members), flat, [piece.view_as(p) for piece, p in zip(pieces, members)])
