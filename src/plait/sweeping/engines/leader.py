"""An array that a team trains: the leader's side, which passes every call on to those who follow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from plait.adapt.monitors.gradient_noise import GradientAverages
from plait.core.errors import JobError
from plait.data.loader import Batch
from plait.data.requirements import streams_of
from plait.data.sampler import Position
from plait.fusion.verify import Verdict
from plait.pipeline import named_state
from plait.schema.settings import TrainSettings
from plait.sweeping.datasets import DataSets
from plait.sweeping.engines import commands
from plait.sweeping.engines.batch_streams import BatchStream, BatchStreams, next_batches, reseated
from plait.sweeping.engines.fused import FusedArray, TrialInit, TrialTensors
from plait.sweeping.engines.unfused import UnfusedArray
from plait.sweeping.worker_group import WorkerGroup
from plait.training import checkpoint as checkpoints
from plait.training import components
from plait.training.checkpoint import Checkpoint

if TYPE_CHECKING:
    from plait.sweeping.engines.pipelined import PipelinedArray
    from plait.sweeping.engines.verified_stages import StagesOfTrials

SharedArray: TypeAlias = "FusedArray | UnfusedArray | PipelinedArray"


def make_array(
    entries: Sequence[TrialInit],
    fused: bool,
    team: WorkerGroup | None,
    verdict: Verdict | None = None,
    stages: StagesOfTrials | None = None,
) -> SharedArray:
    """An array of the entries, held by this worker, by each of a team, or by all of them in stages.

    `verdict` says how trials can be fused rightly, `stages` how they are cut where that is known.
    """
    if team is not None and team.pipeline is not None:
        # Slow to import, with all that tracing needs.
        from plait.sweeping.engines.pipelined import PipelinedArray

        return PipelinedArray(entries, team, team.pipeline, stages, verdict)
    if team is not None and streams_of(entries[0].parts.train_set.dataset) is not None:
        raise JobError(
            f"--replicas: the samples of {entries[0].settings.data.kind} continue those of the batch before, "
            f"whose state replicas of an array do not share; sweep without --replicas"
        )
    return FusedArray(entries, team, verdict=verdict) if fused else UnfusedArray(entries, team)


def make_entry(
    settings: TrainSettings, state: Checkpoint | None, device: torch.device, sets: DataSets
) -> TrialInit:
    """A trial ready to join: from its checkpoint where it has one, else from its beginning."""
    parts = components.build(settings, device, sets.of(settings))
    if state is None:
        return TrialInit(settings, parts)
    checkpoints.load_model_state(parts.model, state.model)
    named_state.load_optimizer_state(parts.optimizer, parts.names, state.optimizer)
    parts.scaler.load_state_dict(dict(state.progress["loss_scale"]))
    return TrialInit(settings, parts, state.progress.get("age", 0), state)


def position_of(state: Checkpoint | None) -> Position:
    """How far a trial is in its data."""
    return Position() if state is None else Position(**state.progress["position"])


class LeaderArray:
    """A team's array as its leader has it."""

    def __init__(
        self,
        team: WorkerGroup,
        entries: Sequence[TrialInit],
        fused: bool,
        verdict: Verdict | None = None,
        stages: StagesOfTrials | None = None,
    ) -> None:
        self._team = team
        verdict = verdict or Verdict()
        layers = () if stages is None else stages.checked.fine
        team.tell(commands.BeginCommand(_newcomers(entries), fused, verdict, layers), 0)
        self._array = make_array(entries, fused, team, verdict, stages)

    @property
    def trials(self) -> int:
        return self._array.trials

    @property
    def is_fused(self) -> bool:
        return self._array.is_fused

    def check_entering(self, entering: Sequence[TrialInit]) -> None:
        """Refuse, before the followers hear of them, trials that cannot join those that are there."""
        self._array.check_entering(entering)

    def change(self, leaving: Sequence[int], entering: Sequence[TrialInit]) -> None:
        """Let trials leave and enter, on all workers of the team."""
        self._tell(commands.ChangeCommand(tuple(leaving), _newcomers(entering)))
        self._array.change(leaving, entering)

    def step(self, batches: Sequence[Batch], factors: Sequence[float]) -> Tensor:
        """One step of every trial, `batches` being this worker's shares; the losses of whole batches."""
        self._tell(commands.StepCommand(tuple(factors)))
        return self._array.step(batches, factors)

    def evaluate(self, places: Sequence[int]) -> list[dict[str, float]]:
        """Mean loss and metric over the test split, of which each worker of the team takes its share."""
        self._tell(commands.EvaluateCommand(tuple(places)))
        return self._array.evaluate(places)

    def noise(self, place: int) -> GradientAverages | None:
        """What this worker's share tells of the noise of a trial's gradients."""
        return self._array.noise(place)

    def tensors(self, place: int) -> TrialTensors:
        self._tell(commands.CollectCommand(place))
        return self._array.tensors(place)

    def close(self) -> None:
        """Let the team let go of the trials."""
        self._tell(commands.DissolveCommand())
        self._array.close()

    def _tell(self, order: commands.Order) -> None:
        self._team.tell(order, self.trials)


def _newcomers(entries: Sequence[TrialInit]) -> tuple[commands.Newcomer, ...]:
    return tuple(commands.Newcomer(entry.settings, entry.state) for entry in entries)


class ArrayFollower:
    """A worker that holds what its leader holds, and does what that says."""

    def __init__(self, team: WorkerGroup, sets: DataSets, device: torch.device) -> None:
        self._team = team
        self._sets = sets
        self._device = device
        self._array: SharedArray | None = None
        self._feeds: BatchStreams | None = None
        self._used: list[BatchStream] = []

    def run(self) -> None:
        """Follow until the leader says that there is nothing left."""
        while not isinstance(order := self._hear(), commands.EndCommand):
            if isinstance(order, commands.BeginCommand):
                self._begin(order)
            else:
                assert self._array is not None
                self._carry_out(order, self._array)

    def _hear(self) -> commands.Order:
        return self._team.hear(0 if self._array is None else self._array.trials)

    def _begin(self, order: commands.BeginCommand) -> None:
        train_set, _ = self._sets.of(order.entering[0].settings)
        pin = self._device.type == "cuda"
        self._feeds = BatchStreams(train_set, pin, *self._team.share, loads=self._team.loads)
        entries = self._enter([], order.entering)
        stages = None
        if order.stages and self._team.pipeline is not None:
            planned = replace(self._team.pipeline.arrangement, stages=order.stages)
            from plait.sweeping.engines.verified_stages import prepare_trials

            stages = prepare_trials(entries, planned, verify=False)
        self._array = make_array(entries, order.fused, self._team, order.verdict, stages)

    def _carry_out(self, order: commands.Order, array: SharedArray) -> None:
        match order:
            case commands.StepCommand():
                array.step(next_batches(self._used), order.factors)
            case commands.ChangeCommand():
                array.change(order.leaving, self._enter(order.leaving, order.entering))
            case commands.EvaluateCommand():
                array.evaluate(order.places)
            case commands.CollectCommand():
                array.collect(order.place)
            case commands.DissolveCommand():
                array.close()
                self._array, self._used = None, []

    def _enter(self, leaving: Sequence[int], entering: Sequence[commands.Newcomer]) -> list[TrialInit]:
        assert self._feeds is not None
        known, joining = list(self._used), []
        for one in entering:
            joining.append(self._feeds.find(one.settings, position_of(one.state), known))
            known.append(joining[-1])
        self._used = reseated(self._used, leaving, joining)
        return [make_entry(one.settings, one.state, self._device, self._sets) for one in entering]
