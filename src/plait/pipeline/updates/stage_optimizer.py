"""Weight updates of the stages on one worker: sum the gradients, then step the optimizer."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import Parameter

from plait.core.errors import LostPeer, PeerError
from plait.pipeline.gradient_sync import GradientReducer
from plait.pipeline.layout import PipelineLayout, oldest_needed, update_behind
from plait.pipeline.microbatches import Work
from plait.pipeline.updates.tied_weights import TiedWeights
from plait.pipeline.updates.weight_stash import WeightVersions
from plait.planner.schedules.operations import Backward, Forward, Update
from plait.schema.topology_spec import TopologySpec


class StageOptimizer:
    """The updates of one worker, and its weight versions under an asynchronous schedule.

    `modules` are its stages and `reducers` their gradient reducers. The optimizer holds all parameters of
    the worker and steps those that have a gradient. `overlapped` are the stages whose all-reduce overlaps
    with backward when pipelines do not drain at updates.
    """

    def __init__(
        self,
        rank: int,
        pipeline_layout: PipelineLayout,
        modules: Mapping[int, nn.Module],
        optimizer: torch.optim.Optimizer,
        reducers: Mapping[int, GradientReducer],
        tied: Sequence[TiedWeights],
        overlapped: Collection[int] = (),
    ) -> None:
        self._rank = rank
        self._pipeline_layout = pipeline_layout
        self._optimizer = optimizer
        self._reducers = reducers
        self._overlapped = overlapped
        self._tied = {s: [t for t in tied if s in t.held_stages] for s in modules}
        self._versions: dict[int, WeightVersions] = {}
        if pipeline_layout.schedule.synchronous:
            return
        shared = {id(master) for each in tied for master in each.masters}
        for stage, module in modules.items():
            masters = dict.fromkeys(p for p in module.parameters() if p.requires_grad)
            untied = [master for master in masters if id(master) not in shared]
            self._versions[stage] = WeightVersions(module, untied)

    def versions(self, stage: int) -> list[WeightVersions]:
        """The versions of a stage's weights and of weights tied to other stages; none if pipelines drain."""
        versions = [self._versions[stage]] if stage in self._versions else []
        return versions + [each.versions for each in self._tied[stage]]

    def switch(self, topology: TopologySpec) -> None:
        """Sum the gradients of replicas over `topology`; all workers call it when nothing is in flight."""
        for reducer in dict.fromkeys(self._reducers.values()):
            reducer.switch(topology)

    def frozen(self, stage: int) -> list[Parameter]:
        """The parameters of a stage that were frozen in one of its weight versions."""
        return [parameter for versions in self.versions(stage) for parameter in versions.frozen()]

    def bring_tied(self, op: Forward, work: Work) -> tuple[int, ...]:
        """Make the versions of tied weights that a forward uses available; returns their numbers."""
        return tuple(each.bring(op, work) for each in self._tied[op.stage])

    def keep_tied(self, stage: int, versions: Sequence[int]) -> None:
        """Collect the gradients of tied weights after a backward with `versions`."""
        for each, version in zip(self._tied[stage], versions[1:]):
            each.keep(stage, version)

    def before_last_backward(self) -> None:
        """Overlap the all-reduce with the worker's last backward of a batch."""
        for reducer in set(self._reducers.values()):
            reducer.before_last_backward()

    def before_backward(self, op: Backward, work: Work) -> bool:
        """Overlap the all-reduce with `op` if it completes gradients; returns whether it does.

        The all-reduce then ends at the next update of the stage.
        """
        update = update_behind(self._pipeline_layout, op) if op.stage in self._overlapped else None
        if update is None:
            return False
        leaves = self._versions[op.stage].gather(op.version)
        self._reducers[op.stage].before_last_backward(work.factor(update), leaves)
        return True

    def sum_gradients(self, updates: Sequence[Update], work: Work) -> None:
        """Sum the gradients of the updated stages over all holders."""
        work.set_rate(updates[-1])
        factor = work.factor(updates[-1])
        for update in updates:
            if update.stage in self._versions:
                self._versions[update.stage].collect()
            for each in self._tied[update.stage]:
                each.give(update, factor)
        (reducer,) = {self._reducers[update.stage] for update in updates}
        try:
            reducer.sum_gradients(factor)
        except RuntimeError as failure:
            names = ", ".join(f"update {update.version} of stage {update.stage}" for update in updates)
            holders = self._pipeline_layout.holders(*(update.stage for update in updates))
            others = [worker for worker in holders if worker != self._rank]
            lost = failure if isinstance(failure, PeerError) else PeerError("", LostPeer.GONE)
            raise PeerError(
                f"worker {self._rank} could not sum the gradients of {names} with workers {others}: "
                f"{failure}",
                lost.kind,
                lost.peer,
            ) from failure

    def clip(
        self,
        updates: Sequence[Update],
        max_norm: float,
        device: torch.device,
        everyone: dist.ProcessGroup | None,
    ) -> None:
        """Clip gradients to `max_norm`: of the whole model, or of each stage if they update separately.

        If pipelines drain at updates, all workers call it together. Otherwise the gradient of the whole model
        never exists at one time, and each stage clips by its own norm, which is equal on all holders.
        """
        reducer = self._reducers[updates[-1].stage]
        if updates[-1].stage in self._versions:
            reducer.clip_stage(max_norm)
        else:
            reducer.clip_model(max_norm, device, everyone)

    def write(self, updates: Sequence[Update]) -> None:
        """Step the optimizer to write the next version, and clear the gradients."""
        stage = updates[-1].stage
        if stage in self._versions:
            needed_from = oldest_needed(self._pipeline_layout, self._rank, updates[-1])
            self._versions[stage].update(self._optimizer.step, needed_from)
        else:
            self._optimizer.step()
        self._reducers[stage].clear()

    def leave_out(self, updates: Sequence[Update]) -> None:
        """Skip the updates: clear the gradients and keep the weights. Only if pipelines drain at updates."""
        assert not self._versions
        self._reducers[updates[-1].stage].clear()

    def finish(self, work: Work) -> None:
        """Put the newest weights into the modules as version 0; nothing is in flight."""
        for each in {id(each): each for tied in self._tied.values() for each in tied}.values():
            each.finish(work)
        for versions in self._versions.values():
            versions.restart()

    def restart(self) -> None:
        """Restart at version 0 with the weights in the modules; nothing is in flight."""
        for stage in self._tied:
            for versions in self.versions(stage):
                versions.restart()

    def fail(self, failure: BaseException) -> None:
        """Make waits for the gradients of other workers raise; may be called from any thread."""
        for reducer in set(self._reducers.values()):
            reducer.fail(failure)

    def close(self) -> None:
        """Stop the reduce threads; all workers call it after their last update."""
        for reducer in set(self._reducers.values()):
            reducer.close()


def summed_during_backward(
    rank: int, pipeline_layout: PipelineLayout, device: torch.device, hosts: Sequence[str], cores: int
) -> frozenset[int]:
    """The stages of a worker whose all-reduce should overlap with backward, if pipelines never drain.

    If all holders are on one host and use all of its `cores`, an overlapped all-reduce slows backward down.
    `hosts` names the host of each worker.
    """
    if pipeline_layout.schedule.synchronous:
        return frozenset()
    spare = device.type != "cpu" or cores > hosts.count(hosts[rank])
    holders = {stage: pipeline_layout.holders(stage) for stage in pipeline_layout.stages_of(rank)}
    return frozenset(
        stage
        for stage, workers in holders.items()
        if len(workers) > 1 and (spare or len({hosts[worker] for worker in workers}) > 1)
    )
