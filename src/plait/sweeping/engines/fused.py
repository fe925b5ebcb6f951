"""An array: trials of one shape on one device, fused, that take their steps together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from plait.adapt.monitors.gradient_noise import GradientAverages
from plait.data.calling import evaluation_mode, forward
from plait.data.loader import Batch, to_device
from plait.data.sampler import mix
from plait.fusion import (
    FusedModule,
    FusedOptimizer,
    LossScales,
    Shared,
    add_trials,
    fuse,
    fuse_optimizers,
    keep_trials,
    replace_trial,
)
from plait.fusion.optim.lone import load_trial, lone_optimizer
from plait.fusion.trials.membership import check_joining
from plait.fusion.trials.padding import pad
from plait.fusion.trials.per_trial import PerTrial, on_device
from plait.fusion.verify import Verdict
from plait.pipeline import named_state
from plait.schema.settings import TrainSettings
from plait.sweeping.engines.cuda_graph import StepGraph
from plait.sweeping.engines.microbatches import Piece, Round, most_rounds, rounds_of
from plait.sweeping.engines.trial_norms import TrialNorms
from plait.sweeping.worker_group import ALONE, GroupSum, WorkerGroup
from plait.training import components
from plait.training.components import Components
from plait.training.evaluate import evaluation_batches, means, sums_of, sums_over_share
from plait.training.monitoring.asked import wants_norms
from plait.workloads.losses import KINDS as LOSSES
from plait.workloads.losses import build_loss


@dataclass(frozen=True)
class TrialInit:
    """A trial that joins an array: its parts as for a run of its own, and the forwards behind it."""

    settings: TrainSettings
    parts: Components
    age: int = 0


@dataclass(frozen=True)
class TrialTensors:
    """A trial's state as its checkpoint holds it."""

    model: named_state.Tensors
    optimizer: named_state.Tensors
    loss_scale: Mapping[str, Any]
    age: int


class Array(Protocol):
    """Trials that train together; places number them from 0, and those that stay keep their order."""

    @property
    def trials(self) -> int: ...

    @property
    def is_fused(self) -> bool: ...

    def change(self, leaving: Sequence[int], entering: Sequence[TrialInit]) -> None:
        """Let trials leave and enter: newcomers take the leavers' places, then new ones at the end."""

    def check_entering(self, entering: Sequence[TrialInit]) -> None:
        """Refuse, before anything changes, trials that cannot join those that are there."""

    def step(self, batches: Sequence[Batch], factors: Sequence[float]) -> Tensor:
        """One step of every trial on its batch, with its factor on the learning rate; their losses."""

    def evaluate(self, places: Sequence[int]) -> list[dict[str, float]]: ...

    def tensors(self, place: int) -> TrialTensors:
        """The state of a trial, on the first worker of a group; all of them call it."""

    def noise(self, place: int) -> GradientAverages | None:
        """What is known of the noise of a trial's gradients; None where it is not measured."""

    def close(self) -> None:
        """Let go of the trials; nothing is called after it."""


