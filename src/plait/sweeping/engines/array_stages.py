"""The stages of the trials of an array: each worker of a group holds some stages of all of them.

Trials are fused, or a single one is as in a run. The schedule drains before each update, so a trial computes
the same as on one worker with the same number of microbatches, whichever replica of a stage takes which;
pipelines that average are members of decentralized training, as those of a run.
Trials join and leave between two steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from plait.comm.channels import Channels
from plait.core.errors import InputError, JobError
from plait.data.loader import Batch, BatchStream
from plait.fusion.verify import FusionReport
from plait.launcher.worker_process import Worker
from plait.pipeline.cutting.cut import StageModule, cut, written_buffers_of_replicas
from plait.pipeline.cutting.edges import find_routes
from plait.pipeline.executor import PipelineExecutor
from plait.pipeline.gradient_sync import MembersOf, find_holders
from plait.pipeline.layout import PipelineLayout
from plait.pipeline.microbatches import Microbatch, microbatch_count
from plait.pipeline.named_state import Tensors, model_state, tied_aliases
from plait.pipeline.pipeline_parts import PipelineParts, StageKind
from plait.profiler.build import all_attributes, build_stages
from plait.profiler.traced_model import TracedModel
from plait.sweeping.engines.step_of_stages import Draws, FusedStage, StageLossScales, StepOfStages
from plait.sweeping.engines.traced_constants import check_values, plain_values
from plait.sweeping.engines.verified_stages import StagesOfTrials, of_stages
from plait.training.batch_streams import next_batches, with_replacements
from plait.training.checkpoint import EngineState
from plait.training.components import Components, TrialInit
from plait.training.engines.pipeline_setup import State, gathered, open_pipeline
from plait.training.fused.fused_components import FusedComponents
from plait.training.fused.rounds import Round, rounds_of
from plait.training.optimizers.build import build_optimizer
from plait.training.stages.local_tensors import names_by_stage
from plait.training.stages.trial_stages import StepBatch, TrialStages
from plait.training.trial import Trial
from plait.training.worker_group import StageLinks, WorkerGroup


class ArrayStages(TrialStages):
    """The stages of an array's only trial that this worker holds; its group's workers make them together.

    They are slices of the model, as in a run. The batches of a trial come from `feed`. The workers of a group
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
        self.layout, self._traced, self.replicas = stages.layout, stages.traced, stages.replicas
        self.sync: Sequence[Tensors] = [dict(entry.sync) for entry in entries]
        self._settings, self.components = entries[0].settings, entries[0].components
        self._aliases = tied_aliases(self.components.model)
        # The batches of the trials in the current step; only workers of the first stage have their contents.
        self.batches: Sequence[Batch] = ()
        # The rounds of the current step, by the index of their microbatches.
        self._rounds: Mapping[int, Round] = {}

    @property
    def _links(self) -> StageLinks:
        assert self._workers.links is not None
        return self._workers.links

    @property
    def channels(self) -> Channels:
        return self._links.channels

    @property
    def members_of(self) -> MembersOf:
        return self._links.members_of

    @property
    def _own(self) -> PipelineLayout:
        """The part of the layout in which this worker sums gradients."""
        return next(each for each in self.replicas if self._workers.rank in each.workers)

    def open(self) -> PipelineExecutor:
        traced, components = self._traced, self.components
        assert isinstance(components, Components)
        _, pipeline = open_pipeline(
            self._worker, self._settings, components, traced, self._own, (), self._workers
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
            self.batches = batches
            usual = [trial.batch.size for trial in trials]
            counts = microbatch_counts(batches, usual, self.layout.microbatches)
            microbatches = self._begin_step(number, rounds_of(batches, counts))
            after = tuple(batch.after for batch in batches)
            yield StepBatch(microbatches, after, batches[0].epoch, batches[0].total)

    def cut_share(
        self, steps: Sequence[int], share: int, batches: Sequence[Batch], usual: Sequence[int]
    ) -> list[Microbatch]:
        """The microbatches of a share of the trials' steps, which usually have `usual` samples."""
        most = self.replicas[0].microbatches
        counts = microbatch_counts(batches, usual, most)
        return self._begin_step(steps[0], self.components.cut(batches, counts, alone=True), share * most)

    def _begin_step(self, step: int, rounds: Sequence[Round], first: int = 0) -> list[Microbatch]:
        """The microbatches of a step's rounds, numbered from `first`."""
        self._rounds = dict(enumerate(rounds, first))
        rows = {i: tuple(n if w else 0 for (_, n), w in zip(*each)) for i, each in self._rounds.items()}
        return [Microbatch(step, i, 0, range(max(n)), n) for i, n in rows.items()]

    def contents(self, microbatches: list[Microbatch]) -> Iterator[Any]:
        for microbatch in microbatches:
            shares, _ = self._rounds[microbatch.index]
            length = max(count for _, count in shares)
            yield self.components.stacked([content for content, _ in shares], length)

    def gather(self, slot: int, local: State, group: WorkerGroup) -> EngineState | None:
        assert isinstance(self.components, Components)
        return gathered(self.components, local, group, self._aliases)


class FusedStages(ArrayStages):
    """The stages of fused trials that this worker holds, as one fused module and one optimizer.

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
        traced, layout = stages.traced, self.layout
        self._values = stages.values
        cuts = {number: cut(traced, layout.stages[number]) for number in layout.stages_of(workers.rank)}
        self._layers = {number: traced.select(each.layers) for number, each in cuts.items()}
        self._codes = build_stages(traced, self._layers).codes
        self._first_names = {n: first for each in cuts.values() for n, first in each.first_names.items()}
        self._holders = {**names_by_stage(traced, layout), **find_holders(traced, layout)}
        # From now on the array holds the weights of the models.
        self._cuts = {number: replace(each, module=nn.Module()) for number, each in cuts.items()}
        self._traced = replace(traced, model=nn.Module())
        self._rest = [self._held_by_none(entry) for entry in entries]
        staged = [self._stages_of(entry) for entry in entries]
        kept = of_stages(verdict or FusionReport(), staged[0].components.model)
        names = set(self._first_names.values())
        is_shared = any(len(ranks) > 1 for name, ranks in self._holders.items() if name in names)
        # The workers of a stage draw from one stream, each the numbers of its microbatches.
        self.components = FusedComponents(staged, verdict=kept, is_shared=is_shared)
        self._step = StepOfStages(self.components.fused)
        self.verdict = verdict or FusionReport()
        self.unlike_buffers = written_buffers_of_replicas(traced, layout)

    def _is_first_holder(self, name: str) -> bool:
        """Whether this worker is the first of those that hold a tensor, by its first name."""
        own = self.layout.holders(min(self._layers))
        return self._holders.get(name, own)[0] == self._workers.rank

    def _stages_of(self, entry: TrialInit) -> TrialInit:
        """The part of a trial in this worker's stages."""
        check_values(self._traced, self._values, plain_values(entry.components.model))
        traced = replace(self._traced, model=entry.components.model)
        module = build_stages(traced, self._layers, self._codes)
        parameters = [p for p in module.parameters() if p.requires_grad]
        if not parameters:
            stages = ", ".join(f"{n} ({each[0].id} to {each[-1].id})" for n, each in self._layers.items())
            raise JobError(
                f"parallel.plan: worker {self._workers.rank} has no parameter to train: it holds stage "
                f"{stages}; use a plan with fewer stages"
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

    def open(self) -> PipelineExecutor:
        components, layout = self.components, self._own
        first = components.of_trial(0)
        own, stages = layout.pipeline_of(self._workers.rank), self._fused_stages()
        kind = StageKind(
            lambda traced, layers: stages[tuple(layers)],
            stacked_inputs,
            components.trials,
            lambda microbatch: self._step.begin(microbatch * layout.pipelines + own),
            lambda: Draws(self._step, components.fused.draws),
            lambda packed: Draws.unpacked(self._step, packed),
        )
        parts = PipelineParts(
            self._loss,
            lambda _: components.optimizer,
            first.device,
            first.autocast,
            self._worker.rendezvous,
            topology=self._settings.topology,
            stages=kind,
            loss_scale=StageLossScales(components) if components.is_scaled else None,
            everyone=self._workers.sums,
            members_of=self.members_of,
        )
        pipeline = PipelineExecutor(self._workers.rank, layout, self._traced, self.channels, parts)
        counted = [p for name, p in pipeline.parameters.items() if self._is_first_holder(name)]
        components.optimizer.counted, components.optimizer.sum_squares = counted, self._sum_squares
        pipeline.carries_random_state = self.draws_as_whole
        return pipeline

    @cached_property
    def draws_as_whole(self) -> bool:
        """Whether trials draw the random numbers of the whole model: each stage receives from the one before.

        Where one does not, it draws others.
        """
        routes = {(route.source, route.target) for route in find_routes(self._traced, self.layout.stages)}
        return all((stage - 1, stage) in routes for stage in range(1, len(self.layout.stages)))

    def _sum_squares(self, squares: Tensor) -> Tensor:
        """The sums over all stages, in which each parameter counts once."""
        return self._workers.total(squares.double(), squares.device)

    def _fused_stages(self) -> dict[tuple[str, ...], StageModule]:
        """The stages of this worker by their layers, with the tensors of all trials."""
        whole = self.components.fused.module
        # Constants of the code are buffers of the fused module.
        evaluation = self._traced.evaluation and replace(self._traced.evaluation, constants={})
        traced = replace(self._traced, model=whole, constants={}, evaluation=evaluation)
        return {
            self.layout.stages[number]: replace(
                self._cuts[number],
                module=FusedStage(self._step, number, all_attributes(traced, layers)),
                state=whole,
            )
            for number, layers in self._layers.items()
        }

    def cut_share(
        self, steps: Sequence[int], share: int, batches: Sequence[Batch], usual: Sequence[int]
    ) -> list[Microbatch]:
        self.components.seed_share(self._settings.seed, steps, share, self.replicas[0].microbatches)
        return super().cut_share(steps, share, batches, usual)

    def _begin_step(self, step: int, rounds: Sequence[Round], first: int = 0) -> list[Microbatch]:
        if rounds:  # else no trial has samples here
            self._step.begin_step(rounds)
        return super()._begin_step(step, rounds, first)

    def contents(self, microbatches: list[Microbatch]) -> Iterator[Any]:
        for microbatch in microbatches:
            for content, _ in self._rounds[microbatch.index][0]:
                check_sizes(self._traced, content)
        return super().contents(microbatches)

    def _loss(self, output: Any, target: Any) -> Tensor:
        """The loss of each trial, times the microbatch's share of its batch."""
        with self._step.in_loss():
            losses = self.components.losses_of(output, target, self._step.counts)
        return self.components.weighted(losses, self._step.weights)

    def local_state(self, slot: int, pipeline: PipelineExecutor) -> State:
        local = self.components.state(slot)
        model = {self._aliases.get(name, name): value for name, value in local.model.items()}
        model = {name: value for name, value in model.items() if self._is_first_holder(name)}
        optimizer = {}
        for path, value in local.optimizer.items():
            name, _, what = path.rpartition("/")
            if self._is_first_holder(first := self._first_names[name]):
                optimizer[f"{first}/{what}"] = value
        return model, optimizer

    def gather(self, slot: int, local: State, group: WorkerGroup) -> EngineState | None:
        model, optimizer = map(group.gather, local)
        if not group.is_first:
            return None
        model = {**self._rest[slot], **model}
        # Aliases of tied weights that no stage uses keep their initial value.
        model |= {name: model[first] for name, first in self._aliases.items()}
        age = int(self.components.fused.ages[slot])
        return EngineState(model, optimizer, loss_scale=self.components.loss_scale(slot), age=age)

    def check_entering(self, entering: Sequence[TrialInit]) -> None:
        """Refuse trials whose traced code differs from that of the present ones, before anything changes."""
        self.components.check_entering([self._stages_of(entry) for entry in entering])

    def change(self, leaving: Sequence[int], entering: Sequence[TrialInit]) -> None:
        self._rest = with_replacements(self._rest, leaving, [self._held_by_none(entry) for entry in entering])
        self.sync = with_replacements(self.sync, leaving, [dict(entry.sync) for entry in entering])
        self.components.change(leaving, [self._stages_of(entry) for entry in entering])


def microbatch_counts(batches: Sequence[Batch], usual: Sequence[int], most: int) -> list[int]:
    """The numbers of microbatches of the trials' batches; those of `usual` samples have `most`."""
    return [microbatch_count(batch.count, size, most) for batch, size in zip(batches, usual)]


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
