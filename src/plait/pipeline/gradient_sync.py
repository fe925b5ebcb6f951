"""Gradients summed over the workers that hold a parameter: replicas of a stage, stages with tied weights.

They are clipped to a norm: that of one stage, or that of the whole model over all of its workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from plait.comm.groups import new_group
from plait.comm.rendezvous import Rendezvous
from plait.core.errors import JobError, PlanError
from plait.pipeline.layout import PipelineLayout
from plait.planner.schedules.in_flight import Schedule
from plait.profiler.traced_model import TracedModel
from plait.schema.topology_spec import TopologySpec
from plait.sync.allreduce.autotune import forget, resolve_topology
from plait.sync.allreduce.buckets import AllReduce
from plait.sync.allreduce.reducers import Members

Holders = dict[str, tuple[int, ...]]
# Some workers of a pipeline with their process group, which all its workers ask for in one order; it may be
# None on workers outside of it.
MembersOf = Callable[[Sequence[int]], Members | None]


def new_members(rendezvous: Rendezvous, ranks: Sequence[int]) -> Members:
    """These ranks with a new process group; every rank of the world calls it."""
    return Members(rendezvous, tuple(ranks), new_group(rendezvous, ranks))


def find_holders(traced: TracedModel, pipeline_layout: PipelineLayout) -> Holders:
    """The workers that hold each parameter, by the parameter's first name in the model."""
    return {
        name: pipeline_layout.holders(*stages)
        for name, stages in find_stages(traced, pipeline_layout).items()
    }


def first_held(
    rank: int, pipeline_layout: PipelineLayout, stages_of: Mapping[str, Sequence[int]]
) -> set[str]:
    """The names of the parameters whose first holder is this worker."""
    return {name for name, stages in stages_of.items() if pipeline_layout.holders(*stages)[0] == rank}


def stage_replicas(pipeline_layout: PipelineLayout, members_of: MembersOf) -> dict[int, Members | None]:
    """The workers of each stage that has several; all workers call it together."""
    return {
        stage: members_of(pipeline_layout.holders(stage))
        for stage in range(len(pipeline_layout.stages))
        if len(pipeline_layout.holders(stage)) > 1
    }


def find_stages(traced: TracedModel, pipeline_layout: PipelineLayout) -> dict[str, tuple[int, ...]]:
    """The stages that use each parameter, in the order of the model; several for a tied parameter.

    Includes stages that use it only in evaluation mode: they need its updates too.
    """
    stages_of: dict[str, tuple[int, ...]] = {}
    for stage, ids in enumerate(pipeline_layout.stages):
        layers = (*traced.select(ids), *traced.evaluated_with(ids))
        for name in dict.fromkeys(name for layer in layers for name in layer.parameters):
            stages_of[name] = (*stages_of.get(name, ()), stage)
    _check_ties(pipeline_layout, stages_of)
    return stages_of


def _check_ties(pipeline_layout: PipelineLayout, stages_of: Mapping[str, tuple[int, ...]]) -> None:
    """Raise PlanError for tied weights of stages that `stash` would update at different times."""
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


def check_untied(traced: TracedModel, pipeline_layout: PipelineLayout) -> None:
    """Raise JobError if stages on different workers, each of which is averaged alone, share a parameter."""
    for name, stages in find_stages(traced, pipeline_layout).items():
        if len(stages) > 1 and len(pipeline_layout.holders(*stages)) > 1:
            raise JobError(
                f"parallel.plan: parameter {name!r} is tied between stages {list(stages)}, which average "
                f"apart from each other under this sync; use a plan that keeps its layers in one stage"
            )