class FusedArray:
    """Trials fused into one module and one optimizer.

    The `workers` of a group hold the same trials: each works on its share of the batches, and they sum
    their gradients. Batch norms take the statistics of a share, as data-parallel training does; the mean of
    all workers' running statistics is evaluated and saved.
    """

    is_fused = True

    def __init__(
        self,
        entries: Sequence[TrialInit],
        workers: WorkerGroup = ALONE,
        stream: int | None = None,
        verdict: Verdict | None = None,
    ) -> None:
        first = entries[0]
        self._workers = workers
        self._verdict = verdict or Verdict()
        # Which of the trials' random streams is drawn from: workers of a worker group have their own.
        self._stream = stream or workers.place
        self._entries = [_without_state(entry) for entry in entries]
        self._device = first.parts.device
        models = [entry.parts.model for entry in entries]
        ages = [entry.age for entry in entries]
        # Compared with the trials alone by whoever makes arrays, where that was asked for.
        self.fused = fuse(models, self._seeds(entries), ages, self._verdict.unfused, verify=False)
        if self._device.type == "cuda" and workers.is_alone:  # summed gradients are contiguous
            self.fused.channels_last()
        clips = [_clip(entry) for entry in entries]
        optimizers = [entry.parts.optimizer for entry in entries]
        # Always with a vector, as trials that come later may clip; what nobody clips costs one pass.
        self.optimizer: FusedOptimizer = fuse_optimizers(self.fused, optimizers, models, clip_norm=clips)
        self._notice_clips()
        self._is_scaled = first.settings.precision == "fp16"
        self._scales = LossScales(len(entries), self._device)
        for place, entry in enumerate(entries):
            self._load_scale(place, entry)
        self._loss = self._build_loss()
        self._graph = self._new_graph()
        self._sum = self._new_sum()
        # Whether a step may have made the running statistics of the workers of a group differ.
        self._differs = False
        monitored = any(wants_norms(entry.settings) for entry in entries)
        self._norms = TrialNorms(len(entries)) if monitored else None

    def _new_graph(self) -> StepGraph | None:
        """On a GPU, what replays steps; anew whenever the trials change, whose numbers a graph holds."""
        if self._device.type != "cuda" or not self._workers.is_alone:
            return None
        if self.fused.unfused or self._verdict.has_python_state or self._verdict.loss_alone:
            return None  # a graph would repeat what Python did when it was captured
        return StepGraph(self._whole_step, self.optimizer.zero_grad)

    def _new_sum(self) -> GroupSum | None:
        if self._workers.is_alone:
            return None
        return GroupSum(
            self._workers, self.optimizer.parameters, self.trials, partial=bool(self.fused.unfused)
        )

    def close(self) -> None:
        """End the sums of a worker group."""
        if self._sum is not None:
            self._sum.close()
        self._sum = None

    @property
    def unfused(self) -> dict[str, str]:
        """The modules that run trial by trial, "" being the whole model, and why."""
        return self.fused.unfused

    @property
    def has_python_state(self) -> bool:
        """Whether modules were seen to keep numbers in Python."""
        return self._verdict.has_python_state

    @property
    def trials(self) -> int:
        return self.fused.trials

    def check_entering(self, entering: Sequence[TrialInit]) -> None:
        """Refuse, before anything changes, trials that cannot join those that are there."""
        check_joining(self.fused, [entry.parts.model for entry in entering])

    def change(self, leaving: Sequence[int], entering: Sequence[TrialInit]) -> None:
        """Let trials leave and enter: newcomers take the leavers' places, then new ones at the end."""
        if len(leaving) != len(entering):
            # What sums gradients may hold autograd to the shapes there are now.
            self.close()
        pairs = min(len(leaving), len(entering))
        # A vector for all, also where nobody clipped before.
        self.optimizer.clip_norm = self._clip_vector()
        for place, entry in zip(leaving, entering):
            replace_trial(self.fused, self.optimizer, place, entry.parts.model, 0)
            self._entries[place] = entry
        stay = [place for place in range(self.trials) if place not in leaving[pairs:]]
        if len(stay) < self.trials:
            keep_trials(self.fused, self.optimizer, stay)
            self._reorder(stay)
        for entry in entering[pairs:]:
            add_trials(self.fused, self.optimizer, [entry.parts.model], [0])
            self._reorder([*range(len(self._entries)), 0])
            self._entries[-1] = entry
        for place, entry in enumerate(self._entries):
            if any(entry is one for one in entering):
                self._load_entry(place, entry)
        self.optimizer.clip_norm = self._clip_vector()
        self._notice_clips()
        self._loss = self._build_loss()
        self._graph = self._new_graph()
        self._sum = self._sum or self._new_sum()

    def _reorder(self, places: Sequence[int]) -> None:
        self._entries = [self._entries[place] for place in places]
        index = torch.tensor(list(places), device=self._device)
        self._scales.scales = self._scales.scales[index]
        self._scales.good_steps = self._scales.good_steps[index]
        if self._norms is not None:
            self._norms.reorder(places)

    def _load_entry(self, place: int, entry: TrialInit) -> None:
        """The hyperparameters and the state that a newcomer brings beside its weights."""
        load_trial(self.optimizer, entry.parts.optimizer, place, entry.parts.model)
        self.fused.seeds[place], self.fused.ages[place] = self._seeds([entry])[0], entry.age
        self._load_scale(place, entry)
        self._entries[place] = _without_state(entry)
        if self._norms is not None:
            self._norms.begin(place)

    def _seeds(self, entries: Sequence[TrialInit]) -> list[int]:
        """Where the trials' random numbers start."""
        own = (self._stream,) if self._stream else ()
        return [mix(entry.settings.seed, *own) for entry in entries]

    def _load_scale(self, place: int, entry: TrialInit) -> None:
        if state := entry.parts.scaler.state_dict():
            self._scales.scales[place] = state["scale"]
            self._scales.good_steps[place] = state["_growth_tracker"]

    def _clip_vector(self) -> Tensor:
        clips = [_clip(entry) for entry in self._entries]
        return torch.tensor(clips, dtype=torch.float64, device=self._device)

    def _notice_clips(self) -> None:
        if all(_clip(entry) == float("inf") for entry in self._entries):
            self.optimizer.clip_norm = None

    def _build_loss(self) -> Callable[..., Tensor]:
        return fused_loss([entry.settings for entry in self._entries])

    def step(self, batches: Sequence[Batch], factors: Sequence[float]) -> Tensor:
        """One step of every trial on its batch, with its factor on the learning rate; their losses."""
        self.set_factors(factors)
        accumulate = self._entries[0].settings.accumulate
        rounds = rounds_of(batches, accumulate)
        if self._sum is not None:
            # Equal on all workers, whose shares may have been cut into fewer pieces.
            ages = self.fused.ages + self._vector(most_rounds(batches, accumulate, self._workers.size)).long()
            losses = self._group_step(self._sum, rounds, batches)
            self.fused.ages.copy_(ages)
            return losses
        if len(rounds) == 1 and len({batch.count for batch in batches}) == 1:
            content = self._together([piece for piece, _ in rounds[0][0]], batches[0].count)
            return self._whole_step(content) if self._graph is None else self._graph(content)
        self.optimizer.zero_grad()
        total = self._vector([0.0] * self.trials)
        for number, (pieces, weights) in enumerate(rounds):
            total += self._backward(pieces, weights)
            self._measure_part(number, len(rounds), weights)
        self._measure_whole(batches)
        self._update()
        return total

    def _measure_part(self, number: int, rounds: int, weights: Sequence[float]) -> None:
        if self._norms is not None and number < rounds - 1:
            self._norms.after_microbatch(self.optimizer.parameters, weights)

    def _measure_whole(self, batches: Sequence[Batch]) -> None:
        if self._norms is not None:
            scales = self._scales.scales if self._is_scaled else torch.ones(self.trials)
            totals = [batch.total for batch in batches]
            self._norms.before_update(self.optimizer.parameters, totals, scales)

    def noise(self, place: int) -> GradientAverages | None:
        """What is known of the noise of a trial's gradients, where the job asks for it."""
        return None if self._norms is None else self._norms.averages[place]

    def _group_step(self, sum_: GroupSum, rounds: Sequence[Round], batches: Sequence[Batch]) -> Tensor:
        """A step on this worker's share, by the gradients of all shares."""
        sum_.begin()
        total = self._vector([0.0] * self.trials)
        for number, (pieces, weights) in enumerate(rounds):
            sum_.before_backward(last=number == len(rounds) - 1)
            total += self._backward(pieces, weights)
            self._measure_part(number, len(rounds), weights)
        total = sum_.agree(total)
        self._measure_whole(batches)
        self._update()
        self._differs = True
        return total

    def _vector(self, numbers: Sequence[float]) -> Tensor:
        return on_device(tuple(numbers), torch.float64, self._device).clone()

    def _whole_step(self, content: Any) -> Tensor:
        """A step of all trials on whole batches of one size."""
        self.optimizer.zero_grad()
        inputs, target = content
        with self._entries[0].parts.autocast():
            losses = self.losses(forward(self.fused, inputs), target)
        self._scaled(losses).sum().backward()
        self._update()
        return losses.detach().to(torch.float64)

    def _scaled(self, losses: Tensor) -> Tensor:
        return self._scales.scale(losses) if self._is_scaled else losses

    def _update(self) -> None:
        if self._is_scaled:
            self._scales.step(self.optimizer)
        else:
            self.optimizer.step()

    def set_factors(self, factors: Sequence[float]) -> None:
        """The factors on the trials' learning rates, for the steps to come."""
        for number, group in enumerate(self.optimizer.groups):
            rates = [e.parts.base_lrs[number] * factor for e, factor in zip(self._entries, factors)]
            if rates != group.numbers["lr"]:
                group["lr"] = rates

    def _backward(self, pieces: Sequence[Piece], weights: list[float]) -> Tensor:
        counts = [count for _, count in pieces]
        without = [place for place, weight in enumerate(weights) if weight == 0.0]
        padding = self.fused.padded(counts) if len(set(counts)) > 1 else nullcontext()
        inputs, target = self._together([content for content, _ in pieces], max(counts))
        if without:
            self.fused.freeze(without)
        with padding, self._entries[0].parts.autocast():
            output = forward(self.fused, inputs)
            losses = self.losses(output, target, counts)
        if without:
            self.fused.freeze([])
        weighted = losses * on_device(tuple(weights), losses.dtype, self._device)
        self._scaled(weighted).sum().backward()
        return weighted.detach()

    def losses(self, output: Any, target: Any, counts: Sequence[int] = ()) -> Tensor:
        """The loss of each trial's own rows, `counts` of them, of a microbatch; all rows without counts."""
        if self._verdict.loss_alone:
            return losses_alone(self._entries, output, target, counts)
        return losses_of(self.fused, self._entries, self._loss, output, target, counts)

    def _together(self, contents: Sequence[Any], length: int) -> Any:
        """Inputs and target of all trials: the same for all, or stacked and padded."""
        return together(self._entries[0].parts, contents, length)

    def stacked(self, contents: Sequence[Any], length: int) -> Any:
        """What each trial gets, stacked, padded to `length` rows and on the device."""
        return stacked(self._entries[0].parts, contents, length)

    def evaluate(self, places: Sequence[int]) -> list[dict[str, float]]:
        """Mean loss and metric of the trials at `places` over the test split."""
        self.average()
        sizes = {_evaluation_size(self._entries[place].settings) for place in places}
        # A forward of all costs more than those of a few who are due.
        if 2 * len(places) <= self.trials or len(sizes) > 1:
            sums = torch.stack([self._sums_alone(place) for place in places])
        else:
            sums = self._sums_together(places, sizes.pop())
        total = self._workers.total(sums, self._device)
        return [means(self._entries[place].parts, row) for place, row in zip(places, total)]

    def _sums_together(self, places: Sequence[int], size: int) -> Tensor:
        """The sums of the trials at `places` over this worker's share of the test split."""
        sums = torch.zeros(len(places), 4, dtype=torch.float64)
        first = self._entries[places[0]]
        parts, settings = first.parts, first.settings
        with torch.no_grad(), evaluation_mode(self.fused):
            for batch in evaluation_batches(parts, settings, size, *self._workers.share):
                if not batch.count:
                    continue
                inputs, target = to_device(batch.content, parts.device, parts.dtype)
                with parts.autocast():
                    output = forward(self.fused, pytree.tree_map_only(Tensor, Shared, inputs))
                for row, place in enumerate(places):
                    sums[row] += sums_of(self._entries[place].parts, at(output, place), target, batch.count)
        return sums

    def _sums_alone(self, place: int) -> Tensor:
        entry = self._entries[place]
        parts = replace(entry.parts, model=self.fused.trial(place))
        return sums_over_share(parts, entry.settings, *self._workers.share)

    def parts_of(self, place: int) -> Components:
        """What the trial at `place` is evaluated with."""
        return self._entries[place].parts

    def settings_of(self, place: int) -> TrainSettings:
        return self._entries[place].settings

    def average(self) -> None:
        """Give all workers of the group the mean of their running statistics, where they may differ."""
        if self._differs:
            self._workers.average(self.fused.module)
            self._differs = False

    def tensors(self, place: int) -> TrialTensors:
        self.average()
        model = self.fused.trial(place)
        optimizer = lone_optimizer(self.optimizer, model, place)
        names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        return TrialTensors(
            named_state.model_state(model),
            named_state.optimizer_state(optimizer, names),
            self.loss_scale(place),
            int(self.fused.ages[place]),
        )

    def loss_scale(self, place: int) -> dict[str, Any]:
        """The state of the scaler that the trial at `place` would have alone; empty where none is in use."""
        state: dict[str, Any] = self._entries[place].parts.scaler.state_dict()
        if state:
            state["scale"] = self._scales.scales[place].item()
            state["_growth_tracker"] = int(self._scales.good_steps[place])
        return state


