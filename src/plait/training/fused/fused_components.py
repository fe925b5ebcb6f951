"""Components with a trials axis: trials of one shape, fused into one model and one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from plait.adapt.monitors.squared_norms import gradients
from plait.core.shown import shown
from plait.data.call_model import evaluated_weights, evaluation_mode, forward
from plait.data.loader import Batch, DataSource, to_device
from plait.data.seeding import mix
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
from plait.fusion.dispatch.padding import pad
from plait.fusion.dispatch.per_trial import PerTrial, on_device
from plait.fusion.errors import FusionError
from plait.fusion.join_leave import check_joining
from plait.fusion.optim.conversion import load_trial, trial_optimizer
from plait.fusion.verify import FusionReport
from plait.pipeline import named_state
from plait.schema.settings import OptimizerSettings, TrainSettings
from plait.sync.averaging.base import WhenSynchronized
from plait.sync.averaging.optimizer_state import OptimizerState
from plait.training.checkpoint import Checkpoint, EngineState
from plait.training.components import Components, TrialInit
from plait.training.components import build as build_components
from plait.training.evaluate import Totals, evaluation_batches, totals_of_share
from plait.training.fused.rounds import Round, TrialMicrobatch, most_rounds, rounds_of
from plait.training.fused.trial_counters import TrialCounters
from plait.training.fused.trial_norms import TrialNorms
from plait.training.monitoring.required_signals import wants_norms
from plait.workloads.losses import KINDS as LOSSES
from plait.workloads.losses import build_loss


class FusedComponents:
    """Trials fused into one model and one optimizer, with the interface of one trial's `Components`.

    Slots number the trials from 0. Each worker that trains the same trials draws from a separate random
    `stream`; where several do (`is_shared`), gradients are contiguous and no step is captured. The `verdict`
    of the verification says which modules run trial by trial.
    """

    # Only torch's optimizers are fused; and trials may weigh the same microbatch differently.
    is_optimizer_known = weights_losses = True

    def __init__(
        self,
        entries: Sequence[TrialInit],
        stream: int = 0,
        verdict: FusionReport | None = None,
        is_shared: bool = False,
    ) -> None:
        first = entries[0]
        self._is_shared = is_shared
        self.verdict = verdict or FusionReport()
        self._stream = stream
        self._entries = [_without_state(entry) for entry in entries]
        self.device = first.components.device
        models = [entry.components.model for entry in entries]
        ages = [entry.age for entry in entries]
        # Not verified here: the array builder compares arrays with single trials where the job asks for it.
        # Buffers have the trials axis, as workers may average them.
        self.fused = fuse(
            models, self._seeds(entries), ages, self.verdict.unfused, verify=False, share="parameters"
        )
        # However often and on how many workers it evaluates, and in stages.
        self.fused.draws_before = 0
        if self.device.type == "cuda" and not is_shared:
            self.fused.channels_last()
        clips = [_clip(entry) for entry in entries]
        optimizers = [entry.components.optimizer for entry in entries]
        # Always a vector, since trials that join later may clip; without clipping it costs one pass.
        self.optimizer: FusedOptimizer = fuse_optimizers(self.fused, optimizers, models, clip_norm=clips)
        self._drop_unused_clips()
        self.is_scaled = first.settings.precision == "fp16"
        self.scales = LossScales(len(entries), self.device)
        for slot, entry in enumerate(entries):
            self._load_scale(slot, entry)
        self._loss = self._build_loss()
        monitored = any(wants_norms(entry.settings) for entry in entries)
        self.norms = TrialNorms([entry.noise for entry in entries]) if monitored else None

    @property
    def trials(self) -> int:
        return self.fused.trials

    @property
    def model(self) -> nn.Module:
        return self.fused.module

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that are trained, each of all trials."""
        return self.optimizer.parameters

    @property
    def names(self) -> dict[Tensor, str]:
        """The names of the parameters, which are those of one trial."""
        return {parameter: name for name, parameter in self.model.named_parameters()}

    @property
    def has_partial_gradients(self) -> bool:
        """Whether only some trials may have a gradient, because modules run trial by trial."""
        return bool(self.fused.unfused)

    @property
    def can_be_captured(self) -> bool:
        """Whether a step can be captured in a CUDA graph: replays do not run Python code again."""
        verdict = self.verdict
        is_plain = not (self.fused.unfused or verdict.has_python_state or verdict.loss_alone)
        return is_plain and not self._is_shared

    @property
    def train_set(self) -> DataSource:
        """That of the first trial."""
        return self._entries[0].components.train_set

    def check_summed(self, settings: OptimizerSettings) -> None:
        """Nothing to check: optimizers that can be fused keep no gradients between steps."""

    def load(self, state: Checkpoint) -> None:
        """Load the tensors of a checkpoint into the first trial."""
        entry = rebuild_trial(self, 0)
        entry.components.load(state)
        self.change([0], [entry])

    def check_entering(self, entering: Sequence[TrialInit]) -> None:
        """Refuse trials that cannot join the present ones, before anything changes."""
        check_joining(self.fused, [entry.components.model for entry in entering])

    def change(self, leaving: Sequence[int], entering: Sequence[TrialInit]) -> FusedComponents:
        """Remove and add trials: those that enter take the slots of those that leave, then new slots."""
        pairs = min(len(leaving), len(entering))
        # A vector for all trials, even if none clipped before.
        self.optimizer.clip_norm = self._clip_vector()
        for slot, entry in zip(leaving, entering):
            replace_trial(self.fused, self.optimizer, slot, entry.components.model, 0)
            self._entries[slot] = entry
        stay = [slot for slot in range(self.trials) if slot not in leaving[pairs:]]
        if len(stay) < self.trials:
            keep_trials(self.fused, self.optimizer, stay)
            self._reorder(stay)
        for entry in entering[pairs:]:
            add_trials(self.fused, self.optimizer, [entry.components.model], [0])
            self._reorder([*range(len(self._entries)), 0])
            self._entries[-1] = entry
        for slot, entry in enumerate(self._entries):
            if any(entry is one for one in entering):
                self._load_entry(slot, entry)
        self.optimizer.clip_norm = self._clip_vector()
        self._drop_unused_clips()
        self._loss = self._build_loss()
        return self

    def _reorder(self, slots: Sequence[int]) -> None:
        self._entries = [self._entries[slot] for slot in slots]
        index = torch.tensor(list(slots), device=self.device)
        self.scales.scales = self.scales.scales[index]
        self.scales.good_steps = self.scales.good_steps[index]
        if self.norms is not None:
            self.norms.reorder(slots)

    def _load_entry(self, slot: int, entry: TrialInit) -> None:
        """Load the hyperparameters and the state of a new trial; its weights are already loaded."""
        load_trial(self.optimizer, entry.components.optimizer, slot, entry.components.model)
        self.fused.seeds[slot], self.fused.ages[slot] = self._seeds([entry])[0], entry.age
        self._load_scale(slot, entry)
        self._entries[slot] = _without_state(entry)
        if self.norms is not None:
            self.norms.averages[slot] = entry.noise

    def _seeds(self, entries: Sequence[TrialInit]) -> list[int]:
        """The seeds of the trials' random streams."""
        stream = (self._stream,) if self._stream else ()
        return [mix(entry.settings.seed, *stream) for entry in entries]

    def _load_scale(self, slot: int, entry: TrialInit) -> None:
        if state := entry.components.scaler.state_dict():
            self.scales.scales[slot] = state["scale"]
            self.scales.good_steps[slot] = state["_growth_tracker"]

    def _clip_vector(self) -> Tensor:
        clips = [_clip(entry) for entry in self._entries]
        return torch.tensor(clips, dtype=torch.float64, device=self.device)

    def _drop_unused_clips(self) -> None:
        if all(_clip(entry) == float("inf") for entry in self._entries):
            self.optimizer.clip_norm = None

    def _build_loss(self) -> Callable[..., Tensor]:
        return fused_loss([entry.settings for entry in self._entries])

    def set_lr(self, factors: Sequence[float]) -> None:
        """Set the factors on the trials' learning rates for the next steps."""
        for number, group in enumerate(self.optimizer.groups):
            rates = [e.components.base_lrs[number] * factor for e, factor in zip(self._entries, factors)]
            if rates != group.numbers["lr"]:
                group["lr"] = rates

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def seed_step(self, seed: int, step: int, rank: int) -> None:
        """Does nothing: each trial has a separate random stream."""

    def seed_share(self, seed: int, steps: Sequence[int], share: int, microbatches: int = 1) -> None:
        """Seed a worker's update on shares of the trials' steps, whichever worker takes it.

        A pipeline cuts each share into up to `microbatches`.
        """
        self._stream, entries = share, self._entries
        ages = [step * entry.settings.accumulate * microbatches for step, entry in zip(steps, entries)]
        self.fused.seeds.copy_(torch.tensor(self._seeds(entries)))
        self.fused.ages.copy_(torch.tensor(ages))

    def rest_of_state(
        self, store: dist.Store, prefix: str, weights: Sequence[Tensor], buffers: Sequence[Tensor]
    ) -> list[WhenSynchronized]:
        """What workers that average these weights and buffers average besides when they synchronize."""
        state = OptimizerState(store, f"{prefix}/optimizer", weights, self.optimizer)
        return [state, TrialCounters(self.fused, self.optimizer, self.scales)]

    def of_slot(self, name: str, tensor: Tensor, slot: int) -> Tensor:
        """The part of the trial in `slot` of a tensor that has the shape of the weight `name`."""
        return tensor if name in self.fused.shared else tensor[slot]

    def cut(self, batches: Sequence[Batch], microbatches: Sequence[int], alone: bool) -> list[Round]:
        """The rounds of a step on these batches, one of each trial, with as many microbatches of each."""
        without = [not batch.count for batch in batches]
        # Trials without samples skip the step of a worker alone.
        self.optimizer.skip = torch.tensor(without, device=self.device) if alone and any(without) else None
        return rounds_of(batches, microbatches)

    def share(self, batches: Sequence[Batch]) -> float:
        """The weight of this worker's gradients in the sum: 1, since each round has a weight per trial."""
        return 1.0

    def to_device(self, microbatches: Sequence[TrialMicrobatch]) -> Any:
        """Inputs and target of all trials: the same for all, or stacked and padded."""
        length = max(count for _, count in microbatches)
        return together(self._entries[0].components, [content for content, _ in microbatches], length)

    def stacked(self, contents: Sequence[Any], length: int) -> Any:
        """The inputs and targets of all trials, stacked, padded to `length` rows and on the device."""
        return stacked(self._entries[0].components, contents, length)

    def losses(self, content: Any, counts: Sequence[int] = (), weights: Sequence[float] = ()) -> Tensor:
        """The loss of each trial in a round, over its first `counts` rows (default: all)."""
        without = [slot for slot, weight in enumerate(weights) if weight == 0.0]
        padding = self.fused.padded(counts) if len(set(counts)) > 1 else nullcontext()
        inputs, target = content
        if without:
            self.fused.freeze(without)
        with padding, self._entries[0].components.autocast():
            losses = self.losses_of(forward(self.fused, inputs), target, counts)
        if without:
            self.fused.freeze([])
        return losses

    def losses_of(self, output: Any, target: Any, counts: Sequence[int] = ()) -> Tensor:
        """The loss of each trial for what the model returned, over its first `counts` rows."""
        if self.verdict.loss_alone:
            return losses_alone(self._entries, output, target, counts)
        return losses_of(self.fused, self._entries, self._loss, output, target, counts)

    def weighted(self, losses: Tensor, weights: Sequence[float]) -> Tensor:
        return losses * on_device(tuple(weights), losses.dtype, self.device)

    def begin_scaling(self, losses: Tensor) -> None:
        """Does nothing: the trials' loss scales are created at the start."""

    def backward(self, losses: Tensor) -> None:
        """Add the gradients of the sum of the trials' losses, each times its loss scale."""
        (self.scales.scale(losses) if self.is_scaled else losses).sum().backward()

    def update(self, clip_norm: float | None = None, seed: int | None = None) -> None:
        """Update all trials, each with its `clip_norm`; the optimizers draw no random numbers."""
        if self.is_scaled:
            self.scales.step(self.optimizer, self.optimizer.skip)
        else:
            self.optimizer.step()

    @contextmanager
    def drawing_alike(self, batches: Sequence[Batch], accumulate: int, workers: int) -> Iterator[None]:
        """Around a step of several workers: advance random streams by the same amount on all workers.

        Without it, workers whose share has fewer microbatches would advance less.
        """
        rounds = most_rounds(batches, accumulate, workers)
        ages = self.fused.ages + torch.tensor(rounds, device=self.fused.ages.device)
        yield
        self.fused.ages.copy_(ages)

    @property
    def trial_gradients(self) -> list[Tensor]:
        """The gradients of all trials, the trials axis first."""
        return gradients(self.parameters)

    @property
    def loss_scales(self) -> Tensor:
        """What the loss of each trial, and so its gradients, are multiplied by until the update."""
        return self.scales.scales if self.is_scaled else torch.ones(self.trials)

    def totals(
        self, slots: Sequence[int], settings: Sequence[TrainSettings], share: tuple[int, int]
    ) -> list[Totals]:
        """The totals of the trials in `slots` over a share of the test split."""
        sizes = {
            (_evaluation_size(settings[slot]), id(self._entries[slot].components.test_set)) for slot in slots
        }
        with evaluated_weights(self.optimizer):
            # A forward of all trials costs more than those of a few.
            if 2 * len(slots) <= self.trials or len(sizes) > 1:
                return [self._totals_alone(slot, share) for slot in slots]
            return self._totals_together(slots, sizes.pop()[0], share)

    def add_to(
        self, totals: Totals, slot: int, output: Any, target: Any, count: int, order: tuple[int, int]
    ) -> None:
        """Add a batch of `count` samples that each trial was given to the totals of the one in `slot`."""
        totals.add(self.of_trial(slot), at(output, slot), at(target, slot), count, order)

    def _totals_together(self, slots: Sequence[int], size: int, share: tuple[int, int]) -> list[Totals]:
        totals = [Totals(self.of_trial(slot)) for slot in slots]
        first = self._entries[slots[0]]
        components, settings = first.components, first.settings
        with torch.no_grad(), evaluation_mode(self.fused):
            for number, batch in enumerate(evaluation_batches(components, settings, size, *share)):
                if not batch.count:
                    continue
                inputs, target = to_device(batch.content, components.device, components.dtype)
                with components.autocast():
                    output = forward(self.fused, pytree.tree_map_only(Tensor, Shared, inputs))
                for own, slot in zip(totals, slots):
                    order = (number, share[0])
                    own.add(self.of_trial(slot), at(output, slot), target, batch.count, order)
        return totals

    def _totals_alone(self, slot: int, share: tuple[int, int]) -> Totals:
        entry = self._entries[slot]
        components = replace(entry.components, model=self.fused.trial(slot))
        return totals_of_share(components, entry.settings, *share)

    def of_trial(self, slot: int) -> Components:
        """The components for evaluating the trial in `slot`, without its weights."""
        return self._entries[slot].components

    def settings_of(self, slot: int) -> TrainSettings:
        return self._entries[slot].settings

    def state(self, slot: int = 0) -> EngineState:
        """The state of the trial in `slot`, in the format of a checkpoint of a single run."""
        model = self.fused.trial(slot)
        optimizer = trial_optimizer(self.optimizer, model, slot)
        names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        return EngineState(
            named_state.model_state(model),
            named_state.optimizer_state(optimizer, names),
            loss_scale=self.loss_scale(slot),
            age=int(self.fused.ages[slot]),
        )

    def loss_scale(self, slot: int) -> dict[str, Any]:
        """The state of the trial's loss scaler as in a single run; empty if none is in use."""
        state: dict[str, Any] = self._entries[slot].components.scaler.state_dict()
        if state:
            state["scale"] = self.scales.scales[slot].item()
            state["_growth_tracker"] = int(self.scales.good_steps[slot])
        return state


