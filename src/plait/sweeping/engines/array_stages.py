"""The stages of the trials of an array: each worker of a group holds one stage of all of them.

Trials are fused, or a single one is as in a run. The schedule drains before each update, so a trial computes
the same as on one worker with the same number of microbatches, whichever replica of a stage takes which.
Trials join and leave between two steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from plait.core.errors import InputError, JobError
from plait.data.loader import BatchStream
from plait.fusion.module import FusedModule
from plait.fusion.verify import FusionReport
from plait.launch.worker_process import Worker
from plait.pipeline.cutting.cut import cut
from plait.pipeline.executor import Pipeline, PipelineParts, StageKind
from plait.pipeline.microbatches import Microbatch
from plait.pipeline.named_state import Tensors, model_state, tied_aliases
from plait.profiler.traced import TracedModel
from plait.sweeping.engines.traced_constants import check_values, plain_values
from plait.sweeping.engines.verified_stages import StagesOfTrials, of_stage
from plait.training.batch_streams import next_batches, with_replacements
from plait.training.checkpoint import EngineState
from plait.training.components import Components, TrialInit
from plait.training.engines.pipeline_setup import gathered_state, open_pipeline
from plait.training.fused.fused_components import FusedComponents
from plait.training.fused.rounds import Round, rounds_of
from plait.training.optimizers.build import build_optimizer
from plait.training.stages.trial_stages import StepBatch, TrialStages
from plait.training.trial import Trial
from plait.training.worker_group import WorkerGroup


class ArrayStages(TrialStages):
    """The stage of an array's only trial that this worker holds; all workers of its group make one together.

    It is a slice of the model, as in a run. The batches of a trial come from `feed`. The workers of a group
    do not change while it trains, and no step is undone.
    """

    def __init__(
        self,
        worker: Worker,
        entries: Sequence[TrialInit],
        feed: Callable[[Trial], BatchStream],
        workers: WorkerGroup,
        stages: StagesOfTrials,
    ) -> None:
        self._worker = worker
        self._feed = feed
        self._workers = workers
        self.layout, self._traced = stages.layout, stages.traced
        self._settings, self.components = entries[0].settings, entries[0].components
        self._aliases = tied_aliases(self.components.model)
        self._rounds: Sequence[Round] = ()

    def open(self) -> Pipeline:
        traced, components = self._traced, self.components
        assert isinstance(components, Components)
        _, pipeline = open_pipeline(
            self._worker, self._settings, components, traced, self.layout, (), self._workers
        )
        self.components = replace(components, optimizer=pipeline.optimizer, base_lrs=pipeline.base_lrs)
        return pipeline

    def steps(self, trials: Sequence[Trial], count: int) -> Iterator[StepBatch]:
        for number in range(trials[0].step, trials[0].step + count):
            for trial in trials:
                trial.stream = trial.stream or self._feed(trial)
            batches = next_batches([trial.stream for trial in trials if trial.stream is not None])
            if not batches:
                return
            # Only workers of the first stage have more than the sizes of the batches.
            self._rounds = rounds_of(batches, self.layout.microbatches)
            epoch = batches[0].epoch
            rows = [tuple(n if w else 0 for (_, n), w in zip(*each)) for each in self._rounds]
            microbatches = [Microbatch(number, i, epoch, range(max(n)), n) for i, n in enumerate(rows)]
            yield StepBatch(microbatches, tuple(batch.after for batch in batches), epoch, batches[0].total)

    def contents(self, microbatches: list[Microbatch]) -> Iterator[Any]:
        for microbatch in microbatches:
            shares, _ = self._rounds[microbatch.index]
            length = max(count for _, count in shares)
            yield self.components.stacked([content for content, _ in shares], length)

    def state(self, slot: int, pipeline: Pipeline, group: WorkerGroup) -> EngineState | None:
        assert isinstance(self.components, Components)
        return gathered_state(self.components, pipeline, group, self._aliases)


class FusedStages(ArrayStages):
    """The stage of fused trials that this worker holds.

    Models are cut by `stages`, then fused as `verdict` says.
    """

    components: FusedComponents

    def __init__(
        self,
        worker: Worker,
        entries: Sequence[TrialInit],
        feed: Callable[[Trial], BatchStream],
        workers: WorkerGroup,
        stages: StagesOfTrials,
        verdict: FusionReport | None = None,
    ) -> None:
        super().__init__(worker, entries, feed, workers, stages)
        (self._number,) = self.layout.stages_of(workers.rank)
        self._layers, self._values = self.layout.stages[self._number], stages.values
        stage = cut(stages.traced, self._layers)
        self._first_names = stage.first_names
        # From now on the array holds the weights of the models.
        self._traced = replace(stages.traced, model=nn.Module())
        self._rest = [self._held_by_none(entry) for entry in entries]
        staged = [self._stage_of(entry) for entry in entries]
        kept = of_stage(verdict or FusionReport(), staged[0].components.model)
        # The workers of a stage draw from one stream, each the numbers of its microbatches.
        self.components = FusedComponents(staged, self._number, kept, is_shared=self._is_replicated)
        self.components.optimizer.sum_squares = self._sum_squares
        self._stage = FusedStage(self.components.fused)
        # As the pipeline holds it: its module is that of all trials.
        names = {f"{_INSIDE}.{name}": first for name, first in stage.first_names.items()}
        written = frozenset(f"{_INSIDE}.{name}" for name in stage.written)
        keeping = tuple(f"{_INSIDE}.{path}" for path in stage.keeping)
        module = cast("Any", self._stage)
        self._cut = replace(stage, module=module, first_names=names, written=written, keeping=keeping)

    @property
    def _is_replicated(self) -> bool:
        return len(self.layout.holders(self._number)) > 1

    @property
    def _is_first_holder(self) -> bool:
        return self.layout.holders(self._number)[0] == self._workers.rank

    def _sum_squares(self, squares: Tensor) -> Tensor:
        """The sums over all stages, of which each counts once."""
        local = squares if self._is_first_holder else torch.zeros_like(squares)
        return self._workers.total(local, squares.device)

    def _stage_of(self, entry: TrialInit) -> TrialInit:
        """The part of a trial in this worker's stage."""
        check_values(self._traced, self._values, plain_values(entry.components.model))
        module = cut(replace(self._traced, model=entry.components.model), self._layers).module
        parameters = [p for p in module.parameters() if p.requires_grad]
        if not parameters:
            raise JobError(
                f"parallel.plan: stage {self._number} ({self._layers[0]} to {self._layers[-1]}) has no "
                f"parameter to train; use a plan with fewer stages"
            )
        optimizer = build_optimizer(entry.settings.optimizer, parameters, entry.components.names)
        known = entry.components.optimizer.state
        optimizer.state.update({p: known[p] for p in parameters if p in known})
        return replace(entry, components=replace(entry.components, model=module, optimizer=optimizer))

    def _held_by_none(self, entry: TrialInit) -> Tensors:
        """The part of a trial's state that no stage uses."""
        used = {name for layer in self._traced.layers for name in (*layer.parameters, *layer.buffers)}
        state = model_state(entry.components.model) if self._workers.is_first else {}
        return {name: value.clone() for name, value in state.items() if name not in used}

    def open(self) -> Pipeline:
        components, links = self.components, self._workers.links
        first, layout = components.of_trial(0), self.layout
        assert links is not None
        own = layout.pipeline_of(self._workers.rank)
        kind = StageKind(
            lambda traced, layers: self._cut,
            stacked_inputs,
            components.trials,
            lambda microbatch: self._stage.begin(microbatch * layout.pipelines + own),
        )
        parts = PipelineParts(
            self._loss,
            lambda _: components.optimizer,
            first.device,
            first.autocast,
            self._worker.rendezvous,
            stages=kind,
            loss_scale=StageLossScales(components) if components.is_scaled else None,
            everyone=self._workers.sums,
            group_of=links.group_of,
        )
        return Pipeline(self._workers.rank, layout, self._traced, links.channels, parts)

    def steps(self, trials: Sequence[Trial], count: int) -> Iterator[StepBatch]:
        for batch in super().steps(trials, count):
            self._stage.begin_step(self._rounds)
            yield batch

    def contents(self, microbatches: list[Microbatch]) -> Iterator[Any]:
        for microbatch in microbatches:
            for content, _ in self._rounds[microbatch.index][0]:
                check_sizes(self._traced, content)
        return super().contents(microbatches)

    def _loss(self, output: Any, target: Any) -> Tensor:
        """The loss of each trial, times the microbatch's share of its batch."""
        with self._stage.padded():
            losses = self.components.losses_of(output, target, self._stage.counts)
        return self.components.weighted(losses, self._stage.weights)

    def state(self, slot: int, pipeline: Pipeline, group: WorkerGroup) -> EngineState | None:
        local = self.components.state(slot)
        named = {self._aliases.get(name, name): value for name, value in local.model.items()}
        held = (named, self._by_first_names(local.optimizer)) if self._is_first_holder else ({}, {})
        model, optimizer = map(group.gather, held)
        if not group.is_first:
            return None
        model = {**self._rest[slot], **model}
        # Aliases of tied weights that no stage uses keep their initial value.
        model |= {name: model[first] for name, first in self._aliases.items()}
        return EngineState(model, optimizer, loss_scale=local.loss_scale, age=local.age)

    def _by_first_names(self, state: Tensors) -> Tensors:
        paths = {path: path.rpartition("/") for path in state}
        return {f"{self._first_names[paths[p][0]]}/{paths[p][2]}": value for p, value in state.items()}

    def check_entering(self, entering: Sequence[TrialInit]) -> None:
        """Refuse trials whose traced code differs from that of the present ones, before anything changes."""
        self.components.check_entering([self._stage_of(entry) for entry in entering])

    def change(self, leaving: Sequence[int], entering: Sequence[TrialInit]) -> None:
        self._rest = with_replacements(self._rest, leaving, [self._held_by_none(entry) for entry in entering])
        self.components.change(leaving, [self._stage_of(entry) for entry in entering])