def rebuild_trial(array: FusedArray, place: int) -> TrialInit:
    """The trial at `place` by itself, as it is now, beside the array, which stays as it is.

    Its model is made by its factory and has the trial's weights and buffers; its optimizer is torch's own,
    with the trial's state. `UnfusedArray([...]).step` takes a plain step with it. What models keep in Python
    is as in a new one (`Verdict.has_python_state` says whether they keep any). Random numbers are torch's;
    within `drawing_as(model, seed, age, unfused)`, of the fused module's, they are those that the trial draws
    next.
    """
    settings, known = array.settings_of(place), array.parts_of(place)
    parts = components.build(settings, known.device, (known.train_set, known.test_set))
    trial = array.fused.trial(place)
    own = {**dict(trial.named_parameters()), **dict(trial.named_buffers())}
    with torch.no_grad():
        for name, tensor in (*parts.model.named_parameters(), *parts.model.named_buffers()):
            tensor.data = own[name].detach().clone()
    names: dict[Tensor, str] = {parameter: name for name, parameter in trial.named_parameters()}
    state = named_state.optimizer_state(lone_optimizer(array.optimizer, trial, place), names)
    named_state.load_optimizer_state(parts.optimizer, parts.names, state)
    parts.scaler.load_state_dict(array.loss_scale(place))
    return TrialInit(settings, parts, int(array.fused.ages[place]))