class GradientReducer:
    """Sums the gradients of each parameter over its holders. All workers create one together.

    Each set of holders sums over `topology`, or by the backend's all-reduce. With `copy_gradients` the sums
    do not share memory with the communication buffers.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        own: Mapping[str, Parameter],
        holders: Holders,
        members_of: MembersOf,
        topology: TopologySpec | None = None,
        copy_gradients: bool = False,
    ) -> None:
        self._own = dict(own)
        rank = rendezvous.rank
        shared = sorted({workers for workers in holders.values() if len(workers) > 1})
        self._sums: list[AllReduce] = []
        self._members: list[Members] = []
        for workers in shared:
            members = members_of(workers)
            # In the order of the model, the same on all holders; backward finishes with the first parameter.
            parameters = [own[name] for name in holders if name in own and holders[name] == workers]
            if members is not None and rank in workers:
                # All holders visit their groups in the same order, which avoids deadlock.
                may_fail = rendezvous.check is not None
                self._sums.append(
                    AllReduce(parameters, members, may_fail=may_fail, copy_gradients=copy_gradients)
                )
                self._members.append(members)
        self._device = next((parameter.device for parameter in own.values()), torch.device("cpu"))
        if topology is not None:
            self._sum_over(topology)
        self._unshared = [own[name] for name in own if len(holders[name]) == 1]
        self._counted = [own[name] for name in own if holders[name][0] == rank]
        for reduce in self._sums:
            reduce.begin()

    def switch(self, topology: TopologySpec) -> None:
        """Sum over `topology` from the next update on; all workers call it together between two updates."""
        for members in self._members:
            forget(members)
        self._sum_over(topology)

    def _sum_over(self, topology: TopologySpec) -> None:
        # In the same order on all holders, as some topologies are chosen by measuring.
        for sum_, members in zip(self._sums, self._members):
            resolved, _ = resolve_topology(topology, members, sum_.gradient_bytes, self._device)
            sum_.switch(resolved)

    def close(self) -> None:
        """Stop the reduce threads; all holders call it after their last update."""
        for reduce in self._sums:
            reduce.close()

    def fail(self, failure: BaseException) -> None:
        """Make waits for a sum raise; may be called from any thread."""
        for reduce in self._sums:
            reduce.fail(failure)

    def before_last_backward(
        self, factor: float = 1.0, leaves: Mapping[Parameter, Parameter] | None = None
    ) -> None:
        """Declare the next backward to be the last of the update, so that it overlaps with the all-reduce.

        Each gradient is multiplied by `factor`. `leaves` maps parameters to the leaves that receive
        gradients.
        """
        for reduce in self._sums:
            reduce.before_backward(True, factor, leaves)

    def sum_gradients(self, factor: float) -> None:
        """Sum the gradients, times `factor`, over all holders; a missing gradient counts as zero."""
        grads = [p.grad for p in self._unshared if p.grad is not None]
        if factor != 1.0 and grads:
            torch._foreach_mul_(grads, factor)
        for reduce in self._sums:
            reduce.sum_gradients(torch.zeros(0, dtype=torch.float64), factor)

    def clear(self) -> None:
        """Set all gradients to None."""
        for parameter in self._own.values():
            parameter.grad = None
        for reduce in self._sums:
            reduce.begin()

    def clip_model(self, max_norm: float, device: torch.device, everyone: dist.ProcessGroup | None) -> None:
        """Clip to the norm of the whole model's gradient; all workers of `everyone` call it together."""
        clip_model(self._own.values(), self._counted, max_norm, device, everyone)

    def clip_stage(self, max_norm: float) -> None:
        """Clip to the norm of the gradients of these parameters; equal on all holders."""
        clip_stage(list(self._own.values()), max_norm)


def make_gradient_reducers(
    rendezvous: Rendezvous,
    pipeline_layout: PipelineLayout,
    stages_of: Mapping[str, Sequence[int]],
    parameters: Mapping[str, Parameter],
    members_of: MembersOf,
    topology: TopologySpec | None = None,
    copy_gradients: bool = False,
) -> dict[int, GradientReducer]:
    """The reducer of each stage's gradients; all workers call it together.

    Under a synchronous schedule one reducer serves all stages. Otherwise each stage reduces by itself, and
    weights tied to other stages are left to tied_weights.py.
    """
    holders = {name: pipeline_layout.holders(*used_by) for name, used_by in stages_of.items()}
    stages = range(len(pipeline_layout.stages))
    if pipeline_layout.schedule.synchronous:
        whole = GradientReducer(rendezvous, parameters, holders, members_of, topology, copy_gradients)
        return dict.fromkeys(stages, whole)
    reducers = {}
    for stage in stages:
        names = {name for name, used_by in stages_of.items() if tuple(used_by) == (stage,)}
        part = {name: parameter for name, parameter in parameters.items() if name in names}
        by_name = {name: workers for name, workers in holders.items() if name in names}
        reducers[stage] = GradientReducer(rendezvous, part, by_name, members_of, topology, copy_gradients)
    return reducers


def clip_stage(parameters: Sequence[Parameter], max_norm: float) -> None:
    """Clip the gradients of `parameters` to `max_norm`, without regard to other parameters."""
    squares = [p.grad.double().square().sum() for p in parameters if p.grad is not None]
    if squares:
        _scale_down(parameters, max_norm, float(torch.stack(squares).sum().sqrt()))


def clip_model(
    parameters: Iterable[Parameter],
    counted: Iterable[Parameter],
    max_norm: float,
    device: torch.device,
    everyone: dist.ProcessGroup | None,
) -> None:
    """Clip the gradients of `parameters` to `max_norm` of the whole model; all workers call it together.

    `counted` are the parameters that no other worker of the process group `everyone` counts.
    """
    squares = torch.zeros((), dtype=torch.float64, device=device)
    for parameter in counted:
        if parameter.grad is not None:
            squares += parameter.grad.double().square().sum()
    dist.all_reduce(squares, group=everyone)
    _scale_down(parameters, max_norm, float(squares.sqrt()))


def _scale_down(parameters: Iterable[Parameter], max_norm: float, norm: float) -> None:
    factor = max_norm / (norm + 1e-6)
    grads: list[Tensor] = [p.grad for p in parameters if p.grad is not None]
    if factor < 1 and grads:
        torch._foreach_mul_(grads, factor)