# Where a fused stage holds the module of all trials.
_INSIDE = "fused.module"


class FusedStage(nn.Module):
    """A fused stage that knows the current microbatch: how many rows each trial has in it.

    The random numbers of a microbatch depend on its index in the step, not on which worker computes it.
    """

    def __init__(self, fused: FusedModule) -> None:
        super().__init__()
        self.fused = fused
        self._rounds: Sequence[Round] = ()
        self._index = 0
        # The forwards of each trial before the step, and in it.
        self._ages = self._forwards = fused.ages

    def begin_step(self, rounds: Sequence[Round]) -> None:
        """Expect microbatches of a step."""
        self._rounds = rounds
        forwards = [sum(weight > 0.0 for weight in weights) for weights in zip(*(w for _, w in rounds))]
        self._ages = self.fused.ages.clone()
        self._forwards = torch.tensor(forwards, device=self._ages.device)
        self.fused.ages.add_(self._forwards)

    def begin(self, index: int) -> None:
        """Expect the microbatch `index` of the step."""
        self._index = index

    @property
    def counts(self) -> list[int]:
        """The rows of each trial in the current microbatch."""
        return [count for _, count in self._rounds[self._index][0]]

    @property
    def weights(self) -> list[float]:
        """Each trial's share of its batch in it."""
        return self._rounds[self._index][1]

    def padded(self) -> AbstractContextManager[None]:
        """A context in which padded rows are excluded from losses and norms."""
        return self.fused.padded(self.counts) if len(set(self.counts)) > 1 else nullcontext()

    def forward(self, *inputs: Tensor) -> Any:
        if not self.training:
            return self.fused(*inputs)
        fused, ages = self.fused, self.fused.ages.clone()
        fused.ages.copy_(self._ages + self._forwards.clamp(max=self._index))
        without = [slot for slot, weight in enumerate(self.weights) if weight == 0.0]
        if without:
            fused.freeze(without)
        with self.padded():
            outputs = fused(*inputs)
        if without:
            fused.freeze([])
        fused.ages.copy_(ages)
        return outputs