def rebuild_trial(array: FusedComponents, slot: int) -> TrialInit:
    """A copy of the trial in `slot` that trains without the array, which is unchanged.

    Its model is built by the factory and has the trial's weights and buffers; its optimizer is torch's, with
    the trial's state. A `TrainStep` on its components takes a plain step. Python attributes of modules are
    those of a new model (see `FusionReport.has_python_state`). Within `drawing_as(model, seed, age,
    unfused)`, with the values of the fused module, it draws the same random numbers as the trial in the
    array.
    """
    settings, known = array.settings_of(slot), array.of_trial(slot)
    components = build_components(settings, known.device, (known.train_set, known.test_set))
    trial = array.fused.trial(slot)
    tensors = {**dict(trial.named_parameters()), **dict(trial.named_buffers())}
    with torch.no_grad():
        for name, tensor in (*components.model.named_parameters(), *components.model.named_buffers()):
            # The base of adapters is held once.
            tensor.data = tensors[name].detach()
            if name not in array.fused.shared:
                tensor.data = tensor.data.clone()
    names: dict[Tensor, str] = {parameter: name for name, parameter in trial.named_parameters()}
    state = named_state.optimizer_state(trial_optimizer(array.optimizer, trial, slot), names)
    named_state.load_optimizer_state(components.optimizer, components.names, state)
    components.scaler.load_state_dict(array.loss_scale(slot))
    return TrialInit(settings, components, int(array.fused.ages[slot]))


