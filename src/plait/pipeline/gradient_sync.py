"""Agreement of workers that hold the same parameters: replicas of a stage, and stages with tied ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from plait.comm.groups import new_group
from plait.comm.rendezvous import Rendezvous
from plait.core.errors import JobError, PlanError
from plait.pipeline.layout import PipelineLayout
from plait.planner.schedules.kinds import Schedule
from plait.profiler.traced import TracedModel
from plait.schema.topology_spec import TopologySpec
from plait.sync.allreduce.autotune import resolve_topology
from plait.sync.allreduce.buckets import AllReduce
from plait.sync.allreduce.sums import Members

Holders = dict[str, tuple[int, ...]]


def find_holders(traced: TracedModel, pipeline_layout: PipelineLayout) -> Holders:
    """The workers that hold each parameter, by the first name that the model has for it."""
    return {name: pipeline_layout.holders(*own) for name, own in find_stages(traced, pipeline_layout).items()}


def first_held(
    rank: int, pipeline_layout: PipelineLayout, stages_of: Mapping[str, Sequence[int]]
) -> set[str]:
    """The parameters of which this worker is the first holder, by name."""
    return {name for name, stages in stages_of.items() if pipeline_layout.holders(*stages)[0] == rank}


def replica_groups(pipeline_layout: PipelineLayout, rendezvous: Rendezvous) -> dict[int, dist.ProcessGroup]:
    """A group for each stage that several workers hold; all workers call it together."""
    return {
        stage: new_group(rendezvous, pipeline_layout.holders(stage))
        for stage in range(len(pipeline_layout.stages))
        if len(pipeline_layout.holders(stage)) > 1
    }


def find_stages(traced: TracedModel, pipeline_layout: PipelineLayout) -> dict[str, tuple[int, ...]]:
    """The stages that use each parameter, in the order of the model; several where it is tied.

    A stage that uses it in evaluation alone must have its updates, too.
    """
    found: dict[str, tuple[int, ...]] = {}
    for stage, ids in enumerate(pipeline_layout.stages):
        layers = (*traced.select(ids), *traced.evaluated_with(ids))
        for name in dict.fromkeys(name for layer in layers for name in layer.parameters):
            found[name] = (*found.get(name, ()), stage)
    _check_ties(pipeline_layout, found)
    return found


def _check_ties(pipeline_layout: PipelineLayout, stages_of: Mapping[str, tuple[int, ...]]) -> None:
    """Under `stash`, stages with other numbers of replicas update after other microbatches."""
    if pipeline_layout.schedule is not Schedule.STASH:
        return
    for name, stages in stages_of.items():
        counts = {pipeline_layout.layout.replicas(stage) for stage in stages}
        if len(counts) > 1:
            raise PlanError(
                f"parameter {name!r} is tied between stages {list(stages)} with {sorted(counts)} replicas; "
                f"schedule stash updates them at different times: give them equal replicas, or use "
                f"schedule 2bw or flush"
            )


def check_untied(traced: TracedModel, pipeline_layout: PipelineLayout, why: str) -> None:
    """Refuse parameters that stages on several workers share; `why` says what is wrong with that."""
    for name, stages in find_stages(traced, pipeline_layout).items():
        if len(stages) > 1 and len(pipeline_layout.holders(*stages)) > 1:
            raise JobError(
                f"parallel.plan: parameter {name!r} is tied between stages {list(stages)}, {why}; use a plan "
                f"that keeps its layers in one stage"
            )


class GradientReducer:
    """Sums the gradients of each parameter over its holders. All workers make one together.

    Sums travel over `topology`, made for each set of holders, or as the backend does it. With `own_memory`
    they are in memory of their own.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        own: Mapping[str, Parameter],
        holders: Holders,
        topology: TopologySpec | None = None,
        own_memory: bool = False,
    ) -> None:
        self._own = dict(own)
        rank = rendezvous.rank
        shared = sorted({workers for workers in holders.values() if len(workers) > 1})
        self._sums: list[AllReduce] = []
        self._members: list[Members] = []
        for workers in shared:
            group = new_group(rendezvous, workers)
            # In the order of the model, which is that of all holders: backward ends with the first.
            parameters = [own[name] for name in holders if name in own and holders[name] == workers]
            if rank in workers:
                # All holders go through their groups in this one order, so none waits in a circle.
                members = Members(rendezvous, workers, group)
                may_fail = rendezvous.check is not None
                self._sums.append(
                    AllReduce(parameters, group, members, may_fail=may_fail, own_memory=own_memory)
                )
                self._members.append(members)
        self._device = next((parameter.device for parameter in own.values()), torch.device("cpu"))
        if topology is not None:
            self.switch(topology)
        self._unshared = [own[name] for name in own if len(holders[name]) == 1]
        self._counted = [own[name] for name in own if holders[name][0] == rank]
        for reduce in self._sums:
            reduce.begin()

    def switch(self, topology: TopologySpec) -> None:
        """Sum over `topology` from the next update on; all workers call it together between two updates."""
        # In one order for all holders, as some topologies are found by measuring.
        for sum_, members in zip(self._sums, self._members):
            found, _ = resolve_topology(topology, members, sum_.gradient_bytes, self._device)
            sum_.switch(found)

    def close(self) -> None:
        """End the thread that sums; all holders call it after their last update."""
        for reduce in self._sums:
            reduce.close()

    def fail(self, failure: BaseException) -> None:
        """Have whoever waits for a sum fail; from any thread."""
        for reduce in self._sums:
            reduce.fail(failure)

    def before_last_backward(
        self, factor: float = 1.0, leaves: Mapping[Parameter, Parameter] | None = None
    ) -> None:
        """The backward that follows completes all gradients: each is sent, times `factor`, as it is made.

        It leaves them on `leaves`, by the parameters that those stand for, or else on these themselves.
        """
        for reduce in self._sums:
            reduce.before_backward(True, factor, leaves)

    def agree(self, factor: float) -> None:
        """Every holder has the sum of the gradients times its `factor`; who has none gives zeros."""
        grads = [p.grad for p in self._unshared if p.grad is not None]
        if factor != 1.0 and grads:
            torch._foreach_mul_(grads, factor)
        for reduce in self._sums:
            reduce.agree(torch.zeros(0, dtype=torch.float64), factor)

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
        _scale_down(self._own.values(), most, float(squares.sqrt()))

    def clip_own(self, most: float) -> None:
        """Scale the gradients of these parameters to a norm of `most` at most; all holders have the same."""
        clip_alone(list(self._own.values()), most)


