"""Parameters that several stages share, under schedules that do not drain.

Were they updated with each stage's own weights, the last stage would wait at every update for the first,
and the pipeline with it. So they have versions of their own: a microbatch meets one version of them in all
stages, that which the first of these stages has made by then. A stage gives the gradients of a round as
soon as it has them, and the stage that needs the next version takes their sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from plait.comm.groups import new_group
from plait.comm.rendezvous import Rendezvous
from plait.core.errors import LostPeer, PeerError
from plait.pipeline.gradient_sync import clip_alone
from plait.pipeline.layout import PipelineLayout, version_of
from plait.pipeline.weight_stash import WeightVersions
from plait.planner.schedules.operations import Forward, Update


class UpdateRounds(Protocol):
    """What is known of the microbatches between two updates."""

    def set_rate(self, update: Update) -> None:
        """Set the learning rate of an update."""

    def factor(self, update: Update) -> float:
        """What this worker's gradients are multiplied by before they are summed."""


class TiedWeights:
    """The parameters that a set of stages shares, on one of the workers that hold them.

    `modules` are the worker's stages among them. `group` sums over all holders; None where there is one.
    `step` is the optimizer's, which writes only to parameters that have a gradient. Their gradients are
    clipped to a norm of `clip_norm`, apart from those of the stages.
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
        # The oldest version that forwards of each stage may still ask for.
        self._oldest = dict.fromkeys(modules, 0)
        self._rounds: dict[int, _Round] = {}

    def bring(self, op: Forward, work: UpdateRounds) -> int:
        """The version that `op` uses, which is there now; it may have to wait for the others."""
        version = version_of(self._pipeline_layout, min(self._stages), op.microbatch)
        self._oldest[op.stage] = version
        self._advance(version, work)
        return version

    def keep(self, stage: int, version: int) -> None:
        """Take the gradients that a backward in `stage` has left, before another one leaves its own."""
        left = self._left[stage]
        for place, leaf in enumerate(self.versions.leaves(version)):
            left[place] = _sum(left[place], leaf.grad)
            leaf.grad = None

    def give(self, update: Update, factor: float) -> None:
        """Hand in what a stage has for the round that ends with its `update`; nobody waits."""
        left, self._left[update.stage] = self._left[update.stage], [None] * len(self.masters)
        round_ = self._rounds.setdefault(update.version, _Round([None] * len(self.masters)))
        for place, grad in enumerate(left):
            if grad is not None:
                round_.grads[place] = _sum(round_.grads[place], grad.mul_(factor) if factor != 1.0 else grad)
        round_.given += 1
        if round_.given == len(self._left) and self._group is not None:
            round_.send(self.masters, self._group)

    def finish(self, work: UpdateRounds) -> None:
        """Take all rounds that were given, and call what comes out version 0; nothing is in flight."""
        self._advance(max(self._rounds, default=self.versions.newest), work)
        assert not self._rounds
        self.versions.restart()
        self._oldest = dict.fromkeys(self._oldest, 0)

    def _advance(self, version: int, work: UpdateRounds) -> None:
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
                clip_alone(self.masters, self._clip_norm)
            # Other stages of this worker have made other updates since: the rate is that of this one.
            work.set_rate(Update(self._own, following))
            self.versions.update(self._step, min(self._oldest.values()))
            for master in self.masters:
                master.grad = None


class _Round:
    """The gradients of one round: this worker's, until they are the sum over all holders."""

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
        """Return when the gradients are the sum."""
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
    """Those that this worker holds; all workers call it together. None where pipelines drain at updates."""
    found: list[TiedWeights] = []
    if pipeline_layout.schedule.synchronous:
        return found
    for stages in sorted({tuple(stages) for stages in stages_of.values() if len(stages) > 1}):
        holders = pipeline_layout.holders(*stages)
        group = new_group(rendezvous, holders) if len(holders) > 1 else None
        masters = [p for name, p in parameters.items() if tuple(stages_of[name]) == stages]
        masters = [master for master in masters if master.requires_grad]
        own = {stage: modules[stage] for stage in stages if stage in modules}
        if own and masters:
            found.append(TiedWeights(pipeline_layout, stages, own, masters, step, group, clip_norm))
    return found


def _sum(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    if first is None or second is None:
        return second if first is None else first
    return first.add_(second)
