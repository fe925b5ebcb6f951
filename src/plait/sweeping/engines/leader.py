"""An array that a worker group trains: the leader's side, which passes every call on to its followers."""

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
from plait.sweeping.engines.batch_streams import BatchStream, BatchStreams, next_batches, with_replacements
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
    workers: WorkerGroup | None,
    verdict: Verdict | None = None,
    stages: StagesOfTrials | None = None,
) -> SharedArray:
    """An array of the entries, held by this worker, by each of a worker group, or by all of them in stages.

    `verdict` says how trials can be fused rightly, `stages` how they are cut where that is known.
    """
    if workers is not None and workers.pipeline is not None:
        # Slow to import, with all that tracing needs.
        from plait.sweeping.engines.pipelined import PipelinedArray

        return PipelinedArray(entries, workers, workers.pipeline, stages, verdict)
    if workers is not None and streams_of(entries[0].parts.train_set.dataset) is not None:
        raise JobError(
            f"--replicas: the samples of {entries[0].settings.data.kind} continue those of the batch before, "
            f"whose state replicas of an array do not share; sweep without --replicas"
        )
    return FusedArray(entries, workers, verdict=verdict) if fused else UnfusedArray(entries, workers)


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
    """A worker group's array as its leader has it."""

    def __init__(
        self,
        workers: WorkerGroup,
        entries: Sequence[TrialInit],
        fused: bool,
        verdict: Verdict | None = None,
        stages: StagesOfTrials | None = None,
    ) -> None:
        self._workers = workers
        verdict = verdict or Verdict()
        layers = () if stages is None else stages.checked.fine
        workers.send_command(commands.BeginCommand(_newcomers(entries), fused, verdict, layers), 0)
        self._array = make_array(entries, fused, workers, verdict, stages)

    @property
    def trials(self) -> int:
        return self._array.trials

    @property
    def is_fused(self) -> bool:
        return self._array.is_fused

    def check_entering(self, entering: Sequence[TrialInit]) -> None:
        """Refuse trials that cannot join those that are there, before the followers receive them."""
        self._array.check_entering(entering)

    def change(self, leaving: Sequence[int], entering: Sequence[TrialInit]) -> None:
        """Let trials leave and enter, on all workers of the group."""
        self._send_command(commands.ChangeCommand(tuple(leaving), _newcomers(entering)))
        self._array.change(leaving, entering)

    def step(self, batches: Sequence[Batch], factors: Sequence[float]) -> Tensor:
        """One step of every trial, `batches` being this worker's shares; the losses of whole batches."""
        self._send_command(commands.StepCommand(tuple(factors)))
        return self._array.step(batches, factors)

    def evaluate(self, places: Sequence[int]) -> list[dict[str, float]]:
        """Mean loss and metric over the test split, of which each worker of the group takes its share."""
        self._send_command(commands.EvaluateCommand(tuple(places)))
        return self._array.evaluate(places)

    def noise(self, place: int) -> GradientAverages | None:
        """The noise of a trial's gradients, estimated from this worker's share."""
        return self._array.noise(place)

    def tensors(self, place: int) -> TrialTensors:
        self._send_command(commands.CollectCommand(place))
        return self._array.tensors(place)

    def close(self) -> None:
        """Release the trials on all workers of the group."""
        self._send_command(commands.DissolveCommand())
        self._array.close()

    def _send_command(self, command: commands.Command) -> None:
        self._workers.send_command(command, self.trials)


def _newcomers(entries: Sequence[TrialInit]) -> tuple[commands.Newcomer, ...]:
    return tuple(commands.Newcomer(entry.settings, entry.state) for entry in entries)


class ArrayFollower:
    """A worker that holds what its leader holds and carries out its commands."""

    def __init__(self, workers: WorkerGroup, sets: DataSets, device: torch.device) -> None:
        self._workers = workers
        self._sets = sets
        self._device = device
        self._array: SharedArray | None = None
        self._streams: BatchStreams | None = None
        self._used: list[BatchStream] = []

    def run(self) -> None:
        """Carry out commands until the leader ends the group."""
        while not isinstance(command := self._receive_command(), commands.EndCommand):
            if isinstance(command, commands.BeginCommand):
                self._begin(command)
            else:
                assert self._array is not None
                self._carry_out(command, self._array)

    def _receive_command(self) -> commands.Command:
        return self._workers.receive_command(0 if self._array is None else self._array.trials)

    def _begin(self, command: commands.BeginCommand) -> None:
        train_set, _ = self._sets.of(command.entering[0].settings)
        pin = self._device.type == "cuda"
        self._streams = BatchStreams(train_set, pin, *self._workers.share, loads=self._workers.loads)
        entries = self._enter([], command.entering)
        stages = None
        if command.stages and self._workers.pipeline is not None:
            planned = replace(self._workers.pipeline.layout, stages=command.stages)
            from plait.sweeping.engines.verified_stages import prepare_trials

            stages = prepare_trials(entries, planned, verify=False)
        self._array = make_array(entries, command.fused, self._workers, command.verdict, stages)

    def _carry_out(self, command: commands.Command, array: SharedArray) -> None:
        match command:
            case commands.StepCommand():
                array.step(next_batches(self._used), command.factors)
            case commands.ChangeCommand():
                array.change(command.leaving, self._enter(command.leaving, command.entering))
            case commands.EvaluateCommand():
                array.evaluate(command.places)
            case commands.CollectCommand():
                array.collect(command.place)
            case commands.DissolveCommand():
                array.close()
                self._array, self._used = None, []

    def _enter(self, leaving: Sequence[int], entering: Sequence[commands.Newcomer]) -> list[TrialInit]:
        assert self._streams is not None
        known, joining = list(self._used), []
        for one in entering:
            joining.append(self._streams.find(one.settings, position_of(one.state), known))
            known.append(joining[-1])
        self._used = with_replacements(self._used, leaving, joining)
        return [make_entry(one.settings, one.state, self._device, self._sets) for one in entering]