def together(components: Components, contents: Sequence[Any], length: int) -> Any:
    """Inputs and target of all trials: the same for all, or stacked and padded."""
    if all(content is contents[0] for content in contents):
        return pytree.tree_map_only(
            Tensor, Shared, to_device(contents[0], components.device, components.dtype)
        )
    return stacked(components, contents, length)


def stacked(components: Components, contents: Sequence[Any], length: int) -> Any:
    """The inputs and targets of all trials, stacked, padded to `length` rows and on the device."""
    moved = {id(content): to_device(content, components.device, components.dtype) for content in contents}
    flat, specs = zip(*(pytree.tree_flatten(moved[id(content)]) for content in contents))
    if any(spec != specs[0] for spec in specs):
        raise FusionError("the batches of the trials hold unlike things, expected the same keys in all")
    return pytree.tree_unflatten([_of_all(leaf, length) for leaf in zip(*flat)], specs[0])


def _of_all(leaves: Sequence[Any], length: int) -> Any:
    """One part of the trials' batches, stacked and padded; what is no tensor is the same in all."""
    first = leaves[0]
    if not isinstance(first, Tensor):
        if not all(leaf is first or (type(leaf) is type(first) and bool(leaf == first)) for leaf in leaves):
            raise FusionError(
                f"the batches of the trials hold unlike values that are no tensors ({shown(first)} and "
                f"others); make tensors of them, or leave them out"
            )
        return first
    sizes = sorted({tuple(leaf.shape[1:]) for leaf in leaves})
    if len(sizes) > 1:
        raise FusionError(
            f"the batches of the trials have samples of unlike sizes, such as {list(sizes[0])} and "
            f"{list(sizes[1])}; pad all to one, in the data set or by data.collate_fn"
        )
    return pad(leaves, length)


