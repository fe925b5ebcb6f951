"""Updates of the stages that one worker holds: agree on the gradients, write the next weights."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import nn
from torch.nn import Parameter

from plait.core.errors import LostPeer, PeerError
from plait.pipeline.gradient_sync import GradientReducer
from plait.pipeline.layout import PipelineLayout, oldest_needed, update_behind
from plait.pipeline.tied_weights import TiedWeights, UpdateRounds
from plait.pipeline.weight_stash import WeightVersions
from plait.planner.schedules.operations import Backward, Forward, Update
from plait.schema.topology_spec import TopologySpec


class StageOptimizer:
    """What one worker does at updates, and the versions of its weights under an asynchronous schedule.

    `modules` are its stages, `agreements` those that their updates need. The optimizer holds all of the
    worker's parameters and steps those that have a gradient. `overlapped` are the stages whose gradients are
    summed while backward goes on, where pipelines do not drain at updates.
    """

    def __init__(
        self,
        rank: int,
        pipeline_layout: PipelineLayout,
        modules: Mapping[int, nn.Module],
        optimizer: torch.optim.Optimizer,
        agreements: Mapping[int, GradientReducer],
        tied: Sequence[TiedWeights],
        overlapped: Collection[int] = (),
    ) -> None:
        self._rank = rank
        self._pipeline_layout = pipeline_layout
        self._optimizer = optimizer
        self._agreements = agreements
        self._overlapped = overlapped
        self._tied = {s: [t for t in tied if s in t.held_stages] for s in modules}
        self._versions: dict[int, WeightVersions] = {}
        if pipeline_layout.schedule.synchronous:
            return
        shared = {id(master) for each in tied for master in each.masters}
        for stage, module in modules.items():
            masters = dict.fromkeys(p for p in module.parameters() if p.requires_grad)
            own = [master for master in masters if id(master) not in shared]
            self._versions[stage] = WeightVersions(module, own)

    def versions(self, stage: int) -> list[WeightVersions]:
        """Those of a stage's own weights, and of what it shares with others; none if updates wait."""
        own = [self._versions[stage]] if stage in self._versions else []
        return own + [each.versions for each in self._tied[stage]]

    def switch(self, topology: TopologySpec) -> None:
        """Sum the gradients of replicas over `topology`; all workers call it when nothing is in flight."""
        for agreement in dict.fromkeys(self._agreements.values()):
            agreement.switch(topology)

    def frozen(self, stage: int) -> list[Parameter]:
        """The parameters of a stage that were frozen in a version of its weights."""
        return [parameter for versions in self.versions(stage) for parameter in versions.frozen()]

    def bring_tied(self, op: Forward, work: UpdateRounds) -> tuple[int, ...]:
        """The versions that a forward uses of what its stage shares with others; they are there now."""
        return tuple(each.bring(op, work) for each in self._tied[op.stage])

    def keep_tied(self, stage: int, versions: Sequence[int]) -> None:
        """Take the gradients of what a stage shares with others, after a backward with `versions`."""
        for each, version in zip(self._tied[stage], versions[1:]):
            each.keep(stage, version)

    def before_last_backward(self) -> None:
        """Let what the worker's last backward of a batch completes be summed while it goes on."""
        for agreement in set(self._agreements.values()):
            agreement.before_last_backward()

    def before_backward(self, op: Backward, work: UpdateRounds) -> bool:
        """Let the gradients that `op` completes, if any, be summed while it goes on; whether it does.

        Then they are on their way until the next update of the stage.
        """
        update = update_behind(self._pipeline_layout, op) if op.stage in self._overlapped else None
        if update is None:
            return False
        leaves = self._versions[op.stage].gather(op.version)
        self._agreements[op.stage].before_last_backward(work.factor(update), leaves)
        return True

    def agree(self, updates: Sequence[Update], work: UpdateRounds) -> None:
        """Sum the gradients of the stages that `updates` are of over all holders."""
        work.set_rate(updates[-1])
        factor = work.factor(updates[-1])
        for update in updates:
            if update.stage in self._versions:
                self._versions[update.stage].collect()
            for each in self._tied[update.stage]:
                each.give(update, factor)
        (agreement,) = {self._agreements[update.stage] for update in updates}
        try:
            agreement.agree(factor)
        except RuntimeError as failure:
            words = ", ".join(f"update {update.version} of stage {update.stage}" for update in updates)
            holders = self._pipeline_layout.holders(*(update.stage for update in updates))
            others = [worker for worker in holders if worker != self._rank]
            lost = failure if isinstance(failure, PeerError) else PeerError("", LostPeer.GONE)
            raise PeerError(
                f"worker {self._rank} could not sum the gradients of {words} with workers {others}: "
                f"{failure}",
                lost.kind,
                lost.peer,
            ) from failure

    def clip(self, updates: Sequence[Update], most: float, device: torch.device) -> None:
        """Scale gradients to a norm of `most` at most: of the whole model, or of a stage that updates alone.

        Where pipelines drain at updates, all workers call it together. Otherwise the gradient of the whole
        model is never there at once, and each stage clips its own; all its holders have the same.
        """
        agreement = self._agreements[updates[-1].stage]
        if updates[-1].stage in self._versions:
            agreement.clip_own(most)
        else:
            agreement.clip(most, device)

    def write(self, updates: Sequence[Update]) -> None:
        """Let the optimizer write the next version, and forget the gradients."""
        stage = updates[-1].stage
        if stage in self._versions:
            needed_from = oldest_needed(self._pipeline_layout, self._rank, updates[-1])
            self._versions[stage].update(self._optimizer.step, needed_from)
        else:
            self._optimizer.step()
        self._agreements[stage].clear()

    def leave_out(self, updates: Sequence[Update]) -> None:
        """Forget the gradients, and leave the weights as they are; pipelines drain at updates."""
        assert not self._versions
        self._agreements[updates[-1].stage].clear()

    def finish(self, work: UpdateRounds) -> None:
        """Let the modules hold the newest weights, as version 0; nothing is in flight."""
        for each in {id(each): each for own in self._tied.values() for each in own}.values():
            each.finish(work)
        for versions in self._versions.values():
            versions.restart()

    def restart(self) -> None:
        """Begin anew from the weights that the modules hold; nothing is in flight."""
        for stage in self._tied:
            for versions in self.versions(stage):
                versions.restart()

    def fail(self, failure: BaseException) -> None:
        """Have whoever waits for gradients of other workers fail; from any thread."""
        for agreement in set(self._agreements.values()):
            agreement.fail(failure)

    def close(self) -> None:
        """End the threads that sum gradients; all workers call it after their last update."""
        for agreement in set(self._agreements.values()):
            agreement.close()


def summed_during_backward(
    rank: int, pipeline_layout: PipelineLayout, device: torch.device, hosts: Sequence[str], cores: int
) -> frozenset[int]:
    """The stages of a worker whose gradients are better summed during backward, if pipelines never drain.

    Where the holders are on one host whose workers compute on all of its `cores`, sums that overlap with
    backward take time and caches from it. `hosts` names the host of each worker.
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
