"""The events of a training run; docs/events.md describes each field."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from plait.core.events import Event


class RunStarted(Event):
    """A run, or a resumed part of one, begins; `step` steps were done before.

    `samples` and `steps` are None for a stream of unknown length.
    """

    name: str
    model: str
    parameters: int
    workers: int
    device: str
    precision: str
    samples: int | None
    batch_size: int
    steps: int | None
    step: int
    seed: int
    torch: str


class Verified(Event):
    """The stages compute what the plain model computes; `notes` lists the changes that this needed."""

    seconds: float
    notes: tuple[str, ...]


class Audited(Event):
    """Step `step` was repeated in plain PyTorch, which took `seconds`, and compared.

    `largest` is the largest relative difference of this and all earlier audits; `differences` are messages
    about those beyond rounding. In a sweep `trial` is the trial whose step was repeated alone.
    """

    step: int
    seconds: float
    largest: float
    differences: tuple[str, ...]
    trial: int | None = None


class Step(Event):
    """The steps since the previous event: the last one's number, their mean loss, samples and seconds."""

    step: int
    epoch: int
    loss: float | None
    lr: float
    samples: int
    seconds: float


class Evaluated(Event):
    """The model after `step` steps on the test split."""

    step: int
    metrics: Mapping[str, float | None]
    samples: int
    seconds: float


class CheckpointSaved(Event):
    """A checkpoint of the state after `step` steps was written to the run folder."""

    step: int
    seconds: float
    best: bool


class CheckpointRefused(Event):
    """A checkpoint could not be used on resume, and why."""

    path: str
    reason: str


class RunEnded(Event):
    """The run ended: `reason` is finished, stopped, early-stop or diverged.

    `memory_bytes` is the most that the worker which wrote this held, of its GPU if it has one.
    """

    step: int
    reason: str
    seconds: float
    samples_per_s: float
    memory_bytes: int = 0


class Operations(Event):
    """The operations of a worker of a pipeline up to `step`, with one entry in each field per operation.

    `letters` has one letter each: F forward, B backward, I and W the halves of a split backward, U update
    (whose `microbatches` entry is the version it wrote). Times are seconds since the epoch on the first
    worker's clock, without waiting for the input or for the output to be sent.
    """

    step: int
    letters: str
    stages: tuple[int, ...]
    microbatches: tuple[int, ...]
    starts: tuple[float, ...]
    ends: tuple[float, ...]


class Messages(Event):
    """The messages of a worker of a pipeline up to `step`, with one entry in each field per message.

    `letters` are those of the operations that sent or received them, `ways` is s for sent or r for received;
    `stages` and `microbatches` are the operations' and `peers` workers. A message is sent from when the
    operation hands it over to when it has left this worker, and received from when the operation asks for it
    to when it is there. Times are as in `operations`.
    """

    step: int
    letters: str
    ways: str
    stages: tuple[int, ...]
    microbatches: tuple[int, ...]
    peers: tuple[int, ...]
    peer_stages: tuple[int, ...]
    bytes: tuple[int, ...]
    starts: tuple[float, ...]
    ends: tuple[float, ...]


class SweepStarted(Event):
    """A sweep, or a resumed part of one, begins; `ended` trials were done before."""

    name: str
    model: str
    search: str
    over: tuple[str, ...]
    trials: int
    ended: int
    metric: str
    workers: int
    torch: str
    replicas: int = 1


class TrialDrawn(Event):
    """A trial and its values; trials of the same `group` can share an array."""

    trial: int
    values: Mapping[str, Any]
    steps: int
    group: str


class TrialStep(Event):
    """A trial's mean loss over the steps since its previous event."""

    trial: int
    step: int
    loss: float | None


class TrialEvaluated(Event):
    """A trial after `step` steps on the test split."""

    trial: int
    step: int
    metrics: Mapping[str, float | None]


class TrialSaved(Event):
    """The checkpoint of a trial after `step` steps was written to its folder, in place of an earlier one."""

    trial: int
    step: int


class TrialReached(Event):
    """A trial reached a step at which trials are compared; a smaller `result` is better, None is worst.

    `judged` counts the results at this step up to this one and those reported with it; 0 if unknown.
    """

    trial: int
    step: int
    result: float | None
    metrics: Mapping[str, float | None]
    train_loss: float | None
    judged: int = 0


