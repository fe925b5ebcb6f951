"""Parameters that several stages share, under schedules that do not drain.

Updating them together with each stage's other weights would make the last stage wait for the first at every
update. So tied weights have their own versions. A microbatch uses the same version in all stages: the newest
that the first of these stages has when the microbatch enters it. Each stage contributes the gradients of a
round as soon as it has them, and the stage that needs the next version waits for their sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from plait.comm.groups import new_group
from plait.comm.rendezvous import Rendezvous
from plait.core.errors import LostPeer, PeerError
from plait.pipeline.gradient_sync import clip_stage
from plait.pipeline.layout import PipelineLayout, version_of
from plait.pipeline.microbatches import Work
from plait.pipeline.updates.weight_stash import WeightVersions
from plait.planner.schedules.operations import Forward, Update


class TiedWeights:
    """The parameters that a set of stages shares, on one of the workers that hold them.

    `modules` are the stages of this worker that share them. `group` contains all holders; None if there is
    one. `step` is the optimizer's, which writes only to parameters that have a gradient. Gradients are
    clipped to the norm `clip_norm`, separately from those of the stages.
    """

    def __init__(
        self,
        pipeline_layout: PipelineLayout,
        stages: Sequence[int],
        modules: Mapping[int, nn.Module],
        masters: Sequence[Parameter],
        step: Callable[[], Any],
        group: dist.ProcessGroup | None,
        clip_norm: float | None = None,
    ) -> None:
        self.masters = masters
        self.held_stages = frozenset(modules)
        self.versions = WeightVersions(nn.ModuleList(modules.values()), masters)
        self._pipeline_layout = pipeline_layout
        self._stages = tuple(stages)
        self._own = min(modules)
        self._step = step
        self._group = group
        self._clip_norm = clip_norm
        self._left: dict[int, list[Tensor | None]] = {stage: [None] * len(masters) for stage in modules}
        # The oldest version that later forwards of each stage may use.
        self._oldest = dict.fromkeys(modules, 0)
        self._rounds: dict[int, _Round] = {}

    def bring(self, op: Forward, work: Work) -> int:
        """Make the version that `op` uses available, and return it; may wait for other holders."""
        version = version_of(self._pipeline_layout, min(self._stages), op.microbatch)
        self._oldest[op.stage] = version
        self._advance(version, work)
        return version

    def keep(self, stage: int, version: int) -> None:
        """Collect the gradients of a backward in `stage`; called before the next backward."""
        left = self._left[stage]
        for index, leaf in enumerate(self.versions.leaves(version)):
            left[index] = _sum(left[index], leaf.grad)
            leaf.grad = None

    def give(self, update: Update, factor: float) -> None:
        """Contribute a stage's gradients to the round that ends with its `update`; does not block."""
        left, self._left[update.stage] = self._left[update.stage], [None] * len(self.masters)
        round_ = self._rounds.setdefault(update.version, _Round([None] * len(self.masters)))
        for index, grad in enumerate(left):
            if grad is not None:
                round_.grads[index] = _sum(round_.grads[index], grad.mul_(factor) if factor != 1.0 else grad)
        round_.given += 1
        if round_.given == len(self._left) and self._group is not None:
            round_.send(self.masters, self._group)

    def finish(self, work: Work) -> None:
        """Apply all contributed rounds, and call the result version 0; nothing is in flight."""
        self._advance(max(self._rounds, default=self.versions.newest), work)
        assert not self._rounds
        self.versions.restart()
        self._oldest = dict.fromkeys(self._oldest, 0)

    def _advance(self, version: int, work: Work) -> None:
        while self.versions.newest < version:
            following = self.versions.newest + 1
            round_ = self._rounds.pop(following)
            try:
                round_.wait()
            except RuntimeError as failure:
                raise PeerError(
                    f"could not sum round {following} of the parameters that stages "
                    f"{list(self._stages)} share: {failure}",
                    LostPeer.GONE,
                ) from failure
            for master, grad in zip(self.masters, round_.grads):
                master.grad = grad
            if self._clip_norm is not None:
                clip_stage(self.masters, self._clip_norm)
            # Other stages of this worker may have set the rate of a different update.
            work.set_rate(Update(self._own, following))
            self.versions.update(self._step, min(self._oldest.values()))
            for master in self.masters:
                master.grad = None


class _Round:
    """The gradients of one round: this worker's, then the sum over all holders."""

    def __init__(self, grads: list[Tensor | None]) -> None:
        self.grads = grads
        self.given = 0
        self._sending: list[dist.Work] = []

    def send(self, masters: Sequence[Parameter], group: dist.ProcessGroup) -> None:
        pairs = zip(masters, self.grads)
        whole = [torch.zeros_like(m) if grad is None else grad.contiguous() for m, grad in pairs]
        self.grads = list(whole)
        self._sending = [dist.all_reduce(grad, group=group, async_op=True) for grad in whole]

    def wait(self) -> None:
        """Wait until the gradients are summed."""
        for work in self._sending:
            work.wait()


def make_tied(
    pipeline_layout: PipelineLayout,
    stages_of: Mapping[str, Sequence[int]],
    modules: Mapping[int, nn.Module],
    parameters: Mapping[str, Parameter],
    step: Callable[[], Any],
    rendezvous: Rendezvous,
    clip_norm: float | None = None,
) -> list[TiedWeights]:
    """The tied weights that this worker holds; empty if pipelines drain. All workers call it together."""
    tied: list[TiedWeights] = []
    if pipeline_layout.schedule.synchronous:
        return tied
    for stages in sorted({tuple(stages) for stages in stages_of.values() if len(stages) > 1}):
        holders = pipeline_layout.holders(*stages)
        group = new_group(rendezvous, holders) if len(holders) > 1 else None
        masters = [p for name, p in parameters.items() if tuple(stages_of[name]) == stages]
        masters = [master for master in masters if master.requires_grad]
        held = {stage: modules[stage] for stage in stages if stage in modules}
        if held and masters:
            tied.append(TiedWeights(pipeline_layout, stages, held, masters, step, group, clip_norm))
    return tied


def _sum(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    if first is None or second is None:
        return second if first is None else first
    return first.add_(second)