def together(parts: Components, contents: Sequence[Any], length: int) -> Any:
    """Inputs and target of all trials: the same for all, or stacked and padded."""
    if all(content is contents[0] for content in contents):
        return pytree.tree_map_only(Tensor, Shared, to_device(contents[0], parts.device, parts.dtype))
    return stacked(parts, contents, length)


def stacked(parts: Components, contents: Sequence[Any], length: int) -> Any:
    """What each trial gets, stacked, padded to `length` rows and on the device."""
    moved = {id(content): to_device(content, parts.device, parts.dtype) for content in contents}
    flat, specs = zip(*(pytree.tree_flatten(moved[id(content)]) for content in contents))
    leaves = [pad(leaf, length) if isinstance(leaf[0], Tensor) else leaf[0] for leaf in zip(*flat)]
    return pytree.tree_unflatten(leaves, specs[0])


def fused_loss(settings: Sequence[TrainSettings]) -> Callable[..., Tensor]:
    """The loss with each trial's own numbers among its options."""
    options = dict(settings[0].loss_args)
    for name, value in options.items():
        if any(one.loss_args[name] != value for one in settings):
            options[name] = PerTrial([float(one.loss_args[name]) for one in settings])
    return build_loss(settings[0].loss, options)


def losses_of(
    fused: FusedModule,
    entries: Sequence[TrialInit],
    loss: Callable[..., Tensor],
    output: Any,
    target: Any,
    counts: Sequence[int],
) -> Tensor:
    """The loss of each trial's own rows, computed together where that can be."""
    if entries[0].settings.loss in LOSSES or len(set(counts)) <= 1:
        found: Tensor = fused.map(loss, output, target)
        return found
    # A user's own loss may mix the rows of a batch in any way, so it gets a trial's own rows alone.
    return losses_alone(entries, output, target, counts)