def clip_alone(parameters: Sequence[Parameter], most: float) -> None:
    """Scale the gradients of `parameters` to a norm of `most` at most, whatever other gradients there are."""
    squares = [p.grad.double().square().sum() for p in parameters if p.grad is not None]
    if squares:
        _scale_down(parameters, most, float(torch.stack(squares).sum().sqrt()))


def _scale_down(parameters: Iterable[Parameter], most: float, norm: float) -> None:
    factor = most / (norm + 1e-6)
    grads: list[Tensor] = [p.grad for p in parameters if p.grad is not None]
    if factor < 1 and grads:
        torch._foreach_mul_(grads, factor)


def make_agreements(
    rendezvous: Rendezvous,
    pipeline_layout: PipelineLayout,
    stages_of: Mapping[str, Sequence[int]],
    own: Mapping[str, Parameter],
    topology: TopologySpec | None = None,
    own_memory: bool = False,
) -> dict[int, GradientReducer]:
    """The agreement that an update of each stage needs; all workers call it together.

    Under a synchronous schedule all stages agree at once. Under the others each does when it has come so
    far, without what it shares with other stages (see tied_weights.py).
    """
    holders = {name: pipeline_layout.holders(*used_by) for name, used_by in stages_of.items()}
    stages = range(len(pipeline_layout.stages))
    if pipeline_layout.schedule.synchronous:
        whole = GradientReducer(rendezvous, own, holders, topology, own_memory)
        return dict.fromkeys(stages, whole)
    found = {}
    for stage in stages:
        names = {name for name, used_by in stages_of.items() if tuple(used_by) == (stage,)}
        part = {name: parameter for name, parameter in own.items() if name in names}
        by_name = {name: workers for name, workers in holders.items() if name in names}
        found[stage] = GradientReducer(rendezvous, part, by_name, topology, own_memory)
    return found
