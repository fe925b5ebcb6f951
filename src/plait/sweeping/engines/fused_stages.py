"""The stages of fused trials: each worker of a group holds one stage of all of them.

The schedule drains before each update, so a trial computes the same as on one worker with the same number of
microbatches. Trials join and leave between two steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from plait.adapt.changes import PlanChange
from plait.core.errors import InputError, JobError
from plait.data import loader
from plait.data.sampler import GlobalBatch, Position
from plait.fusion.module import FusedModule
from plait.fusion.verify import FusionReport
from plait.launch.worker_process import Worker
from plait.pipeline.cutting.cut import cut
from plait.pipeline.executor import Pipeline, PipelineParts, StageKind
from plait.pipeline.microbatches import Microbatch
from plait.pipeline.named_state import Tensors, model_state, tied_aliases
from plait.profiler.traced import TracedModel
from plait.schema.settings import TrainSettings
from plait.sweeping.engines.traced_constants import check_values, plain_values
from plait.sweeping.engines.verified_stages import StagesOfTrials, of_stage
from plait.training.batch_streams import BatchStream, next_batches, with_replacements
from plait.training.change.members import ProgressMark, most_advanced
from plait.training.checkpoint import Checkpoint, EngineState
from plait.training.components import TrialInit
from plait.training.engine import IntervalResult, cannot_apply
from plait.training.engines.pipeline import StepBatch
from plait.training.fused.fused_components import FusedComponents
from plait.training.fused.rounds import Round, rounds_of
from plait.training.optimizers.build import build_optimizer
from plait.training.trial import Trial
from plait.training.worker_group import WorkerGroup


class FusedStages:
    """The stage of fused trials that this worker holds; all workers of its group make one together.

    Models are cut by `stages`, then fused as `verdict` says. The batches of a trial come from `feed`. The
    workers of a group do not change while it trains, and no step is undone.
    """

    def __init__(
        self,
        worker: Worker,
        entries: Sequence[TrialInit],
        feed: Callable[[Trial], BatchStream],
        workers: WorkerGroup,
        stages: StagesOfTrials,
        verdict: FusionReport | None = None,
    ) -> None:
        self._worker = worker
        self._feed = feed
        self._workers = workers
        self.layout, self._values = stages.layout, stages.values
        stage = cut(stages.traced, self._layers)
        self._first_names = stage.first_names
        self._aliases = tied_aliases(entries[0].components.model)
        # From now on the array holds the weights of the models.
        self._traced = replace(stages.traced, model=nn.Module())
        self._rest = [self._held_by_none(entry) for entry in entries]
        staged = [self._stage_of(entry) for entry in entries]
        kept = of_stage(verdict or FusionReport(), staged[0].components.model)
        self.components = FusedComponents(staged, stream=workers.place, verdict=kept)
        self.components.optimizer.sum_squares = lambda squares: workers.total(squares, squares.device)
        self._stage = FusedStage(self.components.fused)
        # As the pipeline holds it: its module is that of all trials.
        names = {f"fused.module.{name}": first for name, first in stage.first_names.items()}
        self._cut = replace(stage, module=cast("Any", self._stage), first_names=names)
        self._losses = self._no_losses()

    @property
    def _layers(self) -> tuple[str, ...]:
        return self.layout.stages[self._workers.place]

    def _no_losses(self) -> Tensor:
        return torch.zeros(self.components.trials, dtype=torch.float64, device=self.components.device)

    def _stage_of(self, entry: TrialInit) -> TrialInit:
        """The part of a trial in this worker's stage."""
        check_values(self._traced, self._values, plain_values(entry.components.model))
        module = cut(replace(self._traced, model=entry.components.model), self._layers).module
        parameters = [p for p in module.parameters() if p.requires_grad]
        if not parameters:
            raise JobError(
                f"parallel.plan: stage {self._workers.place} ({self._layers[0]} to {self._layers[-1]}) has "
                f"no parameter to train; use a plan with fewer stages"
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
        first, channels = self.components.of_trial(0), self._workers.channels
        assert channels is not None
        options = PipelineParts(
            self._loss,
            lambda _: self.components.optimizer,
            first.device,
            first.autocast,
            self._worker.rendezvous,
            stages=StageKind(lambda traced, layers: self._cut, stacked_inputs, has_plain_layers=False),
        )
        return Pipeline(self._worker.rank, self.layout, self._traced, channels, options)

    def close(self, pipeline: Pipeline) -> None:
        """Close the pipeline; the channels of the group are kept for the next one."""
        pipeline.close()

    def steps(self, trials: Sequence[Trial], count: int) -> Iterator[StepBatch]:
        for number in range(trials[0].step, trials[0].step + count):
            for trial in trials:
                trial.stream = trial.stream or self._feed(trial)
            batches = next_batches([trial.stream for trial in trials if trial.stream is not None])
            if not batches:
                return
            # Only the first stage has more than the sizes of the batches.
            rounds = rounds_of(batches, self.layout.microbatches)
            self._stage.begin(rounds)
            epoch, total = batches[0].epoch, batches[0].total
            sizes = [max(count for _, count in shares) for shares, _ in rounds]
            microbatches = [Microbatch(number, i, epoch, range(size)) for i, size in enumerate(sizes)]
            yield StepBatch(microbatches, tuple(batch.after for batch in batches), epoch, total)

    def contents(self, microbatches: list[Microbatch]) -> Iterator[Any]:
        for shares, _ in self._stage.rounds:
            for content, _ in shares:
                check_sizes(self._traced, content)
            contents = [content for content, _ in shares]
            yield self.components.stacked(contents, max(count for _, count in shares))

    def test_contents(self, settings: TrainSettings, microbatches: list[Microbatch]) -> Iterator[Any]:
        """Each microbatch of the test split for all trials."""
        source = self.components.of_trial(0).test_set
        order = (GlobalBatch(m.epoch, tuple(m.samples), Position()) for m in microbatches)
        for batch in loader.load(source, order, seed=settings.seed, rank=0, world_size=1, loaders=0):
            check_sizes(self._traced.evaluation or self._traced, batch.content)
            yield self.components.stacked([batch.content] * self.components.trials, batch.count)

    def _loss(self, output: Any, target: Any) -> Tensor:
        """The loss of each trial, summed over its microbatches."""
        with self._stage.padded():
            losses = self.components.losses_of(output, target, self._stage.counts)
        weighted = losses * torch.tensor(self._stage.weights, dtype=losses.dtype, device=losses.device)
        self._losses += weighted.detach()
        return weighted.sum()

    def take_losses(self, pipeline: Pipeline) -> Tensor:
        pipeline.losses.clear()
        losses, self._losses = self._losses, self._no_losses()
        return losses

    def run_interval(
        self, train: Callable[[], IntervalResult], positions: Callable[[int], tuple[Position, ...]]
    ) -> IntervalResult:
        """No recovery: the loss of a worker ends the sweep."""
        return train()

    def state(self, slot: int, pipeline: Pipeline, group: WorkerGroup) -> EngineState | None:
        local = self.components.state(slot)
        named = {self._aliases.get(name, name): value for name, value in local.model.items()}
        model, optimizer = group.gather(named), group.gather(self._by_first_names(local.optimizer))
        if not group.is_first:
            return None
        model = {**self._rest[slot], **model}
        # Aliases of tied weights that no stage uses keep their initial value.
        model |= {name: model[first] for name, first in self._aliases.items()}
        return EngineState(model, optimizer, age=local.age)

    def _by_first_names(self, state: Tensors) -> Tensors:
        paths = {path: path.rpartition("/") for path in state}
        return {f"{self._first_names[paths[p][0]]}/{paths[p][2]}": value for p, value in state.items()}

    def check_entering(self, entering: Sequence[TrialInit]) -> None:
        """Refuse trials whose traced code differs from that of the present ones, before anything changes."""
        self.components.check_entering([self._stage_of(entry) for entry in entering])

    def change(self, leaving: Sequence[int], entering: Sequence[TrialInit]) -> None:
        self._rest = with_replacements(self._rest, leaving, [self._held_by_none(entry) for entry in entering])
        self.components.change(leaving, [self._stage_of(entry) for entry in entering])
        self._losses = self._no_losses()

    def load(self, state: Checkpoint) -> None:
        """Does nothing: trials bring their state when they join."""

    def with_plan(self, change: PlanChange) -> TrainSettings:
        raise cannot_apply(change, "an array of trials")

    def find_source(self, marks: Sequence[ProgressMark]) -> tuple[int, EngineState] | None:
        return most_advanced(marks), EngineState({}, {})

    def leave_to(self, staying: Sequence[int], pipeline: Pipeline) -> None:
        """Does nothing: the group of an array is fixed."""


class FusedStage(nn.Module):
    """A fused stage that knows the current microbatch: how many rows each trial has in it."""

    def __init__(self, fused: FusedModule) -> None:
        super().__init__()
        self.fused = fused
        self.rounds: Sequence[Round] = ()
        self._passed = 0

    def begin(self, rounds: Sequence[Round]) -> None:
        """Expect the microbatches of a step, in order."""
        self.rounds, self._passed = rounds, 0

    @property
    def counts(self) -> list[int]:
        """The rows of each trial in the microbatch that passed last."""
        return [count for _, count in self.rounds[self._passed - 1][0]]

    @property
    def weights(self) -> list[float]:
        """Each trial's share of its batch in it."""
        return self.rounds[self._passed - 1][1]

    def padded(self) -> Any:
        """A context in which padded rows are excluded from losses and norms."""
        return self.fused.padded(self.counts) if len(set(self.counts)) > 1 else nullcontext()

    def forward(self, *inputs: Tensor) -> Any:
        if not self.training:
            return self.fused(*inputs)
        self._passed += 1
        without = [slot for slot, weight in enumerate(self.weights) if weight == 0.0]
        if without:
            self.fused.freeze(without)
        with self.padded():
            outputs = self.fused(*inputs)
        if without:
            self.fused.freeze([])
        return outputs


def stacked_inputs(traced: TracedModel, inputs: Any) -> list[Tensor]:
    """The tensors of a microbatch's inputs, each stacked for all trials; refuses what cannot be stacked."""
    if traced.value_paths:
        raise InputError(
            f"found a number or text at {min(traced.value_paths)} of a batch's inputs, which trials in "
            f"stages cannot take; give it as a tensor"
        )
    return [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]


def check_sizes(traced: TracedModel, content: Any) -> None:
    """Refuse a trial's microbatch for whose sizes its model would do something else than in the trace."""
    inputs, _ = content
    traced.check_inputs([leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)])