def losses_alone(entries: Sequence[TrialInit], output: Any, target: Any, counts: Sequence[int]) -> Tensor:
    """The loss of each trial's own rows, trial by trial."""

    def own(value: Any, place: int) -> Any:
        if isinstance(value, Shared):
            return value.tensor
        if not isinstance(value, Tensor):
            return value.of(place) if isinstance(value, PerTrial) else value
        return value[place][: counts[place]] if counts and value[place].dim() else value[place]

    return torch.stack(
        [
            entry.parts.loss(*pytree.tree_map(lambda x, p=place: own(x, p), (output, target)))
            for place, entry in enumerate(entries)
        ]
    )


def at(output: Any, place: int) -> Any:
    """One trial's part of what all trials returned."""
    return pytree.tree_map(lambda x: x[place] if isinstance(x, Tensor) else x, output)


def _without_state(entry: TrialInit) -> TrialInit:
    """`entry` without the weights that the array now holds."""
    empty = nn.Parameter(torch.zeros(0))
    parts = replace(entry.parts, model=nn.Module(), names={}, optimizer=torch.optim.SGD([empty]))
    return replace(entry, parts=parts)


def _clip(entry: TrialInit) -> float:
    return float("inf") if entry.settings.clip_norm is None else entry.settings.clip_norm


def _evaluation_size(settings: TrainSettings) -> int:
    return settings.evaluate.batch_size or settings.data.batch_size