class StageLossScales:
    """The loss scales of fused trials on one worker of a pipeline; a trial skips its own updates only."""

    def __init__(self, components: FusedComponents) -> None:
        self._components = components

    @property
    def value(self) -> Tensor:
        return self._components.scales.scales

    def unscale(
        self, grads: Sequence[Tensor], device: torch.device, everyone: dist.ProcessGroup | None = None
    ) -> bool:
        """See `LossScaling`; the next step skips trials with an overflow in any stage."""
        scales, optimizer = self._components.scales, self._components.optimizer
        overflows = scales.unscale(grads).to(torch.float32)
        dist.all_reduce(overflows, dist.ReduceOp.MAX, group=everyone)
        optimizer.skip = overflows > 0
        scales.update(optimizer.skip)
        return True


def stacked_inputs(traced: TracedModel, inputs: Any) -> list[Tensor]:
    """The tensors of a microbatch's inputs, each stacked for all trials; refuses what cannot be stacked."""
    if traced.value_paths:
        raise InputError(
            f"found a number or text at {min(traced.value_paths)} of a batch's inputs, which trials in "
            f"stages cannot take; give it as a tensor"
        )
    stacked = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
    traced.check_inputs([tensor[0] for tensor in stacked])
    return stacked


def check_sizes(traced: TracedModel, content: Any) -> None:
    """Refuse a trial's microbatch for whose sizes its model would do something else than in the trace."""
    inputs, _ = content
    traced.check_inputs([leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)])