class TrialCopied(Event):
    """A trial copied another's weights and changed values."""

    trial: int
    source: int
    step: int
    values: Mapping[str, Any]


class TrialGoals(Event):
    """The steps of a trial's goals ahead, counted again for its batch size; the last is its end."""

    trial: int
    goals: tuple[int, ...]


class TrialEnded(Event):
    """A trial ended: `state` is finished, early-stop, dropped, diverged or failed; `why` it failed."""

    trial: int
    step: int
    state: str
    metrics: Mapping[str, float | None]
    train_loss: float | None
    why: str = ""


class ArrayChanged(Event):
    """The trials that a worker trains together from now on; `why` says why they, or more, are not fused.

    A single trial is not fused.
    """

    worker: int
    trials: tuple[int, ...]
    fused: bool
    why: str = ""


class ArrayVerified(Event):
    """A worker compared fused trials with the same trials alone.

    `unfused` are the modules that run trial by trial, "" being the whole model, and why; `refused` says why
    the trials are not fused at all.
    """

    worker: int
    trials: int
    seconds: float
    unfused: Mapping[str, str]
    refused: str | None


class SweepEnded(Event):
    """The sweep ended: `reason` is finished or stopped; `best` is the best trial."""

    reason: str
    ended: int
    best: int | None
    seconds: float
    trial_steps_per_s: float


class Pace(Event):
    """The throughput of one worker of a run that averages weights, since its previous event."""

    step: int
    updates: int
    samples: int
    seconds: float
    samples_per_s: float
    wait_share: float
    groups: int
    group_size: float | None
    bytes_sent: int


class Settled(Event):
    """All live workers averaged their weights; `distance` is that of this worker's weights to the mean."""

    step: int
    members: tuple[int, ...]
    distance: float


class SyncChosen(Event):
    """`sync: auto` chose a sync, and why; a resumed run or sweep goes on with it."""

    is_urgent: ClassVar[bool] = True

    sync: str
    reason: str


def last_sync(record: Iterable[Event]) -> str | None:
    """The sync that was chosen last, according to the events of a run or sweep; None if none was."""
    chosen = [event.sync for event in record if isinstance(event, SyncChosen)]
    return chosen[-1] if chosen else None


class Changed(Event):
    """A running job was changed after `step` steps: the new values, who asked for it, and why.

    In a sweep `trial` is the trial that was changed.
    """

    is_urgent: ClassVar[bool] = True

    step: int
    kind_of_change: str
    change: dict[str, Any]
    by: str
    why: str
    trial: int | None = None


class LayersMoved(Event):
    """After `step` steps layers moved to other workers: the names of their tensors."""

    step: int
    names: tuple[str, ...]


class WorkersChanged(Event):
    """After `step` steps the membership changed to this `version`; `members` are worker numbers.

    `seconds` is how long training paused; `by` and `why` say who asked for it and why.
    """

    is_urgent: ClassVar[bool] = True

    step: int
    version: int
    members: tuple[int, ...]
    joined: tuple[int, ...]
    left: tuple[int, ...]
    lost: tuple[int, ...]
    seconds: float
    by: str
    why: str


class Signals(Event):
    """The signals of the monitors for one step, the same on all workers; the input of policies.

    `work_s` and `link_bytes_per_s` have a number for each worker, and are empty if the step was not timed.
    `planned_s` is the compute time of each worker in a step according to the pipeline's plan.
    """

    step: int
    loss: float | None
    batch_size: int
    lr_factor: float
    workers: int
    sync: str
    topology: str
    step_s: float | None = None
    samples_per_s: float | None = None
    work_s: tuple[float, ...] = ()
    planned_s: tuple[float, ...] = ()
    link_bytes_per_s: tuple[float, ...] = ()
    noise_scale: float | None = None
    variance: float | None = None
    squared_norm: float | None = None
    note: str | None = None


class TrialSignals(Event):
    """The signals of the monitors for a trial's gradients up to `step`."""

    trial: int
    step: int
    noise_scale: float | None
    variance: float | None
    squared_norm: float | None
    note: str | None
