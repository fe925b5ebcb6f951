"""Before an array in stages takes its first step, its fused stages are compared with its trials alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from plait.core.errors import InputError, JobError
from plait.data.loader import Batch
from plait.fusion import FusedModule, fuse
from plait.fusion.verify import FusionReport
from plait.pipeline.cutting.cut import cut, evaluation_stages
from plait.pipeline.cutting.edges import StageEdge, find_routes
from plait.pipeline.gradient_sync import check_untied
from plait.pipeline.layout import PipelineLayout
from plait.pipeline.verify.verify_stages import VerifiedStages
from plait.profiler.build import build_stages
from plait.profiler.trace_errors import TraceError
from plait.profiler.traced_model import TracedModel
from plait.sweeping.engines.traced_constants import Values, check_values, plain_values
from plait.sweeping.engines.verified_arrays import (
    ArrayCandidate,
    first_batches,
    padded_rows,
    verify_candidate,
)
from plait.training.components import TrialInit
from plait.training.engines.pipeline_setup import prepare_pipeline
from plait.training.engines.replica_layout import replica_layouts
from plait.training.fused.fused_components import stacked


@dataclass(frozen=True)
class StagesOfTrials:
    """The stages of the trials of an array: those of the first trial, whose constants the traced code has.

    `checked.fine` are the stages as layers of the plan, from which other workers build the same stages.
    Where `averages`, gradients are summed within each pipeline of the layout, else over all of it.
    """

    checked: VerifiedStages
    layout: PipelineLayout
    values: Values
    averages: bool = False

    @property
    def traced(self) -> TracedModel:
        return self.checked.traced

    @property
    def replicas(self) -> tuple[PipelineLayout, ...]:
        """The parts of the layout in each of which gradients are summed."""
        return replica_layouts(self.layout) if self.averages else (self.layout,)


def prepare_trials(
    entries: Sequence[TrialInit], layout: PipelineLayout, verify: bool, averages: bool = False
) -> StagesOfTrials:
    """The stages of these trials in whole modules; with `verify` those of the first are compared with it."""
    first = entries[0]
    part = replica_layouts(layout)[0] if averages else layout
    # Before its code runs, which may count or remember.
    values = plain_values(first.components.model)
    try:
        checked, part = prepare_pipeline(first.settings, first.components, part, verify)
    except JobError:
        raise
    except InputError as failure:
        raise JobError(f"parallel.plan: {failure}") from None
    if averages:
        check_untied(checked.traced, part)
    return StagesOfTrials(checked, replace(layout, stages=part.stages), values, averages)


def verify_stages(
    entries: Sequence[TrialInit], stages: StagesOfTrials, known: FusionReport | None = None
) -> FusionReport:
    """What must run trial by trial for these trials to train together, in stages, as they do alone."""
    return verify_candidate(StagedCandidate(entries, stages, first_batches(entries, (0, 1))), known)


def of_stages(verdict: FusionReport, module: nn.Module) -> FusionReport:
    """What of a verdict concerns the stages in `module`."""
    names = {path for path, _ in module.named_modules()}
    return replace(verdict, unfused={name: why for name, why in verdict.unfused.items() if name in names})


class StagedCandidate(ArrayCandidate):
    """The trials of an array in stages, all of them in this process, on the first microbatches of two steps.

    Later stages continue the random stream of earlier ones, as in a single model; in training each stage has
    separate streams.
    """

    in_stages = True

    def __init__(
        self, entries: Sequence[TrialInit], stages: StagesOfTrials, batches: Sequence[Sequence[Batch]]
    ) -> None:
        super().__init__(entries, batches, stages.replicas[0].microbatches)
        self._stages = stages
        self._traced = stages.traced
        self._evaluated, evaluated = evaluation_stages(self._traced, stages.layout.stages)
        self._routes = find_routes(self._traced, stages.layout.stages)
        self._evaluated_routes = find_routes(self._evaluated, evaluated)
        self._cuts = [cut(self._traced, layers) for layers in stages.layout.stages]

    def fuse(self, trials: Sequence[int], unfused: Mapping[str, str]) -> FusedModule:
        for entry in self._entries:
            check_values(self._traced, self._stages.values, plain_values(entry.components.model))
        layers = {number: self._traced.select(each.layers) for number, each in enumerate(self._cuts)}
        codes = build_stages(self._traced, layers).codes
        models = [
            build_stages(replace(self._traced, model=self.models[trial]), layers, codes) for trial in trials
        ]
        kept = of_stages(FusionReport(unfused), models[0]).unfused
        seeds, steps = ([x[trial] for trial in trials] for x in (self.seeds, self.rng_steps))
        made = fuse(models, seeds, steps, kept, verify=False, share=self.share)
        made.draws_before, made.warns_of_draws = 0, False
        return made

    def together(self, fused: FusedModule, trials: Sequence[int], batch: int) -> tuple[Any, Tensor]:
        contents, counts = self._contents(trials, batch)
        inputs, target = stacked(self._entries[0].components, contents, max(counts))
        traced = self._traced if fused.training else self._evaluated
        tensors = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
        values = dict(zip(traced.inputs, tensors, strict=True))
        ages = fused.ages.clone()
        for number in range(len(self._cuts)):
            # All stages are one forward of the trials.
            fused.ages.copy_(ages)
            values |= self._run(number, fused, values, counts)
            fused.draws_before = fused.draws
        fused.draws_before = 0
        outputs = traced.rebuild_output(values)
        with padded_rows(fused, counts), self._entries[0].components.autocast():
            losses = self._losses(fused, trials, outputs, target, counts)
        return self._comparable(outputs, batch), losses

    def _run(
        self, number: int, fused: FusedModule, values: Mapping[str, Tensor], counts: Sequence[int]
    ) -> dict[str, Tensor]:
        """The values that one stage gives."""
        stage = self._cuts[number]
        inputs = stage.inputs if fused.training else stage.evaluation_inputs
        given = stage.outputs if fused.training else stage.evaluation_outputs
        routes = self._routes if fused.training else self._evaluated_routes
        received = dict(values)
        for route in routes:
            if route.target == number:
                received |= {name: _received(values[name], name, route) for name in route.names}
        with padded_rows(fused, counts), self._entries[0].components.autocast():
            outcome = fused(number, *(received[value.name] for value in inputs))
        return {value.name: tensor for value, tensor in zip(given, outcome, strict=True)}

    def alone(self, trial: int, batch: int) -> tuple[Any, Tensor]:
        if not self.models[trial].training and self._traced.no_evaluation is not None:
            raise TraceError(self._traced.no_evaluation)  # then it is never evaluated in stages
        return super().alone(trial, batch)


def _received(tensor: Tensor, name: str, route: StageEdge) -> Tensor:
    """A value as another worker has it: without what this one noted at the tensor."""
    return tensor.view_as(tensor) if name in route.grad_names else tensor.detach()
