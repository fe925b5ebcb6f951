"""An array in stages: each worker of a worker group holds one stage of all its trials, fused.

Batches go through in microbatches under a schedule that drains before the update, so a trial comes to what
one worker makes of it with as many microbatches. Trials join and leave between two steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import astuple, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from plait.core.errors import JobError
from plait.data import loader
from plait.data.loader import Batch
from plait.fusion.module import FusedModule
from plait.fusion.verify import FusionReport
from plait.launch.worker import Worker
from plait.pipeline import executor as pipelines
from plait.pipeline import named_state
from plait.pipeline.cutting.cut import StageModule, cut
from plait.pipeline.layout import one_batch
from plait.pipeline.named_state import tied_aliases
from plait.planner.schedules.operations import Update
from plait.profiler.traced import TracedModel
from plait.sweeping.engines.traced_constants import check_values, plain_values
from plait.sweeping.engines.verified_stages import StagesOfTrials, of_stage, prepare_trials
from plait.training.batch_streams import BatchStream, next_batches, with_replacements
from plait.training.checkpoint import EngineState
from plait.training.engine import IntervalResult
from plait.training.engines.train_step import requests_of
from plait.training.engines.whole_model import OnStep
from plait.training.evaluate import in_order, means, sums_of
from plait.training.fused.fused_components import FusedComponents, TrialInit, at
from plait.training.fused.rounds import Round, rounds_of
from plait.training.optimizers.build import build_optimizer
from plait.training.trial import Trial
from plait.training.worker_group import GroupPipeline, WorkerGroup


class PipelinedArray:
    """The stage of an array that this worker holds; all workers of its group make one together."""

    def __init__(
        self,
        worker: Worker,
        trials: list[Trial],
        entries: Sequence[TrialInit],
        feed: Callable[[Trial], BatchStream],
        on_step: OnStep,
        workers: WorkerGroup,
        pipeline: GroupPipeline,
        stages: StagesOfTrials | None = None,
        verdict: FusionReport | None = None,
    ) -> None:
        self._worker = worker
        self.trials = trials
        # What the step under way is taken on, once it is read.
        self.under_way: tuple[Sequence[Batch], Sequence[float]] = ((), ())
        self._feed = feed
        self._on_step = on_step
        self._workers = workers
        first = entries[0]
        stages = stages or prepare_trials(entries, pipeline.layout, verify=False)
        self._layout, self._values, traced = stages.layout, stages.values, stages.traced
        self._verdict = verdict or FusionReport()
        self._first_names = cut(traced, self._layers).first_names
        self._aliases = tied_aliases(first.parts.model)
        # The models' weights are the array's own from now on.
        self._traced = replace(traced, model=nn.Module())
        self._rest = [self._held_by_none(entry) for entry in entries]
        own = [self._stage_of(entry) for entry in entries]
        kept = of_stage(self._verdict, own[0].parts.model)
        self._own = FusedComponents(own, stream=workers.place, verdict=kept)
        self._own.optimizer.sum_squares = lambda squares: workers.total(squares, squares.device)
        self._stage = FusedStage(self._own.fused)
        self._losses = torch.zeros(len(entries), dtype=torch.float64)
        parts = pipelines.PipelineParts(
            self._loss,
            lambda _: cast("torch.optim.Optimizer", self._own.optimizer),
            first.parts.device,
            first.parts.autocast,
            pipeline.rendezvous,
            make_stage=self._make_stage,
        )
        self._pipeline = pipelines.Pipeline(pipeline.rank, self._layout, traced, pipeline.channels, parts)

    @property
    def _layers(self) -> tuple[str, ...]:
        return self._layout.stages[self._workers.place]

    def _stage_of(self, entry: TrialInit) -> TrialInit:
        """What of a trial belongs to this worker's stage."""
        check_values(self._traced, self._values, plain_values(entry.parts.model))
        module = cut(replace(self._traced, model=entry.parts.model), self._layers).module
        parameters = [p for p in module.parameters() if p.requires_grad]
        if not parameters:
            raise JobError(
                f"parallel.plan: stage {self._workers.place} ({self._layers[0]} to {self._layers[-1]}) has "
                f"no parameter to train; use a plan with fewer stages"
            )
        optimizer = build_optimizer(entry.settings.optimizer, parameters, entry.parts.names)
        known = entry.parts.optimizer.state
        optimizer.state.update({p: known[p] for p in parameters if p in known})
        return replace(entry, parts=replace(entry.parts, model=module, optimizer=optimizer))

    def _held_by_none(self, entry: TrialInit) -> named_state.Tensors:
        """What of a trial's state no stage uses."""
        used = {name for layer in self._traced.layers for name in (*layer.parameters, *layer.buffers)}
        state = named_state.model_state(entry.parts.model) if self._workers.is_first else {}
        return {name: value.clone() for name, value in state.items() if name not in used}

    def _make_stage(self, traced: TracedModel, layers: Any) -> StageModule:
        """A stage as the pipeline holds it: its module is that of all trials."""
        stage = cut(traced, layers)
        names = {f"fused.module.{name}": first for name, first in stage.first_names.items()}
        return replace(stage, module=cast("Any", self._stage), first_names=names)

    def check_entering(self, entering: Sequence[TrialInit]) -> None:
        """Refuse, before anything changes, trials whose code differs from that of those that are there."""
        for entry in entering:
            check_values(self._traced, self._values, plain_values(entry.parts.model))
        self._own.check_entering([self._stage_of(entry) for entry in entering])

    def change_trials(
        self, leaving: Sequence[int], entering: Sequence[TrialInit], trials: list[Trial]
    ) -> None:
        """Let trials leave and enter; `trials` are those that are there then."""
        self._rest = with_replacements(self._rest, leaving, [self._held_by_none(entry) for entry in entering])
        self._own.change(leaving, [self._stage_of(entry) for entry in entering])
        self.trials = trials

    def train(self, steps: int) -> IntervalResult:
        """Take steps with every trial, or fewer if a worker is asked for something else."""
        trials = self.trials
        done, positions = 0, tuple(trial.position for trial in trials)
        while done < steps:
            self.under_way = (), ()
            for trial in trials:
                trial.stream = trial.stream or self._feed(trial)
            batches = next_batches([trial.stream for trial in trials if trial.stream is not None])
            factors = [trial.lr_factor(trial.step + done) for trial in trials]
            self.under_way = batches, factors
            losses = self._take_step(batches, factors)
            done, positions = done + 1, tuple(batch.after for batch in batches)
            self._on_step(done, losses, batches)
            stop, change = self._workers.from_first(lambda: astuple(requests_of(self._worker)))
            if stop or change:
                return IntervalResult(done, positions, stopped=stop, change_asked=change)
        return IntervalResult(done, positions)

    def _take_step(self, batches: Sequence[Batch], factors: Sequence[float]) -> Tensor:
        """One step of every trial; only the first stage has more than the sizes of the batches."""
        self._own.set_lr(factors)
        rounds = rounds_of(batches, self._layout.microbatches)
        self._stage.begin(rounds)
        self._losses = torch.zeros(self._own.trials, dtype=torch.float64, device=self._own.fused.seeds.device)
        contents = self._contents(rounds) if self._workers.loads else iter(())
        rank = self._pipeline.rank
        self._pipeline.run(one_batch(self._layout, rank, len(rounds)), _Work(contents))
        self._pipeline.losses.clear()
        self._pipeline.timings.clear()
        return self._workers.total(self._losses, self._losses.device)

    def _contents(self, rounds: Sequence[Round]) -> Iterator[Any]:
        for pieces, _ in rounds:
            for content, _ in pieces:
                check_sizes(self._traced, content)
            yield self._own.stacked([content for content, _ in pieces], max(count for _, count in pieces))

    def _loss(self, output: Any, target: Any) -> Tensor:
        """The sum of what each trial's microbatch adds to its loss."""
        with self._stage.padded():
            losses = self._own.losses_of(output, target, self._stage.counts)
        weighted = losses * torch.tensor(self._stage.weights, dtype=losses.dtype, device=losses.device)
        self._losses += weighted.detach()
        return weighted.sum()

    def evaluate(self, places: Sequence[int] = (0,)) -> list[dict[str, float]]:
        """Mean loss and metric over the test split, which goes through all stages."""
        parts, settings = self._own.of_trial(places[0]), self._own.settings_of(places[0])
        assert parts.test_set is not None
        size = settings.evaluate.batch_size or settings.data.batch_size
        batches = list(in_order(len(parts.test_set), max(1, size // self._layout.microbatches)))
        found = loader.load(
            parts.test_set, iter(batches), seed=settings.seed, rank=0, world_size=1, loaders=0
        )
        contents = (self._evaluated(batch) for batch in found)
        sums = torch.zeros(len(places), 4, dtype=torch.float64)

        def measure(output: Any, target: Any, microbatch: int) -> None:
            count = len(batches[microbatch].samples)
            for row, place in enumerate(places):
                own = self._own.of_trial(place)
                sums[row] += sums_of(own, at(output, place), at(target, place), count)

        self._pipeline.evaluate(len(batches), _Work(contents), measure)
        sums = self._workers.total(sums, parts.device)
        return [means(self._own.of_trial(place), row) for place, row in zip(places, sums)]

    def _evaluated(self, batch: Batch) -> Any:
        """A batch of the test split for all trials."""
        check_sizes(self._traced.evaluation or self._traced, batch.content)
        return self._own.stacked([batch.content] * self._own.trials, batch.count)

    def state(self, place: int = 0) -> EngineState | None:
        """The state of a trial, on the first worker; the others give it theirs."""
        model, optimizer = self._gather(place)
        if not self._workers.is_first:
            return None
        model = {**self._rest[place], **model}
        # Aliases of tied weights that no stage uses keep their initial value.
        model |= {name: model[first] for name, first in self._aliases.items()}
        return EngineState(model, optimizer, age=int(self._own.fused.ages[place]))

    def _gather(self, place: int) -> tuple[named_state.Tensors, named_state.Tensors]:
        own = self._own.state(place)
        model = {self._aliases.get(name, name): value for name, value in own.model.items()}
        return self._workers.gather(model), self._workers.gather(self._by_first_names(own.optimizer))

    def _by_first_names(self, state: named_state.Tensors) -> named_state.Tensors:
        found = {}
        for path, value in state.items():
            name, _, key = path.rpartition("/")
            found[f"{self._first_names[name]}/{key}"] = value
        return found

    def close(self) -> None:
        """Let go of the trials."""
        self._pipeline.close()


class FusedStage(nn.Module):
    """A fused stage that knows the microbatch which passes: the rows that are each trial's own."""

    def __init__(self, fused: FusedModule) -> None:
        super().__init__()
        self.fused = fused
        self._rounds: Sequence[Round] = ()
        self._passed = 0

    def begin(self, rounds: Sequence[Round]) -> None:
        """Expect the microbatches of a step, in order."""
        self._rounds, self._passed = rounds, 0

    @property
    def counts(self) -> list[int]:
        """The rows of each trial in the microbatch that passed last."""
        return [count for _, count in self._rounds[self._passed - 1][0]]

    @property
    def weights(self) -> list[float]:
        """Each trial's share of its batch in it."""
        return self._rounds[self._passed - 1][1]

    def padded(self) -> Any:
        """Within, rows that are padding in it are left out of losses and norms."""
        return self.fused.padded(self.counts) if len(set(self.counts)) > 1 else nullcontext()

    def forward(self, *inputs: Tensor) -> Any:
        if not self.training:
            return self.fused(*inputs)
        self._passed += 1
        without = [place for place, weight in enumerate(self.weights) if weight == 0.0]
        if without:
            self.fused.freeze(without)
        with self.padded():
            outputs = self.fused(*inputs)
        if without:
            self.fused.freeze([])
        return outputs


def check_sizes(traced: TracedModel, content: Any) -> None:
    """Refuse a trial's microbatch for whose sizes its model would do something else than in the trace."""
    inputs, _ = content
    traced.check_inputs([leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)])


class _Work:
    """Microbatches as a pipeline asks for them: one after the other."""

    def __init__(self, contents: Iterator[Any]) -> None:
        self._contents = contents

    def content(self, microbatch: int) -> tuple[Any, Any]:
        inputs, target = next(self._contents)
        return inputs, target

    def weight(self, microbatch: int) -> float:
        return 1.0

    def samples(self, microbatch: int) -> int:
        # Stages of fused trials have no replicas, among which it would count.
        return 1

    def seed(self, microbatch: int, stage: int) -> int:
        # Fused trials draw from streams of their own.
        return 0

    def set_rate(self, update: Update) -> None:
        pass

    def factor(self, update: Update) -> float:
        return 1.0
