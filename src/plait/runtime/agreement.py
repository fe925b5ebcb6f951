"""Agreement of workers that hold the same parameters: replicas of a stage, and stages with tied ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from plait.planner.depth import Schedule
from plait.planner.errors import PlanError
from plait.profiler.traced import TracedModel
from plait.runtime.arrangement import Arrangement
from plait.sync.all_reduce import AllReduce
from plait.sync.choice import settle
from plait.sync.reducer import Members
from plait.sync.wish import TopologyWish

Holders = dict[str, tuple[int, ...]]


def find_holders(traced: TracedModel, arrangement: Arrangement) -> Holders:
    """The workers that hold each parameter, by the first name that the model has for it."""
    found: dict[str, set[int]] = {}
    stages_of: dict[str, set[int]] = {}
    for stage, ids in enumerate(arrangement.stages):
        for layer in traced.select(ids):
            for name in layer.parameters:
                found.setdefault(name, set()).update(arrangement.holders(stage))
                stages_of.setdefault(name, set()).add(stage)
    _check_ties(arrangement, stages_of)
    return {name: tuple(sorted(workers)) for name, workers in found.items()}


def _check_ties(arrangement: Arrangement, stages_of: Mapping[str, set[int]]) -> None:
    """Under `stash`, stages with other numbers of replicas update after other microbatches."""
    if arrangement.schedule is not Schedule.STASH:
        return
    for name, stages in stages_of.items():
        counts = {arrangement.layout.replicas(stage) for stage in stages}
        if len(counts) > 1:
            raise PlanError(
                f"parameter {name!r} is tied between stages {sorted(stages)} with {sorted(counts)} replicas; "
                f"schedule stash updates them at different times: give them equal replicas, or use "
                f"schedule 2bw or flush"
            )


class Agreement:
    """Sums the gradients of each parameter over its holders. All workers make one together.

    `hosts` names the host of each worker; sums travel over `topology`, made for each set of holders,
    or as the backend does it.
    """

    def __init__(
        self,
        rank: int,
        own: Mapping[str, Parameter],
        holders: Holders,
        deadline: timedelta,
        hosts: Sequence[str] = (),
        topology: TopologyWish | None = None,
    ) -> None:
        self._own = dict(own)
        shared = sorted({workers for workers in holders.values() if len(workers) > 1})
        self._sums: list[AllReduce] = []
        for workers in shared:
            group = dist.new_group(list(workers), timeout=deadline)
            parameters = [own[name] for name in sorted(own) if holders[name] == workers]
            if rank in workers:
                # All holders go through their groups in this one order, so none waits in a circle.
                near = tuple(hosts[worker] for worker in workers) if hosts else ("",) * len(workers)
                members = Members(rank, workers, near, group, deadline.total_seconds())
                self._sums.append(AllReduce(parameters, group, members))
                if topology is not None:
                    self._sums[-1].switch(settle(topology, members, self._sums[-1].gradient_bytes)[0])
        self._counted = [own[name] for name in own if holders[name][0] == rank]
        for reduce in self._sums:
            reduce.begin()

    def close(self) -> None:
        """End what sums beside this thread; all holders call it after their last update."""
        for reduce in self._sums:
            reduce.close()

    def agree(self) -> None:
        """Every holder has the sum of the gradients; those without one had zeros to give."""
        for reduce in self._sums:
            reduce.agree(torch.zeros(0, dtype=torch.float64))

    def clear(self) -> None:
        """Forget the gradients."""
        for parameter in self._own.values():
            parameter.grad = None
        for reduce in self._sums:
            reduce.begin()

    def clip(self, most: float, device: torch.device) -> None:
        """Scale all gradients of the model to a norm of `most` at most; all workers call it together."""
        squares = torch.zeros((), dtype=torch.float64, device=device)
        for parameter in self._counted:
            if parameter.grad is not None:
                squares += parameter.grad.double().square().sum()
        dist.all_reduce(squares)
        factor = most / (float(squares.sqrt()) + 1e-6)
        if factor < 1:
            grads: list[Tensor] = [p.grad for p in self._own.values() if p.grad is not None]
            torch._foreach_mul_(grads, factor)