def fused_loss(settings: Sequence[TrainSettings]) -> Callable[..., Tensor]:
    """The loss, with per-trial values for options that differ between trials."""
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
    """The loss of each trial over its rows, computed for all trials at once where possible."""
    if entries[0].settings.loss in LOSSES or len(set(counts)) <= 1:
        losses: Tensor = fused.map(loss, output, target)
        return losses
    # A custom loss may combine the rows of a batch in any way, so it must not see padding.
    return losses_alone(entries, output, target, counts)


def losses_alone(entries: Sequence[TrialInit], output: Any, target: Any, counts: Sequence[int]) -> Tensor:
    """The loss of each trial over its rows, trial by trial."""

    def rows_of(value: Any, slot: int) -> Any:
        if isinstance(value, Shared):
            return value.tensor
        if not isinstance(value, Tensor):
            return value.of(slot) if isinstance(value, PerTrial) else value
        return value[slot][: counts[slot]] if counts and value[slot].dim() else value[slot]

    return torch.stack(
        [
            entry.components.loss(*pytree.tree_map(lambda x, s=slot: rows_of(x, s), (output, target)))
            for slot, entry in enumerate(entries)
        ]
    )


def at(output: Any, slot: int) -> Any:
    """One trial's part of what all trials returned."""
    return pytree.tree_map(lambda x: x[slot] if isinstance(x, Tensor) else x, output)


def _without_state(entry: TrialInit) -> TrialInit:
    """`entry` without the weights that the array now holds."""
    empty = nn.Parameter(torch.zeros(0))
    components = replace(entry.components, model=nn.Module(), names={}, optimizer=torch.optim.SGD([empty]))
    return replace(entry, components=components)


def _clip(entry: TrialInit) -> float:
    return float("inf") if entry.settings.clip_norm is None else entry.settings.clip_norm


def _evaluation_size(settings: TrainSettings) -> int:
    return settings.evaluate.batch_size or settings.data.batch_size
